"""The cells of a large store, some at a time: the rows of all of them fit into no memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from mmkv_bench.store.parts import codes_of, readable
from mmkv_bench.store.sealed import opened


def counted(path: Path) -> dict[str, int]:
    """Cell -> how many rows of it a file holds. Raises FileNotFoundError, StoreError."""
    found: dict[str, int] = {}
    with readable(path), opened(path, ["cell"]) as (file, _):
        for group in range(file.num_row_groups):
            for codes in file.read_row_group(group, ["cell"])["cell"].chunks:
                rows = np.bincount(codes_of(codes), minlength=len(codes.dictionary)).tolist()
                for name, count in zip(codes.dictionary.to_pylist(), rows, strict=True):
                    found[name] = found.get(name, 0) + count
    return {name: count for name, count in found.items() if count}


Name = TypeVar("Name", str, int)


def blocks(names: Iterable[Name], counts: Mapping[Name, int], at_once: int) -> Iterator[list[Name]]:
    """The cells, or what else is named, in their order: as many at a time as have `at_once` rows together by `counts`, or one
    that has more."""
    block: list[Name] = []
    waiting = 0
    for name in names:
        own = counts.get(name, 0)
        if block and waiting + own > at_once:
            yield block
            block, waiting = [], 0
        block.append(name)
        waiting += own
    if block:
        yield block
