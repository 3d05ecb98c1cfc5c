"""Parquet files that carry a digest of themselves: any change of a stored byte is noticed when the file is read.

The sha256 stands in the file's own footer, under `KEY`, made while these 64 digits were zeros. So file and digest appear
in one step, whoever writes beside it and whenever a writer is killed, and a file may be renamed or sent anywhere.
Pages have checksums too. Files of older versions have neither and are read as they are: see `Store.unchecked`.
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
# As the footer spells the pair: the key, then (thrift's compact protocol) "string", "64 bytes", the value.
_MARK = KEY.encode() + b"\x18\x40"
WHOLE = 32 << 20
"""Bytes of a file up to which it is read into memory; a larger one is hashed piece by piece and then read from the disk."""
_PIECE = 1 << 22
_TAIL = 1 << 16
_known: dict[State, bool] = {}
"""Files of this process that were hashed, by all that changes with their bytes -> whether they carry a digest."""


class Damaged(ValueError):
    """The bytes of a file are not those that were written."""


def sealed(table: pa.Table, row_group_size: int | None = None, **options: Any) -> bytes:
    """A parquet file of `table` with page checksums and its digest; options: those of `pyarrow.parquet.ParquetWriter`."""
    stream = io.BytesIO()
    write_sealed(stream, table.schema, [table], row_group_size, **options)
    return stream.getvalue()


def write_sealed(
    stream: BinaryIO, schema: pa.Schema, tables: Iterable[pa.Table], row_group_size: int | None = None, **options: Any
) -> None:
    """Write such a file from tables as they come: each begins a row group, and none is held longer."""
    sink = _Digesting(stream)
    with pq.ParquetWriter(sink, schema, write_page_checksum=True, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=row_group_size)
        writer.add_key_value_metadata({KEY: _ZEROS.decode()})
        sink.hold()
    sink.seal()


class _Digesting:
    """A file that keeps the digest of what is written to it, and holds the footer back until that is in its place."""

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
def opened(path: Path, coded: Sequence[str] = ()) -> Iterator[tuple[pq.ParquetFile, bool]]:
    """Open a checked file; the second value is True where it carries a digest. Each state of a file is hashed once in a process.

    coded: columns of texts that are read as dictionaries, where the file has them. Raises Damaged, OSError, pa.ArrowException.
    """
    with open(path, "rb") as stream:
        state = State.of(os.fstat(stream.fileno()))
        source: Any = stream
        if state in _known:
            checked = _known[state]
        elif state.size > WHOLE:
            checked = _check(stream)
            if state != State.of(os.fstat(stream.fileno())):
                raise Damaged("it was written to while it was read")
        else:
            # What is parsed is what was hashed, whatever becomes of the file meanwhile.
            data = stream.read()
            source, checked = pa.BufferReader(data), _check(io.BytesIO(data))
        if state not in _known and state.settled:
            _known[state] = checked
        footer = pq.read_metadata(source)
        columns = {footer.schema.column(place).path for place in range(footer.num_columns)} if coded else set()
        options = {"metadata": footer, "read_dictionary": sorted(columns.intersection(coded))}
        with pq.ParquetFile(source, page_checksum_verification=True, **options) as file:
            yield file, checked


def number_of_rows(path: Path) -> int:
    """Number of rows by the file's footer alone; 0 where the file is gone or damaged, which reading it reports."""
    try:
        return pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException):
        return 0


def _check(stream: BinaryIO) -> bool:
    """True where there is a digest. Raises Damaged when it is not that of the bytes."""
    mark = _last(stream, _MARK)
    if mark is None:
        return False
    start = mark + len(_MARK)
    stream.seek(start)
    stored = stream.read(64)
    digest, at = hashlib.sha256(), 0
    for piece in _pieces(stream):
        first, last = max(start - at, 0), min(start + 64 - at, len(piece))
        at += len(piece)
        if first < last:
            piece = piece[:first] + _ZEROS[: last - first] + piece[last:]
        digest.update(piece)
    stream.seek(0)
    if digest.hexdigest().encode() != stored:
        raise Damaged("its bytes are not those that were written: the checksum does not match")
    return True


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    stream.seek(0)
    while piece := stream.read(_PIECE):
        yield piece


def _last(stream: BinaryIO, text: bytes) -> int | None:
    """The last place of a text in a file, None without one: searched from the end, near which a footer is."""
    end, after = stream.seek(0, os.SEEK_END), b""
    while end:
        start = max(end - _TAIL, 0)
        stream.seek(start)
        joined = stream.read(end - start) + after
        place = joined.rfind(text)
        if place >= 0:
            return start + place
        end, after = start, joined[: len(text) - 1]
    return None
