"""Promise: what a cell yields does not hang on which other methods, settings and budgets its run has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.methods import invariants, toy_layers
from tests import zoo
from tests.generation import common


@dataclass(frozen=True)
class Mine(Scorer):
    """A user's scorer with any needs, which reads them, and memoises under one name whatever its parameters are."""

    queries: int = 8
    power: float = 1.0
    memoises: bool = True
    columns: bool = False

    @property
    def needs(self) -> Needs:
        return Needs(tail_queries=self.queries, column_sums=self.columns)

    def key(self, budget, length):
        return (self.queries, self.power, self.memoises, self.columns)

    def score(self, obs, budget, seed):
        rows = obs.tail(obs.needs.tail_queries).shape[1]  # as the review's needs.py: whatever was gathered
        mass = obs.window_mass(rows)
        weighted = lambda: mass * obs.value.float().norm(dim=-1) ** self.power  # noqa: E731
        score = obs.memo("weighted", weighted) if self.memoises else weighted()
        return score + obs.column_sums if obs.needs.column_sums else score


def compressor(scorer: Scorer):
    return replace(common.registry()["snapkv"], scorer=scorer)


@pytest.mark.slow
def test_every_shipped_method_keeps_the_same_beside_all_others():
    name = "qwen2_5_vl"
    model, prompt = zoo.model(name), common.encoded(name)
    cells = [common.cell(made, 12) for made in common.registry().values() if made.scorer is not None]
    assert len(cells) > 25

    def answers(*some) -> list[tuple]:
        results = common.together(model, name, prompt, some)
        assert {one.status for one in results} == {"ok"}, [one.error for one in results]
        return [(one.token_ids, one.kept_digest) for one in results]

    for cell, expected in zip(cells, answers(*cells), strict=True):
        assert answers(cell) == [expected], cell.cell


WAYS = st.builds(Mine, st.sampled_from([4, 8, 24]), st.sampled_from([1.0, -1.0]), st.booleans(), st.booleans())


@settings(max_examples=25, deadline=None)
@given(st.lists(WAYS, min_size=2, max_size=4, unique=True), st.sampled_from([3, 11]))
def test_any_scorers_give_the_same_scores_alone_and_beside_each_other(scorers, budget):
    made = [compressor(scorer) for scorer in scorers]
    needs = Needs(tail_queries=64, column_sums=True, queries=True, states=True, query_moments=True)
    together = toy_layers.prompt(40, 2, 3, needs)
    beside = [invariants.scores(one, together, budget) for one in made]
    for one, expected in zip(made, beside, strict=True):
        alone = invariants.scores(one, toy_layers.prompt(40, 2, 3, one.needs), budget)
        assert all(torch.equal(a, b) for a, b in zip(alone, expected, strict=True))


def test_a_need_that_only_a_neighbour_declares_is_an_error_beside_it_too():
    @dataclass(frozen=True)
    class Wide(Mine):
        def score(self, obs, budget, seed):
            return obs.window_mass(32)

    for gathered in (16, 64):
        seen = toy_layers.prompt(40, 2, 3, Needs(tail_queries=gathered))
        with pytest.raises(RuntimeError, match="reads tail_queries >= 32 but its `needs` does not declare it"):
            invariants.scores(compressor(Wide(queries=16)), seen, 8)
    with pytest.raises(RuntimeError, match="reads column_sums"):
        seen = toy_layers.prompt(40, 2, 3, Needs(tail_queries=64, column_sums=True))
        seen[0].seen_by(object(), Needs()).column_sums  # noqa: B018


def test_check_sees_a_method_that_its_neighbours_move():
    @dataclass(frozen=True)
    class Remembering(Mine):
        def score(self, obs, budget, seed):
            return obs.shared("mine", lambda: super(Remembering, self).score(obs, budget, seed))  # no memo of its own

    made = compressor(Remembering(memoises=False))
    assert "stay beside the same method with another" in (invariants.neighbours_change_nothing(made) or "")
    assert invariants.neighbours_change_nothing(compressor(Mine())) is None
