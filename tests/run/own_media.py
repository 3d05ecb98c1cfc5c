"""A lmms-eval task of one's own whose rows name a file each, as a folder that `dataset.include_path` takes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

_UTILS = """
from pathlib import Path

from PIL import Image

def visual(doc):
    path = Path(__file__).parent / doc["file"]
    return [{opened}]

def text(doc):
    return "What is shown?"

def scored(doc, results):
    return {{"exact": float(results[0] == doc["answer"])}}
"""
_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visual
doc_to_text: !function utils.text
doc_to_target: answer
process_results: !function utils.scored
generation_kwargs: {{max_new_tokens: {tokens}}}
metric_list:
  - {{metric: exact, aggregation: mean, higher_is_better: true}}
"""
PICTURE = 'Image.open(path).convert("RGB")'
VIDEO = "str(path)"


def write_task(folder: Path, name: str, files: Iterable[str], opened: str, tokens: int) -> Path:
    """The task `name` in `folder`; files: of its rows, by their path there; opened: what its code makes of a `path`."""
    rows = [{"file": file, "answer": "yes"} for file in files]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(_TASK.format(name=name, folder=folder, tokens=tokens))
    (folder / "utils.py").write_text(_UTILS.format(opened=opened))
    return folder
