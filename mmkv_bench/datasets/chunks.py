"""A chunk of a cached dataset: a folder with one Arrow table and its checksum, which appears by one rename."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

TABLE, MANIFEST = "table.arrow", "manifest.json"
ABANDONED = 3600.0  # seconds after which an unfinished chunk of a killed process is removed


def cache_root() -> Path:
    """$MMKV_BENCH_CACHE, or ~/.cache/mmkv_bench."""
    return Path(os.environ.get("MMKV_BENCH_CACHE") or "~/.cache/mmkv_bench").expanduser()


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
            _remove_abandoned(self.parent)
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


def _remove_abandoned(parent: Path) -> None:
    for unfinished in parent.glob(".*-*"):
        if time.time() - unfinished.stat().st_mtime > ABANDONED:
            shutil.rmtree(unfinished, ignore_errors=True)
