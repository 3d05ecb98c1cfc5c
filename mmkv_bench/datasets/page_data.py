"""The pages tasks as local datasets: rendered at first use, cached, the same on every machine.

A chunk of samples is a folder with one Arrow table and its checksum, which appears by one rename."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mmkv_bench.tiny
from mmkv_bench.datasets.messages import Conversation, prompt_hash
from mmkv_bench.datasets.page_tasks import page_task, place
from mmkv_bench.errors import DataError
from mmkv_bench.file_state import cache_dir

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from mmkv_bench.tiny.pages import Sample


LAYOUT = 1  # version of the cached files
CHUNK = 25  # samples a file; small enough that a run with a small limit starts at once
FROZEN = Path(__file__).with_name("frozen_pages.json")  # see tools/freeze_pages.py
GENERATOR_MODULES = ("pages", "layout", "glyphs", "handwriting", "splits", "vocabulary")
GENERATOR_LIBRARIES = ("numpy", "pillow", "matplotlib", "scikit-learn")
TEXT_COLUMNS = ("sample_id", "cluster", "kind", "question", "answer", "prompt_hash")


def load(name: str, split: str, count: int) -> datasets.Dataset:
    """The first `count` samples of a pages task, for example `pages_walk_small`; split is `test` or `dev`.

    Columns: TEXT_COLUMNS and `images`. Chunks that are missing are rendered (about 25 ms a small and 60 ms a large
    sample). Raises DataError when a cached file is not what its checksum says, when a test page is not the frozen one
    and when nothing can be written.
    """
    import datasets
    from tqdm import tqdm

    chunks = [DataChunk(folder(name, split), number) for number in range(-(-count // CHUNK))]
    missing = [chunk for chunk in chunks if not chunk.exists()]
    for chunk in tqdm(missing, f"rendering {name} ({split})", unit="chunk", disable=len(missing) < 2, leave=False):
        chunk.publish(_table(chunk_samples(name, split, chunk.number)), manifest=generator())
    parts = [datasets.Dataset.from_file(str(chunk.verified())) for chunk in chunks]
    frozen = frozen_digests().get(frozen_name(name, split), [])
    for chunk, part, digest in zip(chunks, parts, frozen, strict=False):
        if content_digest(part.remove_columns("images").to_list()) != digest:
            versions = ", ".join(
                f"{library} {version}" for library, version in generator().items() if library != "source"
            )
            first = chunk.number * CHUNK
            raise DataError(
                f"{split} pages {first} to {first + CHUNK - 1} of {name} are not the frozen ones ({versions} drew them); "
                "install the versions of the lock file or, if the pages were changed on purpose, freeze them again: "
                "python -m tools.freeze_pages"
            )
    return datasets.concatenate_datasets(parts).select(range(count))


def fingerprint(name: str, split: str) -> str:
    """Digest (hex) of the content of the first chunk: another generator gives another one, a larger limit does not.

    Of frozen pages it is known without drawing them, since `load` refuses any others."""
    frozen = frozen_digests().get(frozen_name(name, split))
    return frozen[0] if frozen else content_digest(load(name, split, CHUNK).remove_columns("images").to_list())


def named(name: str, split: str, count: int) -> list[tuple[str, str]]:
    """Id and kind of the first `count` samples of a pages task, in order, without drawing one."""
    task, size = page_task(name)
    places = [place(task, position) for position in range(count)]
    return [(f"{kind}-{size}-{split}-{index:06d}", kind) for kind, index in places]


def folder(name: str, split: str) -> Path:
    """Folder of the chunks: other code or other libraries that draw the pages have a folder of their own."""
    identity = hashlib.sha256(json.dumps([LAYOUT, CHUNK, generator()]).encode()).hexdigest()[:12]
    return cache_dir() / "pages" / identity / f"{name}-{split}"


@cache
def generator() -> dict[str, str]:
    """Identity of the generator: a digest of its source and the versions of the libraries it draws with."""
    source = hashlib.sha256()
    for module in GENERATOR_MODULES:
        source.update((Path(mmkv_bench.tiny.__file__).parent / f"{module}.py").read_bytes())
    return {"source": source.hexdigest()[:16]} | {
        name: importlib.metadata.version(name) for name in GENERATOR_LIBRARIES
    }


def chunk_samples(name: str, split: str, number: int) -> list[Sample]:
    """The samples of one chunk, drawn anew."""
    from mmkv_bench.tiny.pages import make_sample

    task, size = page_task(name)
    places = [place(task, position) for position in range(number * CHUNK, (number + 1) * CHUNK)]
    return [make_sample(kind, size, split, index) for kind, index in places]


def to_row(sample: Sample) -> dict[str, Any]:
    """A sample's columns, with PIL images, and the hash of the prompt that lmms-eval will make of it."""
    content = [{"type": "image"} for _ in sample.images] + [{"type": "text", "text": sample.question}]
    prompt = Conversation([{"role": "user", "content": content}], sample.images, [])
    return {
        "sample_id": sample.sample_id,
        "cluster": sample.cluster,
        "kind": sample.task,
        "question": sample.question,
        "answer": sample.answer,
        "prompt_hash": prompt_hash(prompt),
        "images": sample.images,
    }


def content_digest(rows: list[dict[str, Any]]) -> str:
    """Digest (hex) of questions, answers and pixels (by prompt_hash); the encoding of the images has no part in it."""
    return hashlib.sha256(json.dumps([[row[column] for column in TEXT_COLUMNS] for row in rows]).encode()).hexdigest()


@cache
def frozen_digests() -> dict[str, list[str]]:
    """Content digests of the frozen pages: `frozen_name` -> one digest per chunk; of dev pages of the first one."""
    return json.loads(FROZEN.read_text())


def frozen_name(name: str, split: str) -> str:
    """Name under which the digests of a task's split stand: the task's own for test pages."""
    return name if split == "test" else f"{name}_{split}"


def _table(samples: list[Sample]) -> pa.Table:
    import datasets
    import pyarrow as pa

    texts = {column: datasets.Value("string") for column in TEXT_COLUMNS}
    schema = datasets.Features({**texts, "images": datasets.List(datasets.Image())}).arrow_schema
    rows = [to_row(sample) for sample in samples]
    for row in rows:
        files = [io.BytesIO() for _ in row["images"]]
        for image, file in zip(row["images"], files, strict=True):
            image.save(
                file, "PNG", compress_level=1
            )  # noise hardly compresses: higher levels cost time and save a tenth
        row["images"] = [{"bytes": file.getvalue(), "path": None} for file in files]
    return pa.Table.from_pylist(rows, schema)


TABLE, MANIFEST = "table.arrow", "manifest.json"
ABANDONED = 3600.0  # seconds after which an unfinished chunk of a killed process is removed


@dataclass(frozen=True)
class DataChunk:
    """DataChunk `number` (from 0) below `parent`. Several processes may publish the same chunk side by side."""

    parent: Path
    number: int

    @property
    def path(self) -> Path:
        """The chunk's folder."""
        return self.parent / f"{self.number:05d}"

    def exists(self) -> bool:
        """Return True where it was published."""
        return self.path.exists()

    def publish(self, table: pa.Table, manifest: dict[str, Any]) -> None:
        """Write the table and a manifest with its checksum into a folder, then rename that: the first to rename wins.

        Equal tables give equal bytes. Raises DataError when nothing can be written.
        """
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        data = sink.getvalue().to_pybytes()
        manifest = {**manifest, "rows": table.num_rows, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        unfinished = self.parent / f".{self.number:05d}-{uuid.uuid4().hex}"
        try:
            unfinished.mkdir(parents=True)
            for abandoned in self.parent.glob(".*-*"):
                if time.time() - abandoned.stat().st_mtime > ABANDONED:
                    shutil.rmtree(abandoned, ignore_errors=True)
            _write(unfinished / TABLE, data)
            _write(unfinished / MANIFEST, json.dumps(manifest, indent=1).encode())
            os.rename(unfinished, self.path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and self.exists():
                return
            raise DataError(
                f"{self.parent} cannot be written ({error.strerror}); make room there, or set MMKV_BENCH_CACHE to a "
                "folder that can be written"
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def verified(self) -> Path:
        """The table's path, after reading it against its checksum. Raises DataError when they do not agree."""
        remedy = f"delete {self.path} and run again"
        try:
            manifest = json.loads((self.path / MANIFEST).read_text())
            actual = hashlib.sha256((self.path / TABLE).read_bytes()).hexdigest()
            expected = manifest["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"the cached data in {self.path} cannot be read ({error!r}); {remedy}") from error
        if actual != expected:
            raise DataError(f"{self.path / TABLE} is corrupt: sha256 {actual[:12]}, expected {expected[:12]}; {remedy}")
        return self.path / TABLE


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
