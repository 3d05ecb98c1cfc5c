"""What a dataset's content is, as one digest: it goes into the identity of every cell."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.datasets import page_data
from mmkv_bench.datasets.catalog import includes, lmms_eval_folder, task_file
from mmkv_bench.datasets.task_spec import TaskSpec
from mmkv_bench.evaluation.documents import documents

if TYPE_CHECKING:
    import datasets

ROWS = 100  # rows hashed at a time


def fingerprint(spec: TaskSpec) -> str:
    """Digest (16 hex digits) of the dataset's content, which no `limit` changes.

    Pages: questions, answers and pixels of the first chunk (all chunks of the test split are held to frozen digests).
    Other tasks: every row of the evaluated split, undecoded (about a second per GB), the task's YAML files, the version
    of lmms-eval, whose code makes the prompts, and the Python files beside YAML files that are not lmms-eval's own.
    """
    if spec.is_pages:
        content = page_data.fingerprint(spec.name, spec.split or "test")
    else:
        docs = documents(spec, None)
        path = task_file(spec)
        docs.digest = docs.digest or _rows_digest(docs.full[docs.split])
        parts = [docs.digest, _yaml_digest(path), version("lmms-eval"), *code_digests(path)]
        content = " ".join(parts)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _rows_digest(data: datasets.Dataset) -> str:
    import pyarrow as pa

    class Digest:  # a file to write into
        closed = False

        def __init__(self) -> None:
            self.sha256 = hashlib.sha256()

        def write(self, content: bytes) -> int:
            self.sha256.update(content)
            return len(content)

        def flush(self) -> None: ...

        def close(self) -> None: ...

    sink = Digest()
    tables = data.with_format("arrow").iter(batch_size=ROWS)  # slices of equal length, however the data are stored
    writer = None
    for table in tables:
        writer = writer or pa.ipc.new_stream(sink, table.schema.remove_metadata())
        writer.write_table(table.replace_schema_metadata().combine_chunks())
    return sink.sha256.hexdigest()


def _yaml_digest(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes())
    for included in includes(path):
        digest.update(_yaml_digest(included).encode())
    return digest.hexdigest()


def code_digests(path: Path) -> list[str]:
    """Of each Python file beside a task's YAML and those it includes; none where lmms-eval's version stands for them."""
    code = {file for folder in _folders(path) for file in folder.glob("*.py")}
    return sorted(f"{file.name}:{hashlib.sha256(file.read_bytes()).hexdigest()}" for file in code)


def _folders(path: Path) -> set[Path]:
    """Folders of a task's YAML and of those it includes, without lmms-eval's own."""
    own = set() if path.resolve().is_relative_to(lmms_eval_folder().resolve()) else {path.resolve().parent}
    return own.union(*(_folders(included) for included in includes(path)))
