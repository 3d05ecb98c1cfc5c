"""Promise: a score names the answers that it is of and the scorer that gave it; tables, status and runs compare them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mmkv_bench.cli.main import main
from mmkv_bench.errors import StoreError
from mmkv_bench.store.store import Store
from mmkv_bench.store.tally import digests_of_cells, tally
from mmkv_bench.tables.status import status
from mmkv_bench.tables.stored_rows import load
from tests.run.setting import done, everything, scores
from tests.store.store_examples import write_tables

PLAIN = (
    "dataset=pages_lookup",
    "method=snapkv",
    "budget=16",
    "limit=4",
    "fidelity=off",
    "dataset.generation.max_new_tokens=2",
)
STAMPS = ("schema_version", "worker", "committed_at")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("scored") / "rows"
    done(root, *PLAIN)
    return root


def answered_again(root: Path, answer: str = "another") -> None:
    """One answer is made again, as `retry` does it."""
    store = Store(root)
    row = next(row for row in store.responses().to_pylist() if row["status"] == "ok")
    with store.writer("later") as writer:
        writer.commit([{k: v for k, v in row.items() if k not in STAMPS} | {"answer": answer}])


def test_digests_are_those_of_an_obvious_sum_in_any_order():
    rng = np.random.default_rng(0)
    texts = ["", "a", "b", None]
    plain = [(f"c{rng.integers(3)}", f"s{number}", "ok", texts[rng.integers(4)]) for number in range(40)]

    def slow(cell: str) -> str:
        sums = [0, 0]
        for name, sample, word, text in plain:
            parts = [hashlib.sha256(t.encode()).digest() for t in (sample, "-" if text is None else f"={text}", word)]
            for lane in (0, 1):
                product = 1
                for part in parts:
                    product *= int.from_bytes(part[8 * lane : 8 * lane + 8], "little") | 1
                sums[lane] += product * (name == cell)
        return f"{sums[1] % 2**64:016x}{sums[0] % 2**64:016x}"

    for _ in range(3):
        rng.shuffle(plain)
        table = pa.table(dict(zip(("cell", "sample_id", "status", "answer"), zip(*plain, strict=True), strict=True)))
        assert digests_of_cells(table) == {cell: slow(cell) for cell in {row[0] for row in plain}}
    swapped = table.set_column(3, "answer", table["answer"].take(np.random.default_rng(1).permutation(40)))
    assert digests_of_cells(swapped) != digests_of_cells(table)


@pytest.mark.slow
def test_scores_carry_the_digest_of_what_the_store_holds(rows):
    held = tally(Store(rows)).digests
    metrics = Store(rows).metrics().to_pylist()
    assert {row["cell"]: row["answers_digest"] for row in metrics} == {
        cell: digest for cell, (_, digest) in held.items()
    }
    assert len({row["scorer_digest"] for row in metrics}) == 1 and {row["scorer_files"] for row in metrics} == {None}
    assert done(rows, *PLAIN).document["scored"] == 0


@pytest.mark.slow
def test_answers_that_were_made_again_are_scored_again_and_shown_as_unscored(rows, tmp_path, capsys):
    root = Path(shutil.copytree(rows, tmp_path / "rows"))
    answered_again(root)
    assert [(one.scored, one.stale) for one in status(Store(root)).datasets] == [(1, 1)]
    left = set(load(root).samples["cell"])
    assert len(left) == 1 and len(set(load(rows).samples["cell"])) == 2
    assert done(root, *PLAIN).document["scored"] == 1
    assert [(one.scored, one.stale) for one in status(Store(root)).datasets] == [(2, 0)]
    assert main(["tables", str(root)]) == 0 and "another" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_slow_score_beside_new_answers_is_found_out(rows, tmp_path, monkeypatch):
    """16 of 24 scores contradicted their answers for ever."""
    root = Path(shutil.copytree(rows, tmp_path / "rows"))
    answered_again(root, "before")
    plain = Store.write_scores

    def slow(self, blocks, *more, **options):
        held = list(blocks)
        answered_again(root, "after")
        plain(self, iter(held), *more, **options)

    monkeypatch.setattr(Store, "write_scores", slow)
    done(root, *PLAIN)
    monkeypatch.setattr(Store, "write_scores", plain)
    assert done(root, *PLAIN).document["scored"] == 1
    fresh = Path(shutil.copytree(root, tmp_path / "fresh"))
    for table in ("samples", "metrics"):
        shutil.rmtree(fresh / table)
    done(fresh, *PLAIN)
    assert everything(fresh) == everything(root) and scores(fresh) == scores(root)


def test_scores_without_their_answers_are_refused(rows, tmp_path, capsys):
    root = Path(shutil.copytree(rows, tmp_path / "rows"))
    shutil.rmtree(root / "responses")
    with pytest.raises(StoreError, match="has scores of 8 answers in 2 cells .*, but not the answers"):
        load(root)
    assert main(["tables", str(root)]) != 0 and "restore the folder responses/" in capsys.readouterr().err


def test_scores_older_than_digests_read_as_before_and_score_adds_them(rows, tmp_path):
    root = Path(shutil.copytree(rows, tmp_path / "rows"))
    store = Store(root)
    numbers = scores(root)
    evidence = ("answers_digest", "scorer_digest", "scorer_files")
    metrics = store.metrics()
    for name in evidence:
        metrics = metrics.set_column(metrics.column_names.index(name), name, pa.nulls(metrics.num_rows, pa.string()))
    write_tables(store, store.samples().drop_columns(["schema_version"]), metrics.drop_columns(["schema_version"]))
    assert len(load(root).samples) == len(load(rows).samples)
    assert done(root, *PLAIN).document["scored"] == 0
    assert done(root, *PLAIN, "stage=score").document["scored"] == 2
    assert scores(root) == numbers and None not in store.metrics()["answers_digest"].to_pylist()
    assert done(root, *PLAIN, "stage=score").document["scored"] == 0


TASK = """
task: refs
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visual
doc_to_text: question
doc_to_target: answer
process_results: !function utils.scored
generation_kwargs: {{max_new_tokens: 2}}
metric_list:
  - {{metric: right, aggregation: mean, higher_is_better: true}}
"""
UTILS = """
import json
from pathlib import Path
def visual(doc):
    return []
def scored(doc, results):
    return {"right": json.loads((Path(__file__).parent / "refs.json").read_text())[doc["answer"]]}
"""


@pytest.mark.slow
def test_files_that_a_scorer_opens_are_part_of_its_scores(tmp_path):
    """refs.json beside utils.py: fresh all 0, stored all 1, 0 scored."""
    task = tmp_path / "task"
    task.mkdir()
    (task / "refs.yaml").write_text(TASK.format(folder=task))
    (task / "utils.py").write_text(UTILS)
    (task / "rows.jsonl").write_text(json.dumps({"question": "What?", "answer": "yes"}) + "\n")
    (task / "refs.json").write_text('{"yes": 1.0}')
    of_task = ("dataset=lmms_eval", "dataset.task=refs", f"dataset.include_path={task}")
    command = (*of_task, "method=snapkv", "budget=8", "fidelity=off")
    root = tmp_path / "rows"
    done(root, *command)
    (known,) = {row["scorer_files"] for row in Store(root).metrics().to_pylist()}
    assert set(json.loads(known)) == {"refs.json"}
    assert done(root, *command).document["scored"] == 0
    (task / "refs.json").write_text('{"yes": 0.0}')
    again = done(root, *command)
    assert (again.generated, again.document["scored"]) == (0, 2)
    assert {row["value"] for row in scores(root) if row["metric"] == "right"} == {0.0}
