"""Parquet files that carry a digest of themselves: any change of a stored byte is noticed when the file is read.

The sha256 stands in the file's own footer, under `KEY`, made while these 64 digits were zeros. So file and digest appear
in one step, whoever writes beside it and whenever a writer is killed, and a file may be renamed or sent anywhere.
Pages have checksums too. Files of older versions have neither and are read as they are: see `Store.unchecked`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mmkv_bench.file_state import State

KEY = "mmkv_sha256"
_ZEROS = b"0" * 64
# As the footer spells the pair: the key, then (thrift's compact protocol) "string", "64 bytes", the value.
_MARK = KEY.encode() + b"\x18\x40"
_known: dict[State, bool] = {}
"""Files of this process that were hashed, by all that changes with their bytes -> whether they carry a digest."""


class Damaged(ValueError):
    """The bytes of a file are not those that were written."""


def sealed(table: pa.Table, row_group_size: int | None = None, **options: Any) -> bytes:
    """A parquet file of `table` with page checksums and its digest; options: those of `pyarrow.parquet.ParquetWriter`."""
    stream = pa.BufferOutputStream()
    with pq.ParquetWriter(stream, table.schema, write_page_checksum=True, **options) as writer:
        writer.write_table(table, row_group_size=row_group_size)
        writer.add_key_value_metadata({KEY: _ZEROS.decode()})
    data = bytearray(stream.getvalue())
    start = data.rindex(_MARK) + len(_MARK)
    data[start : start + 64] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


@contextmanager
def opened(path: Path, coded: Sequence[str] = ()) -> Iterator[tuple[pq.ParquetFile, bool]]:
    """The file, checked, and whether it carries a digest to check; each state of a file is hashed once in a process.

    coded: columns of texts that are read as dictionaries. Raises Damaged, OSError, pa.ArrowException.
    """
    with open(path, "rb") as stream:
        state = State.of(os.fstat(stream.fileno()))
        source: Any = stream
        if state not in _known:
            # What is parsed is what was hashed, whatever becomes of the file meanwhile.
            data = stream.read()
            source, checked = pa.BufferReader(data), _check(data)
            if state.settled:
                _known[state] = checked
        else:
            checked = _known[state]
        with pq.ParquetFile(source, read_dictionary=list(coded), page_checksum_verification=True) as file:
            yield file, checked


def _check(data: bytes) -> bool:
    """Whether there is a digest; Damaged when it is not that of the bytes."""
    mark = data.rfind(_MARK)
    if mark < 0:
        return False
    start = mark + len(_MARK)
    digest = hashlib.sha256(data[:start])
    digest.update(_ZEROS)
    digest.update(data[start + 64 :])
    if digest.hexdigest().encode() != data[start : start + 64]:
        raise Damaged("its bytes are not those that were written: the checksum does not match")
    return True
