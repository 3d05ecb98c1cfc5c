"""Promise: an input that is changed gives other cells, a refusal, or rows that a fresh run gives too; none is silent."""

from __future__ import annotations

from mmkv_bench import file_state
from tests.identity.fuzz import OTHER, REFUSED, RIGHT, STOPPED, fuzz

CASES = 60


def test_no_change_of_an_input_is_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(file_state, "SETTLED_NS", -1)
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MMKV_FUZZ_WORD", "one")
    ended = fuzz(tmp_path, seed=1, cases=CASES)
    assert sum(ended.values()) == CASES and min(ended[word] for word in (REFUSED, STOPPED, OTHER, RIGHT)) > 3, ended
