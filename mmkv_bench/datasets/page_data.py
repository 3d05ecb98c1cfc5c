"""The pages tasks as local datasets: rendered at first use and cached in chunks, the same on every machine."""

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
from mmkv_bench.datasets.drawn_page_tasks import page_task, place
from mmkv_bench.datasets.messages import Conversation, prompt_hash
from mmkv_bench.errors import DataError
from mmkv_bench.file_state import cache_dir

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from mmkv_bench.tiny.pages import Sample


LAYOUT = 1  # version of the cached files
CHUNK = 25  # samples per file; small enough that a run with a small limit starts at once
FROZEN = Path(__file__).with_name("frozen_pages.json")  # see tools/freeze_pages.py
GENERATOR_MODULES = ("pages", "layout", "glyphs", "handwriting", "splits", "vocabulary")
GENERATOR_LIBRARIES = ("numpy", "pillow", "matplotlib", "scikit-learn")
TEXT_COLUMNS = ("sample_id", "cluster", "kind", "question", "answer", "prompt_hash")


def load(name: str, split: str, count: int) -> datasets.Dataset:
    """Load the first `count` samples of a pages task, for example `pages_walk_small`; split is `test` or `dev`.

    Columns: TEXT_COLUMNS and `images`. Missing chunks are rendered (about 25 ms per small and 60 ms per large sample).

    Raises:
        DataError: a cached file does not match its checksum, a page differs from the frozen page, or nothing can be
            written.
    """
    import datasets
    from tqdm import tqdm

    chunks = [DataChunk(folder(name, split), number) for number in range(-(-count // CHUNK))]
    missing = [chunk for chunk in chunks if not chunk.path.exists()]
    for chunk in tqdm(missing, f"rendering {name} ({split})", unit="chunk", disable=len(missing) < 2, leave=False):
        chunk.publish(_table(chunk_samples(name, split, chunk.number)), manifest=generator())
    parts = [datasets.Dataset.from_file(str(chunk.verified())) for chunk in chunks]
    frozen = frozen_digests().get(frozen_name(name, split), [])
    for chunk, part, digest in zip(chunks, parts, frozen, strict=False):
        if content_digest(part.remove_columns("images").to_list()) != digest:
            versions = ", ".join(f"{library} {generator()[library]}" for library in GENERATOR_LIBRARIES)
            first = chunk.number * CHUNK
            raise DataError(
                f"{split} pages {first} to {first + CHUNK - 1} of {name} differ from the frozen pages ({versions} drew them); "
                "install the versions of the lock file or, if the pages were changed on purpose, freeze them again: "
                "python -m tools.freeze_pages"
            )
    return datasets.concatenate_datasets(parts).select(range(count))


def fingerprint(name: str, split: str) -> str:
    """Return the digest (hex) of the first `CHUNK` pages of a split. It changes with the code that draws pages.

    For frozen pages this is the stored digest, without drawing: `load` refuses other pages.
    """
    frozen = frozen_digests().get(frozen_name(name, split))
    return frozen[0] if frozen else content_digest(load(name, split, CHUNK).remove_columns("images").to_list())


def named(name: str, split: str, count: int) -> list[tuple[str, str]]:
    """Return id and kind of the first `count` samples of a pages task, in order, without drawing pages."""
    task, size = page_task(name)
    places = [place(task, position) for position in range(count)]
    return [(f"{kind}-{size}-{split}-{index:06d}", kind) for kind, index in places]


def folder(name: str, split: str) -> Path:
    """Return the folder of the chunks, named after the drawing code and the versions of the drawing libraries."""
    identity = hashlib.sha256(json.dumps([LAYOUT, CHUNK, generator()]).encode()).hexdigest()[:12]
    return cache_dir() / "pages" / identity / f"{name}-{split}"


@cache
def generator() -> dict[str, str]:
    """Return the generator's identity: a digest of its source, and the versions of the libraries that it draws with."""
    source = hashlib.sha256()
    for module in GENERATOR_MODULES:
        source.update((Path(mmkv_bench.tiny.__file__).parent / f"{module}.py").read_bytes())
    versions = {name: importlib.metadata.version(name) for name in GENERATOR_LIBRARIES}
    return {"source": source.hexdigest()[:16], **versions}


def chunk_samples(name: str, split: str, number: int) -> list[Sample]:
    from mmkv_bench.tiny.pages import make_sample

    task, size = page_task(name)
    places = [place(task, position) for position in range(number * CHUNK, (number + 1) * CHUNK)]
    return [make_sample(kind, size, split, index) for kind, index in places]


def to_row(sample: Sample) -> dict[str, Any]:
    """Return a sample's columns, with PIL images and the hash of the prompt that lmms-eval will make of the sample."""
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
    """Return a digest (hex) of questions, answers and pixels (through prompt_hash), not of the images' encoding."""
    return hashlib.sha256(json.dumps([[row[column] for column in TEXT_COLUMNS] for row in rows]).encode()).hexdigest()


@cache
def frozen_digests() -> dict[str, list[str]]:
    """Map each `frozen_name` to content digests, one per chunk (for dev pages only the first chunk)."""
    return json.loads(FROZEN.read_text())


def frozen_name(name: str, split: str) -> str:
    """Return the key of a split in `frozen_digests`: the task's name for test pages."""
    return name if split == "test" else f"{name}_{split}"


def _table(samples: list[Sample]) -> pa.Table:
    import datasets
    import pyarrow as pa

    texts = {column: datasets.Value("string") for column in TEXT_COLUMNS}
    schema = datasets.Features({**texts, "images": datasets.List(datasets.Image())}).arrow_schema
    rows = [to_row(sample) for sample in samples]
    for row in rows:
        files = [io.BytesIO() for _ in row["images"]]
        for image, file in zip(row["images"], files, strict=True):  # noise hardly compresses: level 9 saves a tenth
            image.save(file, "PNG", compress_level=1)
        row["images"] = [{"bytes": file.getvalue(), "path": None} for file in files]
    return pa.Table.from_pylist(rows, schema)


TABLE, MANIFEST = "table.arrow", "manifest.json"
ABANDONED = 3600.0  # seconds after which an unfinished chunk of a killed process is removed


@dataclass(frozen=True)
class DataChunk:
    """Chunk `number` (from 0) in the folder `parent`: a folder with an Arrow table and a manifest with the table's
    checksum."""

    parent: Path
    number: int

    @property
    def path(self) -> Path:
        return self.parent / f"{self.number:05d}"

    def publish(self, table: pa.Table, manifest: dict[str, Any]) -> None:
        """Write the table and its manifest into a new folder, then rename the folder. If several processes write, the
        first wins.

        Raises:
            DataError: nothing can be written.
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
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and self.path.exists():
                return
            raise DataError(
                f"{self.parent} cannot be written ({error.strerror}); make room there, or set MMKV_BENCH_CACHE to a "
                "writable folder"
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def verified(self) -> Path:
        """Return the table's path. Raises DataError if the chunk is unreadable or the checksum does not match."""
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
