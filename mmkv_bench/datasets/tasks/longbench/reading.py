"""The documents of a LongBench task, out of the files in data.zip of the hub dataset THUDM/LongBench.

`data/<task>.jsonl` has one {"input", "context", "answers": [str, ...], "length", "dataset", "language",
"all_classes": [str, ...] | null, "_id"} a line.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.datasets.tasks.files import as_split, find, load_json, load_records
from mmkv_bench.datasets.tasks.longbench.subtasks import own_name, subtask
from mmkv_bench.errors import DataError

if TYPE_CHECKING:
    import datasets

FIELDS = ("input", "context", "answers", "all_classes", "length", "_id")
COLUMNS = {
    "sample_id": "string",
    "task": "string",
    "template": "string",
    "input": "string",
    "context": "string",
    "answers": "string[]",
    "all_classes": "string[]",
    "length": "int32",
    "document": "string",  # digest of the context: questions about one text are no independent samples
}
PROMPTS = "dataset2prompt.json"


def read_task(folder: Path, task: str) -> dict[str, datasets.Dataset]:
    """The task's documents as the split `test`.

    Args:
        folder: has `data/<task>.jsonl` or `<task>.jsonl`, and may have the benchmark's own `config/dataset2prompt.json`.

    Raises:
        DataError: files that are missing or not in the released schema.
    """
    name = own_name(task)
    prompt = _own_prompt(folder, name) or subtask(task).prompt
    file = find(folder, (f"data/{name}.jsonl", f"{name}.jsonl"), f"the file of {task}")
    rows = []
    for position, record in enumerate(load_records(file, FIELDS)):
        answers = record["answers"]
        if not isinstance(answers, list) or not answers:
            raise DataError(f"sample {position} of {file} has no answers; give the released file")
        row = {field: record[field] for field in ("input", "context", "length")}
        row |= {"sample_id": str(record["_id"]), "task": task, "template": prompt}
        row |= {"document": hashlib.sha256(str(record["context"]).encode()).hexdigest()[:16]}
        rows.append(row | {"answers": [str(text) for text in answers], "all_classes": record["all_classes"] or []})
    return as_split(rows, COLUMNS, "test")


def _own_prompt(folder: Path, name: str) -> str | None:
    """The benchmark's wording, if its file lies beside the data."""
    for place in (folder / "config" / PROMPTS, folder / PROMPTS):
        if place.is_file():
            prompts = load_json(place)
            if not isinstance(prompts, dict) or not isinstance(prompts.get(name), str):
                raise DataError(
                    f"{place} has no prompt of {name}; give the released file, or remove it to use our wording"
                )
            return prompts[name]
    return None
