"""Drawn configurations (`make fuzz` draws more): what is right gives all its rows within the budget, what is wrong one
sentence and nothing else, and no exception comes through."""

from __future__ import annotations

import pytest

from tests.fuzz.drawing import Case, draw
from tests.fuzz.mistakes import MISTAKES
from tests.fuzz.running import run

SEED = 12
FOUND = (
    "folders=[x]",
    "datasets={}",
    "model.path=pkg://nosuch/x",
    "gate.tolerance=-1",
    "budget=99999999999999999999",
    "seed=99999999999999999999",
)
"""Mistakes that earlier runs of `make fuzz` found badly answered."""


@pytest.mark.parametrize("runs", [3, pytest.param(30, marks=pytest.mark.full)])
def test_drawn_configurations_behave(runs):
    cases = [draw(SEED, number) for number in range(runs)]
    assert cases == [draw(SEED, number) for number in range(runs)], "the same seed draws the same"
    found = {f"{number}: {case.arguments}": run(case).found for number, case in enumerate(cases)}
    assert not {case: what for case, what in found.items() if what}
    assert {case.expect for case in cases} == {"valid", "invalid", "open"}


def test_what_it_found_is_refused_with_a_sentence():
    assert set(FOUND) <= {mistake for kind in MISTAKES for mistake in kind}
    for mistake in FOUND:
        assert not run(Case(("method=[snapkv]", "limit=1", mistake), "invalid")).found, mistake


@pytest.mark.slow
def test_a_run_that_misbehaves_is_told(monkeypatch):
    """The fuzz can fail: a case that is called what it is not, a row too few, an entry too many, a name unknown."""
    assert "exit code 2 of a case that is valid" in run(Case(("budget=0",), "valid")).found[0]
    assert "exit code 0 of a case that is invalid" in run(Case(("method=[snapkv]", "limit=1"), "invalid")).found[0]
    from tests.fuzz import running

    cells = {"a": {"method": "m", "reading": "paper", "protocol": "paper"}}
    row = {"status": "ok", "entries_asked": 4, "entries_resident": 5, "kept": [[2, 2]], "fallback": ["nosuch"]}
    told = " ".join(running._of_row({**row, "sample_id": "s"}, cells["a"]))
    assert "5 entries held where 4 were asked for" in told and "heads hold 4" in told and "nosuch" in told
    monkeypatch.setattr(running, "main", lambda arguments: 1 // 0)
    assert "ZeroDivisionError" in run(Case(("budget=0",), "invalid")).found[0]
