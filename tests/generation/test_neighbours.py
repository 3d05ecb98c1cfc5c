"""Promise: what a cell yields does not depend on who else is in the run: scores, kept entries and answers are the same alone
and beside every other method, bit for bit, whatever a method file reads, remembers or writes to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.prefill import Recording
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.methods import invariants, toy_layers
from mmkv_bench.protocols import Lengths
from tests import cover
from tests.compression import test_registry as registry

READS = ("window", "weighted", "needs", "sums", "written", "undeclared")


@dataclass(frozen=True)
class Theirs(Scorer):
    """A method file's scorer: it reads what it declares, or what only a neighbour declares; names memos as it likes; writes."""

    window: int
    alpha: float
    reads: str

    @property
    def needs(self) -> Needs:
        return Needs(tail_queries=self.window, column_sums=self.reads == "sums")

    def key(self, budget, length):
        return (self.window, self.alpha, self.reads)

    def score(self, obs, budget, seed):
        if self.reads == "sums":
            return obs.column_sums.add_(self.alpha)
        if self.reads == "undeclared":
            return obs.window_mass(self.window + 1)
        if self.reads == "needs":
            return obs.window_mass(min(obs.needs.tail_queries, obs.length)) * (1 + obs.needs.column_sums)
        if self.reads == "weighted":
            return obs.memo("weighted", lambda: obs.value.float().norm(dim=-1) ** self.alpha)
        mass = obs.window_mass(self.window)
        return mass.mul_(self.alpha) if self.reads == "written" else mass


def recorded(cells: list[CellSpec], length: int = 40) -> dict[str, object]:
    """Cell -> its scores of all layers, or the class of what it raised."""
    recording = Recording(cells, {"paper": Lengths(length, length, length, length)}, lambda: 0.0)
    for layer, observation in enumerate(toy_layers.prompt(length, 2, 3, recording.needs)):
        recording.layer_done(None, layer, [observation])
    keys = {cell.cell: key for key, cell in recording.scorers.items()}
    return {
        name: type(recording.failures[key]) if key in recording.failures else torch.stack(recording.scores[key])
        for name, key in keys.items()
    }


def same(one, other) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one is other


scorers = st.builds(Theirs, st.integers(1, 30), st.sampled_from([-1.0, 0.5, 2.0]), st.sampled_from(READS))


@pytest.mark.slow
@given(st.lists(scorers, min_size=2, max_size=6, unique=True))
@settings(max_examples=40, deadline=None)
def test_method_files_score_the_same_alone_and_beside_others(made):
    parts = registry.method("snapkv")
    compressors = [
        Compressor(f"{i}", one, parts.allocator, parts.selector, parts.reducer) for i, one in enumerate(made)
    ]
    cells = [CellSpec(one.name, one, Budget.parse(9)) for one in (*compressors, parts)]
    together = recorded(cells)
    assert together.keys() == {cell.cell for cell in cells}
    for cell in cells:
        assert same(together[cell.cell], recorded([cell])[cell.cell]), cell.compressor.scorer
        reads = getattr(cell.compressor.scorer, "reads", "")
        assert (together[cell.cell] is RuntimeError) == (reads == "undeclared")


@pytest.mark.slow
@cover.shares(4)
def test_shipped_methods_answer_the_same_alone_and_beside_all_others(share):
    model, family, rules, tokenizer, pages = invariants._embedded()
    heads, layers = model.config.get_text_config().num_key_value_heads, model.config.get_text_config().num_hidden_layers
    cells = []
    for name in registry.NAMES:
        made = registry.build_compressor(name, registry.DEFAULTS[name], "paper")
        made = registry.synthetic.calibrated(made, layers, heads)
        cells += [CellSpec(f"{name}@{budget}", made, Budget.parse(budget)) for budget in (16, 64)]
    with Engine(model, family, rules, tokenizer) as engine:
        page = pages[0]
        together = {one.cell: one for one in engine.answer(page, cells)}
        for first, second in cover.turn(zip(cells[::2], cells[1::2], strict=True), 0, share):
            for own in engine.answer(page, [first, second]):
                beside = together[own.cell]
                for name in ("status", "token_ids", "kept", "kept_digest"):
                    assert getattr(own, name) == getattr(beside, name), (own.cell, name, own.error, beside.error)


def test_shipped_scores_are_the_same_bit_for_bit():
    made = {name: registry.method(name) for name in registry.NAMES}
    cells = [CellSpec(name, one, Budget.parse(9)) for name, one in made.items()]
    together = recorded(cells)
    for cell in cells:
        if cell.cell in together:
            assert same(together[cell.cell], recorded([cell])[cell.cell]), cell.cell
