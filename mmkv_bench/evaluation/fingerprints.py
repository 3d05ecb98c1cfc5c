"""Digests of a dataset's content, of its prompts and of its scoring code. The content's digest enters every cell's
identity.

A dataset's fingerprint covers its rows. Files that rows name by paths are covered by the prompt's hash in each response
row, so one more picture does not change other samples. A prompt depends on its row, the task's files and the files
opened for it. Its hash is remembered with the states of these files (`file_state`), in this process and in `prompts/`
of the cache, so that checking a million samples again decodes no file. Prompts of a user's task, or with unknown files,
are made again in each process.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmkv_bench.datasets import page_data, sources
from mmkv_bench.datasets.messages import Conversation
from mmkv_bench.datasets.specs import TaskSpec
from mmkv_bench.datasets.task_yaml import includes, plain_config, task_file
from mmkv_bench.errors import DataError
from mmkv_bench.evaluation import task_code
from mmkv_bench.evaluation.documents import (
    READ_AT_IMPORT,
    changed,
    conversions,
    documents,
    media_columns,
    paths_without_bytes,
)
from mmkv_bench.evaluation.task_code import OpenedFiles
from mmkv_bench.file_state import State, cache_dir, digest_of, outlives_the_process, state_of

if TYPE_CHECKING:
    import datasets


ROWS = 100  # number of rows hashed at a time
version = cache(metadata.version)


def fingerprint(spec: TaskSpec) -> str:
    """Return a digest (16 hex digits) of the dataset's content, which does not depend on `limit`.

    Pages: questions, answers and pixels of the first chunk (tests check all chunks of the test split against frozen digests).
    Other tasks: every row of the evaluated split, undecoded (about a second per GB), the task's YAML files, the version of
    lmms-eval, whose code makes the prompts, and the Python files that YAML files outside of lmms-eval can reach.
    """
    if spec.is_pages:
        content_digest = page_data.fingerprint(spec.name, spec.split or "test")
    else:
        docs = documents(spec, None)
        path = task_file(spec)
        docs.digest = docs.digest or _rows_digest(docs.full[docs.split])
        digest_parts = [docs.digest, _yaml_digest(path), version("lmms-eval"), *task_code.digests(path)]
        content_digest = " ".join(digest_parts)
    return hashlib.sha256(content_digest.encode()).hexdigest()[:16]


_SYSTEM_FOLDERS = ("/dev", "/etc", "/lib", "/opt", "/proc", "/sys", "/usr", "/var")
SCORING = 1  # version of this package's processing of a scorer's values


def scorer_digest(spec: TaskSpec) -> str:
    """Return a digest (16 hex digits) of the scoring code: the task's files, `SCORING`, and lmms-eval's version."""
    path = task_file(spec)
    digest_parts = [str(SCORING), version("lmms-eval"), _yaml_digest(path), *task_code.digests(path)]
    return hashlib.sha256(" ".join(digest_parts).encode()).hexdigest()[:16]


def scorer_files(spec: TaskSpec, heard: OpenedFiles, store: Path) -> dict[str, str]:
    """Map each file that a user's task opened while scoring to its digest ("" for a missing file).

    Paths are relative to the task's YAML. Packages, caches, the dataset's rows and the store's own files are left out.

    heard: the opened files. store: folder of the store.
    """
    if spec.is_pages or not spec.include_path:
        return {}
    path = task_file(spec).resolve()
    data_files = {file.resolve() for file in sources.data_files(spec)}
    own_folders = (
        sys.prefix,
        sys.base_prefix,
        cache_dir(),
        conversions(),
        sources.home(None),
        store,
        tempfile.gettempdir(),
    )
    other_folders = [Path(place).resolve() for place in (*own_folders, *_SYSTEM_FOLDERS)]
    other_folders = [place for place in other_folders if not path.is_relative_to(place)]
    digests = {}
    for name in sorted(heard.files):
        file = Path(name).resolve()
        if (
            file in data_files
            or file.suffix in (".yaml", ".yml")
            or any(file.is_relative_to(place) for place in other_folders)
        ):
            continue
        digests[os.path.relpath(file, path.parent)] = _content_of(file)
    return digests


def files_as_scored(spec: TaskSpec, stored: str) -> bool:
    """Return True if the files of `scorer_files` are unchanged since scoring.

    stored: column of `metrics` with their digests (JSON); anything else gives False.
    """
    folder = task_file(spec).resolve().parent
    try:
        return all(_content_of(folder / name) == digest for name, digest in dict(json.loads(stored)).items())
    except (ValueError, TypeError):
        return False


def _content_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""


def confirm(spec: TaskSpec, expected: str) -> None:
    """Check that a dataset's files still have the fingerprint `expected`.

    Raises:
        DataError: the files have changed, so new answers would be stored under the old fingerprint.
    """
    if not spec.is_pages and (changed(spec) or fingerprint(spec) != expected):
        raise DataError(
            f"the data or the task's code of {spec.dataset} changed during the run; stored answers are kept; "
            "restore the files and run the same command again, or run it with the new files, which makes new "
            "cells"
        )


def inputs_of(spec: TaskSpec) -> list[Path]:
    """Return the local files of a dataset's rows and code, without the media that its rows name."""
    return [] if spec.is_pages else sorted({*sources.data_files(spec), *task_code.files(task_file(spec))})


def _rows_digest(data: datasets.Dataset) -> str:
    import pyarrow as pa

    class Digest(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, content: Any) -> int:
            sha256.update(content)
            return len(content)

    sha256 = hashlib.sha256()
    digest_sink = Digest()
    tables = data.with_format("arrow").iter(batch_size=ROWS)  # slices of equal length, independent of storage
    writer = None
    for table in tables:
        writer = writer or pa.ipc.new_stream(digest_sink, table.schema.remove_metadata())
        writer.write_table(table.replace_schema_metadata().combine_chunks())
    return sha256.hexdigest()


def _yaml_digest(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes())
    for included in includes(path):
        digest.update(_yaml_digest(included).encode())
    return digest.hexdigest()


SCHEME = 1  # version of `messages.prompt_hash`
SAVE_EVERY_S = 300.0


class KnownPrompt(NamedTuple):
    """A prompt's hash, and the state of each file opened for it (None for a missing file)."""

    hash: str
    files: dict[str, State | None]


class Memory:
    """The known prompt hashes of one dataset, kept between runs so that unchanged prompts need not be made again.

    looked: doc_id -> hash at this process's last check.

    Args:
        file: the cache file, or None for no cache.
        media: whether the dataset's rows may contain media.
    """

    def __init__(self, file: Path | None, media: bool) -> None:
        self.file, self.media, self.looked = file, media, dict[int, str]()
        self.new: dict[int, KnownPrompt] = {}
        self.known = {} if file is None else _read(file)
        self._saved = time.monotonic()

    def note(self, doc_id: int, digest: str, prompt: Conversation, heard: OpenedFiles) -> None:
        """Remember the hash of a new prompt, with the files that were opened while it was made (`heard`)."""
        self.looked[doc_id] = digest
        self.known.pop(doc_id, None)
        paths = [video["video"] if isinstance(video, dict) else video for video in prompt.videos]
        has_frames = any(not isinstance(path, str | os.PathLike) for path in paths)
        has_unheard_media = (prompt.images or prompt.videos) and not (heard.files or self.media)
        if self.file is None or not digest or has_frames or has_unheard_media or not heard.traceable:
            return
        if all(state is None or outlives_the_process(path, state) for path, state in heard.files.items()):
            self.known[doc_id] = self.new[doc_id] = KnownPrompt(digest, dict(heard.files))
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def look(self, doc_ids: Iterable[int]) -> set[int]:
        """Put the hashes of prompts whose files are unchanged into `looked`, and return the other documents."""
        file_state = cache(_state)
        unknown_docs = set()
        for doc_id in doc_ids:
            prompt = self.known.get(doc_id)
            if prompt is not None and all(file_state(path) == remembered for path, remembered in prompt.files.items()):
                self.looked[doc_id] = prompt.hash
            else:
                unknown_docs.add(doc_id)
        return unknown_docs

    def save(self) -> None:
        """Add new hashes to the cache file, which other processes may have extended. A file that cannot be written
        is no error."""
        self._saved = time.monotonic()
        if not self.new or self.file is None:
            return
        with suppress(OSError):
            _write(self.file, _read(self.file) | self.new)
            self.new = {}


_MEMORIES: dict[str, Memory] = {}


def memory_of(spec: TaskSpec) -> Memory:
    """Return the known prompt hashes of a dataset, for its present content, task and code."""
    media_home = str(sources.home(spec.media_root))
    content_fingerprint, task = fingerprint(spec), task_file(spec)  # fingerprint imports the task's code
    at_import = READ_AT_IMPORT.get(task)
    key_parts = [SCHEME, content_fingerprint, spec.name, spec.split, spec.placeholders, media_home, version("pillow")]
    files = [Path(name) for name in sorted(at_import.files)] if at_import else []
    files = [path for path in files if path.suffix not in (".yaml", ".yml")]  # these are in the fingerprint
    key_parts += [digest_of([(str(path), path)]) if path.is_file() else f"{path} is not there" for path in files]
    if spec.include_path:  # code of a user's, which may read any variable
        key_parts.append(sorted(os.environ.items()))
    is_remembered = not spec.include_path and (at_import is None or at_import.traceable)
    key = hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()[:24]
    if key not in _MEMORIES:
        docs = documents(spec, None)
        file = cache_dir() / "prompts" / f"{key}.json.gz" if is_remembered else None
        _MEMORIES[key] = Memory(file, bool(media_columns(docs.full[docs.split])))
    return _MEMORIES[key]


def rows_hold_media(spec: TaskSpec) -> bool:
    """Return True if the dataset's rows contain all its media, so that its fingerprint covers its prompts.

    False for datasets without media columns and for tasks of a user.
    """
    if spec.is_pages:
        return True
    docs = documents(spec, None)
    data = docs.full[docs.split]
    columns, kwargs = media_columns(data), plain_config(task_file(spec)).get("dataset_kwargs") or {}
    if not columns or spec.include_path or sources.videos(spec.media_root, kwargs) is not None:
        return False
    return not any(paths_without_bytes(data.data.column(name)) for name in columns)


def _state(path: str) -> State | None:
    try:
        return state_of(path)
    except OSError:
        return None


def _read(file: Path) -> dict[int, KnownPrompt]:
    try:
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            prompts = json.load(stream)
        return {
            int(doc_id): KnownPrompt(digest, {path: State(*state) if state else None for path, state in files.items()})
            for doc_id, (digest, files) in prompts.items()
        }
    except (OSError, EOFError, TypeError, ValueError, AttributeError, zlib.error):
        return {}


def _write(file: Path, prompts: dict[int, KnownPrompt]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".prompts")
    with os.fdopen(descriptor, "wb") as raw, gzip.open(raw, "wt", compresslevel=1, encoding="utf-8") as stream:
        json.dump(prompts, stream)
    os.replace(name, file)
