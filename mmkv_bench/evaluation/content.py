"""Digests of a dataset's content and of its scoring code; the first goes into the identity of every cell."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.checksums import cache_dir
from mmkv_bench.datasets import page_data, sources
from mmkv_bench.datasets.catalog import includes, task_file
from mmkv_bench.datasets.task_spec import TaskSpec
from mmkv_bench.errors import DataError
from mmkv_bench.evaluation import task_code
from mmkv_bench.evaluation.documents import changed, conversions, documents
from mmkv_bench.evaluation.files_read import OpenedFiles

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


_SYSTEM = ("/dev", "/etc", "/lib", "/opt", "/proc", "/sys", "/usr", "/var")
SCORING = 1  # version of what we make of a scorer's values


def scorer_digest(spec: TaskSpec) -> str:
    """Digest (16 hex digits) of what scores a task's answers: its YAML and Python files, lmms-eval's version and ours."""
    path = task_file(spec)
    parts = [str(SCORING), version("lmms-eval"), _yaml_digest(path), *task_code.digests(path)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def scorer_files(spec: TaskSpec, heard: OpenedFiles, store: Path) -> dict[str, str]:
    """Files that a user's task opened while it scored: path from its YAML -> digest of the content, "" for a missing file.

    Packages, caches, the dataset's rows and the store's own files are left out.
    """
    if spec.is_pages or not spec.include_path:
        return {}
    path = task_file(spec).resolve()
    rows = {file.resolve() for file in sources.data_files(spec)}
    ours = (sys.prefix, sys.base_prefix, cache_dir(), conversions(), sources.home(None), store, tempfile.gettempdir())
    elsewhere = [Path(place).resolve() for place in (*ours, *_SYSTEM)]
    elsewhere = [place for place in elsewhere if not path.is_relative_to(place)]
    digests = {}
    for name in sorted(heard.files):
        file = Path(name).resolve()
        if file in rows or file.suffix in (".yaml", ".yml") or any(file.is_relative_to(place) for place in elsewhere):
            continue
        digests[os.path.relpath(file, path.parent)] = _content_of(file)
    return digests


def files_as_scored(spec: TaskSpec, stored: str) -> bool:
    """True where the files of `scorer_files` are unchanged. stored: the column of `metrics`; False where it is not JSON."""
    folder = task_file(spec).resolve().parent
    try:
        return all(_content_of(folder / name) == digest for name, digest in dict(json.loads(stored)).items())
    except (ValueError, TypeError):
        return False


def _content_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""


def confirm(spec: TaskSpec, expected: str) -> None:
    """Raise DataError where a dataset's files no longer have the fingerprint `expected`: their answers and scores would stand
    under the old one."""
    if not spec.is_pages and (changed(spec) or fingerprint(spec) != expected):
        raise DataError(
            f"the data or the task's code of {spec.dataset} changed while the run went on; what it stored stands. Put the files "
            "back and run the same command again, or run it as they are now for cells of their own"
        )


def inputs_of(spec: TaskSpec) -> list[Path]:
    """The local files of a dataset's rows and code; media that its rows name are left out."""
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
