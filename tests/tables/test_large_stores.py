"""Promise: a store that memory does not hold gives the same tables, read some cells at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from mmkv_bench.run import scoring
from mmkv_bench.run.scoring import cells_to_score
from mmkv_bench.store.store import Store
from mmkv_bench.tables import stored_rows as reading
from mmkv_bench.tables.build import build
from mmkv_bench.tables.metric_rows import metrics_rows
from mmkv_bench.tables.stored_rows import ReadOnce, cells_of, load
from tests.tables.examples import Example, csv_cells, markdown, zeros_and_ones
from tests.tables.test_oracle import random_example


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Cells that miss samples, seeds, fallbacks of several names, samples chosen by id, and a cell nobody has scored."""
    made = random_example(1)
    for row in made.responses[-3:]:
        row |= {"chosen": True, "doc_id": 900}
    cell = made.responses[0]["cell"]
    made.samples = [row for row in made.samples if row["cell"] != made.cells[1]["cell"]]
    made.metrics = metrics_rows(pd.DataFrame(made.samples), pd.DataFrame(made.cells))
    folder = made.write(tmp_path_factory.mktemp("large"))
    with Store(folder).writer("again") as writer:  # a newer row of an answer
        writer.commit([next(row for row in made.responses if row["cell"] == cell) | {"fallback": ["padded"]}])
    return folder


def shown(root) -> tuple[str, str]:
    tables = build(load(root))
    return markdown(tables), csv_cells(tables)


def read(monkeypatch) -> list[int]:
    """Numbers of cells that answers are read of, from now on."""
    found: list[int] = []
    responses = Store.responses

    def counting(self, cells=None, columns=None, coded=False):
        found.append(len(cells or ()))
        return responses(self, cells, columns, coded)

    monkeypatch.setattr(Store, "responses", counting)
    return found


@pytest.mark.slow
def test_tables_of_blocks_of_cells_are_those_of_all_cells_at_once(root, monkeypatch):
    whole = shown(root)
    assert "padded" in whole[0] and "chosen by id" in whole[0] and "without scores yet" in whole[0]
    monkeypatch.setattr(reading, "AT_ONCE", 100)
    cells, sizes = Store(root).cells().num_rows, read(monkeypatch)
    assert shown(root) == whole
    blocks = [size for size in sizes if size]
    assert len(blocks) > 3 and max(blocks) < cells // 2, "some cells at a time"
    monkeypatch.setattr(reading, "AT_ONCE", 1)
    assert shown(root) == whole


@pytest.mark.slow
def test_what_is_left_to_score_is_the_same_in_blocks(root, monkeypatch):
    store = Store(root)
    cells = [SimpleNamespace(cell=name) for name in store.cells()["cell"].to_pylist()]
    left = cells_to_score(store, cells, rows=ReadOnce(store))
    assert 0 < len(left) < len(cells) and cells_to_score(store, cells) == left
    monkeypatch.setattr(reading, "AT_ONCE", 100)  # what is read once is large then
    monkeypatch.setattr(scoring, "AT_ONCE", 100)
    sizes = read(monkeypatch)
    assert cells_to_score(store, cells, rows=ReadOnce(store)) == cells_to_score(store, cells) == left
    assert len(sizes) > 6, "some cells at a time"


def test_metrics_of_some_cells_beside_full_are_those_of_all_cells_at_once():
    made = random_example(1)
    samples, cells = pd.DataFrame(made.samples), pd.DataFrame(made.cells)
    whole = metrics_rows(samples, cells)
    (full,) = cells["cell"][cells["base"] == "full"]
    for of in (2, 5):
        found = []
        for start in range(0, len(cells), of):
            own = {full, *cells["cell"][start : start + of]}
            rows = metrics_rows(samples[samples["cell"].isin(own)], cells[cells["cell"].isin(own)])
            found += [row for row in rows if row["cell"] in {*cells["cell"][start : start + of]}]
        assert found == whole


def test_configurations_are_in_memory_once_and_all_else_of_cells_is_as_stored(tmp_path: Path) -> None:
    made = Example()
    for number in range(6):
        made.add("snapkv", 16 * (number + 1), zeros_and_ones(1, 2), config=f'{{"limit": {number % 2}}}')
    store = Store(made.write(tmp_path / "rows"))
    found, stored = cells_of(store), store.cells().to_pandas()
    assert len({id(text) for text in found["config"]}) == 2 and list(found["config"]) == list(stored["config"])
    pd.testing.assert_frame_equal(found.drop(columns="config"), stored.drop(columns="config"))
    assert list(found) == list(stored) and list(cells_of(store, ["c002"])["cell"]) == ["c002"]
