"""Promise: what is wrong with one document is that sample's row, and what is wrong with one dataset stops no other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmkv_bench.datasets import fixtures
from tests.cli.setting import CHECKOUT
from tests.each import each
from tests.run.setting import done, go, metrics, responses, scores

ASKED = ("dataset=[docvqa,ocrbench]", "method=[full]", "limit=3", "fidelity=off")
SHORT = tuple(f"datasets.{name}.generation.max_new_tokens=2" for name in ("docvqa", "ocrbench"))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Local data of two datasets, as data.root takes them."""
    for name in ("docvqa", "ocrbench"):
        shutil.copytree(fixtures.folder(name), tmp_path / "data" / name)
    return tmp_path / "data"


def emptied(folder: Path, dataset: str, column: str, row: int) -> None:
    """Make one value null."""
    for file in (folder / dataset).rglob("*.parquet"):
        table = pq.read_table(file)
        values = table[column].to_pylist()
        values[row] = None
        place = table.column_names.index(column)
        pq.write_table(table.set_column(place, table.schema.field(column), pa.array(values, table[column].type)), file)


def by_dataset(root: Path, count: int) -> dict[str, list[str]]:
    """Dataset -> statuses of its rows in the order of documents."""
    found: dict[str, list[str]] = {}
    for (_, sample), row in sorted(responses(root).items(), key=lambda item: item[0][1]):
        found.setdefault(sample.rpartition("-")[0], []).append(row["status"])
    assert {len(statuses) for statuses in found.values()} == {count}
    return found


@pytest.mark.full
@pytest.mark.parametrize(("dataset", "column"), [("docvqa", "image"), ("ocrbench", "question")])
def test_an_empty_field_is_that_samples_row_and_the_run_goes_on(folder, tmp_path, dataset, column):
    emptied(folder, dataset, column, row=1)
    outcome = go(tmp_path / "rows", *ASKED, *SHORT, f"data.root={folder}")
    assert outcome.code == 1
    expected = {"docvqa": ["ok"] * 3, "ocrbench": ["ok"] * 3} | {dataset: ["ok", "error", "ok"]}
    assert by_dataset(tmp_path / "rows", 3) == expected
    why = [row["error"] for row in responses(tmp_path / "rows").values() if row["status"] == "error"]
    assert f"sample {dataset}-000001 cannot be read" in why[0]


@pytest.mark.full
def test_a_reference_that_no_scorer_can_read_leaves_the_other_dataset_its_scores(folder, tmp_path):
    emptied(folder, "docvqa", "answers", row=1)
    outcome = go(tmp_path / "rows", *ASKED, *SHORT, f"data.root={folder}")
    assert outcome.code == 1
    assert (
        "scoring docvqa stopped: the scorer of lmms-eval's task docvqa_val failed at sample docvqa-000001"
        in outcome.out
    )
    assert {row["dataset"] for row in metrics(tmp_path / "rows")} == {"ocrbench"}
    assert by_dataset(tmp_path / "rows", 3) == {"docvqa": ["ok"] * 3, "ocrbench": ["ok"] * 3}
    assert outcome.document["scored"] == 1
    again = go(tmp_path / "rows", *ASKED, *SHORT, f"data.root={folder}")
    assert (again.code, again.document["scored"], list(again.document["stopped"])) == (1, 0, ["scoring docvqa"])
    assert "Nothing to do" not in again.out


@pytest.mark.slow
def test_hr_bench_without_a_judge_does_not_say_what_was_read(tmp_path):
    words = ("dataset=hrbench4k", "data=fixture", "method=[full]", "limit=2", "fidelity=off")
    go(tmp_path / "rows", *words, "datasets.hrbench4k.generation.max_new_tokens=2")
    assert {row["value"] for row in scores(tmp_path / "rows")} == {None}
    assert not {row["metric"] for row in scores(tmp_path / "rows")} & {"parse_failed"}


@pytest.mark.full
@each("value", ["", "[1,"])
def test_a_field_that_is_no_literal_is_that_samples_row_too(tmp_path, value):
    shutil.copytree(fixtures.folder("mmmu"), tmp_path / "data" / "mmmu")
    for file in (tmp_path / "data" / "mmmu").rglob("*.parquet"):
        table = pq.read_table(file)
        values = [value if row == 1 else old for row, old in enumerate(table["options"].to_pylist())]
        place = table.column_names.index("options")
        pq.write_table(table.set_column(place, table.schema.field("options"), pa.array(values, pa.string())), file)
    words = ("dataset=mmmu", f"data.root={tmp_path / 'data'}", "method=[full]", "limit=3", "fidelity=off")
    go(tmp_path / "rows", *words, "datasets.mmmu.generation.max_new_tokens=2", "stage=generate")
    assert by_dataset(tmp_path / "rows", 3) == {"mmmu": ["ok", "error", "ok"]}


@pytest.mark.full
def test_a_run_whose_reader_has_gone_says_so_and_fails(tmp_path):
    words = ["dataset=pages_walk", "method=[full]", "limit=1", f"out={tmp_path / 'rows'}"]
    run = f"{sys.executable} -m mmkv_bench {' '.join(words)} | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=3600, env=CHECKOUT)
    assert ended.returncode == 1 and "the output was closed before the run's end" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_the_only_dataset_of_a_run_ends_it_with_the_sentence(folder, tmp_path):
    emptied(folder, "docvqa", "answers", row=1)
    words = ("dataset=docvqa", *ASKED[1:], SHORT[0], f"data.root={folder}")
    outcome = go(tmp_path / "rows", *words)
    assert outcome.code == 1 and "failed at sample docvqa-000001" in outcome.err


@pytest.mark.full
def test_two_uses_of_placeholders_in_one_process_are_two_prompts(tmp_path):
    hashes = []
    for use in ("interleave", "remove", "keep"):
        words = (
            "dataset=muirbench",
            "data=fixture",
            "method=[full]",
            "limit=1",
            f"datasets.muirbench.placeholders={use}",
        )
        done(tmp_path / use, *words, "datasets.muirbench.generation.max_new_tokens=2", "fidelity=off")
        hashes += [row["prompt_hash"] for row in responses(tmp_path / use).values()]
    assert len(set(hashes)) == 3


@pytest.mark.full
def test_a_dataset_that_stops_in_a_split_run_is_told_and_the_other_is_scored(folder, tmp_path):
    for file in (folder / "docvqa").rglob("*.parquet"):
        table = pq.read_table(file)
        pq.write_table(
            table.set_column(
                table.column_names.index("answers"), "answers", pa.nulls(table.num_rows, table["answers"].type)
            ),
            file,
        )
    words = [*ASKED, *SHORT, f"data.root={folder}", f"out={tmp_path / 'rows'}"]
    command = [sys.executable, "-m", "mmkv_bench", "launch", "--processes", "2", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=CHECKOUT)
    assert ended.returncode == 1 and "docvqa stopped: " in ended.stdout + ended.stderr
    assert {row["dataset"] for row in metrics(tmp_path / "rows")} == {"ocrbench"}
