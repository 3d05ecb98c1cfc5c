"""Promise: rows are those of the bytes that lie there now, whatever another library keeps of the path that they lie at."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmkv_bench.datasets import sources
from mmkv_bench.datasets.specs import TaskSpec, spec_from_config
from mmkv_bench.evaluation import documents
from mmkv_bench.evaluation.documents import forget_changed
from mmkv_bench.evaluation.fingerprints import fingerprint

TASK = """
task: {name}
dataset_path: {kind}
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visual
doc_to_text: question
doc_to_target: answer
generation_kwargs: {{max_new_tokens: 2}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
UTILS = "def visual(doc):\n    return []\n"


def write(file: Path, answers: list[str]) -> None:
    """Rows in a file whose times do not say that they are others: as cp -p, tar and rsync -t leave them."""
    rows = [{"question": f"What is {number}?", "answer": answer} for number, answer in enumerate(answers)]
    if file.is_dir():
        import datasets

        shutil.rmtree(file)
        datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(file)
    elif file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        file.write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in [file, *file.rglob("*")] if file.is_dir() else [file]:
        os.utime(path, ns=(1, 1))


def own_task(folder: Path, kind: str, file: Path) -> TaskSpec:
    folder.mkdir()
    name = f"replaced_{kind}"
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, file=file))
    (folder / "utils.py").write_text(UTILS)
    return spec_from_config(name, {"task": name, "include_path": str(folder)})


def answers(spec: TaskSpec) -> list[str]:
    forget_changed(spec)  # as a plan does
    docs = documents.documents(spec, None)
    return docs.full[docs.split]["answer"][:]


@pytest.mark.slow
def test_replaced_files_of_equal_times_are_read_anew_and_give_another_fingerprint(tmp_path):
    for kind, name in (("parquet", "rows.parquet"), ("json", "rows.jsonl"), ("csv", "rows.csv")):
        file = tmp_path / name
        write(file, ["one", "two"])
        spec = own_task(tmp_path / kind, kind, file)
        assert sources.data_files(spec) == [file]
        assert answers(spec) == ["one", "two"]
        first = fingerprint(spec)
        for process in ("the same", "another"):
            changed = ["six", f"ten of {process}"]
            write(file, changed)
            if process == "another":
                documents._LOADED.clear()
            assert answers(spec) == changed, (kind, process)
            assert fingerprint(spec) != first
        write(file, ["one", "two"])
        assert answers(spec) == ["one", "two"] and fingerprint(spec) == first


def test_replaced_folders_are_read_anew(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, ["one", "two"])
    task = own_task(tmp_path / "task", "json", tmp_path / "nothing.jsonl")
    spec = spec_from_config(
        task.name, {"task": task.name, "include_path": task.include_path, "dataset_path": str(folder)}
    )
    assert {file.suffix for file in sources.data_files(spec)} == {".json", ".arrow"}
    assert answers(spec) == ["one", "two"]
    first = fingerprint(spec)
    write(folder, ["six", "ten"])
    assert answers(spec) == ["six", "ten"] and fingerprint(spec) != first
