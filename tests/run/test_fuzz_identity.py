"""Promise: an input that is changed gives other cells, a refusal, or rows that a fresh run gives too; none is silent."""

from __future__ import annotations

import shutil
import struct
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from mmkv_bench import file_state
from tests.identity.fuzz import OTHER, REFUSED, RIGHT, STOPPED, fuzz, said
from tests.identity.hunt import Hunt, hunt
from tests.identity.world import VARIABLE, kept_time


def few_or(some: int, whole: int) -> pytest.MarkDecorator:
    """So many cases, and in `make test-full` as many as show every ending several times."""
    return pytest.mark.parametrize("cases", [some, pytest.param(whole, marks=pytest.mark.full)])


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """The worlds and their first rows, which every case leaves as they were."""
    folder = tmp_path_factory.mktemp("identity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_state, "SETTLED_NS", -1)
        patch.setenv("MMKV_BENCH_CACHE", str(folder / "cache"))
        patch.setenv(VARIABLE, "one")
        yield Hunt(folder)


@pytest.mark.slow
@few_or(6, 60)
def test_no_change_of_an_input_is_silent(worlds, cases):
    ended = fuzz(worlds, seed=1, cases=cases)
    often = [word for word in (REFUSED, STOPPED, OTHER, RIGHT) if ended[word] > cases // 20]
    assert sum(ended.values()) == cases and len(often) >= (4 if cases > 20 else 3), ended


@pytest.mark.slow
@few_or(8, 24)
def test_no_single_byte_field_or_name_of_what_is_stored_changes_silently(worlds, cases):
    ended = hunt(worlds, seed=3, cases=cases)
    assert sum(ended.values()) == cases and ended["refused"] > cases // 8, ended


@pytest.mark.slow
def test_code_replaced_by_as_many_bytes_with_its_time_kept_is_not_run_from_old_bytecode(worlds, tmp_path):
    world, first, copy = worlds.world(0)
    rows, fresh_rows = tmp_path / "rows", tmp_path / "fresh"
    shutil.copytree(first, rows)
    try:
        for name, old, new in (("utils.py", '"now"', '"six"'), ("words/first.py", "one", "two")):
            with kept_time(file := world.task / name):
                file.write_text(file.read_text().replace(old, new))
            bytecode, state = Path(cache_from_source(str(file))).read_bytes(), file.stat()
            assert bytecode[8:16] == struct.pack("<II", int(state.st_mtime), state.st_size), "Python would not take it"
        assert worlds.run(world, rows).code == worlds.truth(world, fresh_rows).code == 0
    finally:
        worlds.restore(world, copy)
    before, after, fresh = said(first), said(rows), said(fresh_rows)
    assert {cell: after.get(cell) for cell in fresh} == fresh and not fresh.keys() & before.keys()
    old, new = ({row[0] for cell in rows.values() for row in cell.values()} for rows in (before, fresh))
    assert not old & new, "prompts do not say what the code says"
