"""What documentation.yaml calls: stretches of release notes, their prompt and a score of the few tokens that are decoded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path


def read(folder, config):
    """Read the committed stretches (`tools/documentation.py` draws them); no folder is needed."""
    import datasets

    file = Path(__file__).parent / "stretches.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
    return {"test": datasets.Dataset.from_list(rows)}


def doc_to_messages(doc):
    """The prompt as one user message: the stretch itself, for `model.template=plain`."""
    return [{"role": "user", "content": [{"type": "text", "text": doc["context"]}]}]


def process_results(doc, results):
    """1 where the document goes on with what was decoded."""
    answer = results[0].strip()
    return {"begins_alike": float(bool(answer) and doc["continuation"].startswith(answer))}
