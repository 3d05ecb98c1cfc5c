"""Promise: an input that is changed gives other cells, a refusal, or rows that a fresh run gives too; none is silent."""

from __future__ import annotations

import pytest

from mmkv_bench import file_state
from tests.identity.fuzz import OTHER, REFUSED, RIGHT, STOPPED, fuzz
from tests.identity.hunt import hunt

CASES, CHANGES = 60, 24


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(file_state, "SETTLED_NS", -1)
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MMKV_FUZZ_WORD", "one")
    return tmp_path


def test_no_change_of_an_input_is_silent(place):
    ended = fuzz(place, seed=1, cases=CASES)
    assert sum(ended.values()) == CASES and min(ended[word] for word in (REFUSED, STOPPED, OTHER, RIGHT)) > 3, ended


def test_no_single_byte_field_or_name_of_what_is_stored_changes_silently(place):
    ended = hunt(place, seed=3, cases=CHANGES)
    assert sum(ended.values()) == CHANGES and ended["refused"] > 3, ended
