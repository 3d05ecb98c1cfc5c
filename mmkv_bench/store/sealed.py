"""Parquet files with a digest of their own content: reading a file detects any change of a stored byte.

The sha256 is stored in the file's footer under `KEY`. It is computed with zeros in place of its 64 digits. So file and digest
appear in one step, even if a writer is killed, and a file may be renamed or sent anywhere. Pages have checksums too. A file
without a digest was written by another program and is refused.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from mmkv_bench.file_state import State

KEY = "mmkv_sha256"
_ZEROS = b"0" * 64
# The bytes of the pair in the footer: the key, then (thrift's compact protocol) "string", "64 bytes", the value.
_MARK = KEY.encode() + b"\x18\x40"
WHOLE = 32 << 20
"""Files up to this number of bytes are read into memory. A larger file is hashed piece by piece and then read from disk."""
_PIECE = 1 << 22
_known: set[State] = set()
"""Files hashed by this process: everything that changes with their bytes."""


class Damaged(ValueError):
    """Raised if a file's bytes are not the bytes that were written."""


def sealed(table: pa.Table, row_group_size: int | None = None, **options: Any) -> bytes:
    """Return a parquet file of `table` with page checksums and a digest. options: passed to `pyarrow.parquet.ParquetWriter`."""
    stream = io.BytesIO()
    write_sealed(stream, table.schema, [table], row_group_size, **options)
    return stream.getvalue()


def write_sealed(
    stream: BinaryIO, schema: pa.Schema, tables: Iterable[pa.Table], row_group_size: int | None = None, **options: Any
) -> None:
    """Write a parquet file with page checksums and a digest from tables as they come.

    Each table starts a new row group, and is released once it is written.
    """
    sink = _Digesting(stream)
    with pq.ParquetWriter(sink, schema, write_page_checksum=True, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=row_group_size)
        writer.add_key_value_metadata({KEY: _ZEROS.decode()})
        sink.hold()
    sink.seal()


class _Digesting:
    """A stream that hashes all bytes written to it, and holds back the parquet footer until the digest is filled in."""

    closed = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._digest = stream, hashlib.sha256()
        self._footer: bytearray | None = None

    def write(self, data: Any) -> int:
        self._digest.update(data)
        if self._footer is None:
            self._stream.write(data)
        else:
            self._footer += data
        return len(data)

    def hold(self) -> None:
        self._footer = bytearray()

    def seal(self) -> None:
        assert self._footer is not None, "the footer is held before it is written"
        start = self._footer.rindex(_MARK) + len(_MARK)
        self._footer[start : start + 64] = self._digest.hexdigest().encode()
        self._stream.write(self._footer)

    def flush(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def opened(path: Path, coded: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
    """Open a file and check its digest. Within a process, an unchanged file is hashed once.

    coded: text columns that are read as dictionaries, if the file has them.

    Raises Damaged, OSError, pa.ArrowException.
    """
    with open(path, "rb") as stream:
        state = State.of(os.fstat(stream.fileno()))
        source: Any = stream
        if state not in _known:
            if state.size > WHOLE:
                _check(stream)
                if state != State.of(os.fstat(stream.fileno())):
                    raise Damaged("it was written to while it was read")
            else:
                # The parsed bytes are the hashed bytes, even if the file changes meanwhile.
                data = stream.read()
                _check(io.BytesIO(data))
                source = pa.BufferReader(data)
            if state.settled:
                _known.add(state)
        footer = pq.read_metadata(source)
        columns = {footer.schema.column(place).path for place in range(footer.num_columns)} if coded else set()
        options = {"metadata": footer, "read_dictionary": sorted(columns.intersection(coded))}
        with pq.ParquetFile(source, page_checksum_verification=True, **options) as file:
            yield file


def number_of_rows(path: Path) -> int:
    """Return the number of rows stated in the file's footer. Return 0 if the file is gone or damaged; reading the rows reports
    damage.
    """
    try:
        return pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException):
        return 0


def _check(stream: BinaryIO) -> None:
    """Raise Damaged if the file has no digest, or a digest of other bytes."""
    ends = stream.seek(0, os.SEEK_END) - 8  # the footer's end; its length and four letters follow
    stream.seek(max(ends, 0))
    footer = max(ends - int.from_bytes(stream.read(4), "little"), 0)
    stream.seek(footer)
    mark = stream.read().rfind(_MARK)
    if mark < 0:
        raise Damaged("it has no checksum, so another program or an older version wrote it")
    left, digest = footer + mark + len(_MARK), hashlib.sha256()
    stream.seek(0)
    while left and (piece := stream.read(min(left, _PIECE))):
        digest.update(piece)
        left -= len(piece)
    stored = stream.read(64)
    digest.update(_ZEROS + stream.read())
    stream.seek(0)
    if digest.hexdigest().encode() != stored:
        raise Damaged("its bytes are not the bytes that were written: the checksum does not match")
