"""What a dataset's content is, as one digest: it goes into the identity of every cell."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.datasets import page_data, sources
from mmkv_bench.datasets.catalog import includes, task_file
from mmkv_bench.datasets.task_spec import TaskSpec
from mmkv_bench.evaluation import task_code
from mmkv_bench.evaluation.documents import documents

if TYPE_CHECKING:
    import datasets

ROWS = 100  # rows hashed at a time


def fingerprint(spec: TaskSpec) -> str:
    """Digest (16 hex digits) of the dataset's content, which no `limit` changes.

    Pages: questions, answers and pixels of the first chunk (all chunks of the test split are held to frozen digests).
    Other tasks: every row of the evaluated split, undecoded (about a second per GB), the task's YAML files, the version
    of lmms-eval, whose code makes the prompts, and the Python files that YAML files which are not lmms-eval's own can reach.
    """
    if spec.is_pages:
        content = page_data.fingerprint(spec.name, spec.split or "test")
    else:
        docs = documents(spec, None)
        path = task_file(spec)
        docs.digest = docs.digest or _rows_digest(docs.full[docs.split])
        parts = [docs.digest, _yaml_digest(path), version("lmms-eval"), *task_code.digests(path)]
        content = " ".join(parts)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def inputs_of(spec: TaskSpec) -> list[Path]:
    """The local files that a dataset's content and code are read from; media that its rows name are not among them."""
    return [] if spec.is_pages else sorted({*sources.data_files(spec), *task_code.files(task_file(spec))})


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
