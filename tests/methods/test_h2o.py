"""H2O while decoding against a reference whose mask changes at every step, and its released selection against an oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.base import Start
from mmkv_bench.compression.decoding.heavy_hitters import HeavyHitters
from mmkv_bench.compression.selectors.one_set import OneSet
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.errors import ConfigError
from mmkv_bench.generation.unshared_generation import generate_alone
from mmkv_bench.methods.build import build_compressor
from tests import cover, zoo
from tests.core import parts
from tests.each import each
from tests.generation import common
from tests.oracles import h2o as oracle

FAMILIES = ("qwen2_5_vl", "llava", "llama")
NEW = 14


def method(name: str, reading: str = "paper") -> Compressor:
    return build_compressor(name, method_defaults([name])[name], reading)


def protocols_of(name: str) -> tuple[str, ...]:
    return common.PROTOCOLS if name in zoo.MULTIMODAL else common.PROTOCOLS[:2]


# ---------------------------------------------------------------- decoding, through whole models


@pytest.mark.full
@cover.few("name", FAMILIES, first=1)
@each("budget", [2, 9, 16])
def test_decoding_is_masked_full_attention_whose_mask_changes_each_step(name, budget):
    model, prompt = zoo.model(name), common.encoded(name)
    cuts = {"paper": prompt.length, "strict": prompt.length - 1, "query_agnostic": prompt.length - 6}
    for protocol in protocols_of(name):
        cut = cuts[protocol]
        exact, heads = oracle.generate(model, prompt.inputs, budget, cut, NEW)
        context = cut if protocol == "query_agnostic" else None
        out = generate_alone(
            model, prompt.inputs, method("h2o_decode"), Budget.parse(budget), protocol, context=context,
            max_new_tokens=NEW,
        )  # fmt: skip
        assert (torch.cat(out.logits) - exact).abs().max() <= 2e-6, protocol
        for layer, states in zip(out.session.cache.layers, heads, strict=True):
            assert layer.slot_positions()[0].tolist() == [state.held for state in states]
            assert layer.stored == budget + (6 if protocol == "query_agnostic" else 0)


def test_decode_time_eviction_changes_answers():
    model, prompt = zoo.model("qwen2_5_vl"), common.encoded("qwen2_5_vl")
    runs = [
        generate_alone(model, prompt.inputs, method(name), Budget.parse(8), max_new_tokens=NEW)
        for name in ("h2o", "h2o_decode")
    ]
    first, second = (torch.cat(run.logits) for run in runs)
    assert torch.equal(first[:2], second[:2]), "what follows the prompt and the first token is the same"
    assert (first[2:] - second[2:]).abs().max() > 1e-3


@pytest.mark.full
@cover.few("name", FAMILIES)
def test_forks_are_what_runs_alone_are_and_hold_their_budget_to_the_end(name):
    """Uniform and ragged grants; a head that was granted nothing holds nothing but the token at hand."""
    model, prompt = zoo.model(name), common.encoded(name)
    ragged = parts.compressor("all_ragged")
    ragged = Compressor("ragged_decode", *_parts(ragged), decoding=HeavyHitters(0.3))
    cells = [
        common.cell(one, budget, protocol)
        for one in (method("h2o_decode"), ragged)
        for budget in (1, 7, "40%", prompt.length + 3)
        for protocol in protocols_of(name)
    ]
    forks = common.assert_forks_equal_alone(model, name, prompt, cells, common.rules(model, 10))
    for one, fork in zip(cells, forks, strict=True):
        if one.evicts(fork.context_tokens):
            assert fork.entries_end == fork.entries_resident + fork.entries_appended
        else:
            assert fork.fallback == ["prompt_within_budget"] and fork.tokens_from_compressed == 0


def _parts(made: Compressor) -> tuple:
    return made.scorer, made.allocator, made.selector, made.reducer


# ---------------------------------------------------------------- one layer


def start_of(counts, length, group_scores, dim=4, seed=0) -> Start:
    """Heads that kept `counts` random entries of `length`."""
    generator = torch.Generator().manual_seed(seed)
    heads, width = len(counts), max(counts)
    key, value = torch.randn(2, heads, length, dim, generator=generator)
    index = torch.full((heads, width), -1)
    for row, count in enumerate(counts):
        index[row, width - count :] = torch.randperm(length, generator=generator)[:count].sort().values
    kept = parts.Evict().reduce(key, value, index)
    context = Context(max(1, sum(counts) // heads), length)
    return Start(0, 1, key, value, index, *kept, group_scores, context, 0, length, length, 0.5, 64)


def test_the_scores_of_a_prompt_are_gone_once_a_layer_is_made_of_them():
    """A view of a few of them would keep the storage of all; under strict one token is fed again and needs its own."""
    for fed_again in (0, 1):
        start = start_of([8, 5], 4000, torch.rand(2, 4000))
        start.seen -= fed_again
        layer = HeavyHitters().layer(start)
        held = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in held}
        assert start.scores.untyped_storage().data_ptr() not in addresses
        assert sum(tensor.untyped_storage().nbytes() for tensor in held) < 4000


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    group=st.sampled_from([1, 3]),
    share=st.sampled_from([0.0, 0.29, 0.5, 1.0]),
    extra=st.integers(0, 5),
    seed=st.integers(0, 10**6),
)
def test_every_head_evicts_as_a_list_of_tokens_would(counts, group, share, extra, seed):
    length, dim, heads = max(counts) + extra + 1, 4, len(counts)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(heads, length, generator=generator)
    start = start_of(counts, length, scores, dim, seed)
    layer = HeavyHitters(share).layer(start)
    naive = []
    for head, count in enumerate(counts):
        held = [j for j in start.index[head].tolist() if j >= 0]
        naive.append(oracle.Head(held, {j: float(scores[head, j]) for j in held}, count))
    keys = [{j: start.key[head, j].double() for j in range(length)} for head in range(heads)]
    for step in range(8):
        key, value = torch.randn(2, 1, heads, 1, dim, generator=generator)
        query = torch.randn(1, heads * group, 1, dim, generator=generator) * 2
        layer.update(key, value)
        layer.attended(query, 0.5)
        for head, state in enumerate(naive):
            state.held.append(length + step)
            state.gathered[length + step] = 0.0
            keys[head][length + step] = key[0, head, 0].double()
            for member in range(group):
                row = query[0, head * group + member, 0].double()
                mass = [float(torch.exp(0.5 * row @ keys[head][j])) for j in state.held]
                for j, part in zip(state.held, mass, strict=True):
                    state.gathered[j] += part / sum(mass)
            state.evict(share)
            slots = layer.slot_positions()[0, head]
            assert slots[slots >= 0].tolist() == state.held
            weights = layer.attention_sums[head][slots >= 0]
            expected = torch.tensor([state.gathered[j] for j in state.held])
            assert torch.allclose(weights, expected, atol=1e-5)
            assert not layer.attention_sums[head][slots < 0].any()


def run_by_hand(scores, share):
    """One head holding tokens 0..3 of four; queries of zeros give every stored entry the same new attention."""
    start = start_of([4], 4, torch.tensor([scores]), dim=2)
    layer = HeavyHitters(share).layer(start)
    left = []
    for _ in range(3):
        layer.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
        layer.attended(torch.zeros(1, 1, 1, 2), 1.0)
        left.append(layer.slot_positions()[0, 0].tolist())
    return left


def test_by_hand_the_lightest_entry_behind_the_recents_goes():
    """Four of five stay, two of them recents: of 0, 1, 2 the lightest goes, however light 3 and the new token are."""
    assert run_by_hand([3.0, 1.0, 2.0, 0.0], 0.5) == [[0, 2, 3, 4], [0, 2, 4, 5], [0, 2, 5, 6]]
    assert run_by_hand([3.0, 1.0, 2.0, 0.0], 1.0) == [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]


def test_by_hand_among_equals_the_later_one_goes():
    assert run_by_hand([1.0, 1.0, 1.0, 1.0], 0.5) == [[0, 1, 3, 4], [0, 1, 4, 5], [0, 1, 5, 6]]


def test_parameters_are_refused_by_name():
    with pytest.raises(ConfigError, match="share is 1.5"):
        HeavyHitters(1.5)
    with pytest.raises(ConfigError, match="ranking is 'rank'"):
        OneSet(ranking="rank")


# ---------------------------------------------------------------- the released selection


@settings(max_examples=cover.examples(60), deadline=None, derandomize=True)
@given(
    length=st.integers(2, 60),
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 4]),
    share=st.floats(0, 1),
    strict=st.booleans(),
    ties=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_released_reading_keeps_one_permuted_set_everywhere(length, layers, heads, share, strict, ties, seed):
    made = method("h2o", "released")
    budget = 1 + int(share * (length - 2))
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.rand(heads, length, generator=generator) for _ in range(layers)]
    if ties:
        scores = [(score * 3).round() for score in scores]
    index = made.select(scores, budget, None, range(layers), layers, strict)
    rows = [row[: length - 1] for score in scores for row in score.double().tolist()]
    expected = oracle.released(rows, budget, length) + ([] if strict else [length - 1])
    for layer in index:
        assert [[j for j in row if j >= 0] for row in layer.tolist()] == [expected] * heads
    assert made.scope == "model"


def test_the_released_ranking_by_hand():
    """Scores 5 1 4 2 3 of six tokens, C = 3: sorted order 1 3 4 2 0; places whose number exceeds 3 are place 2 alone."""
    scores = [torch.tensor([[5.0, 1.0, 4.0, 2.0, 3.0, 9.0]])]
    assert method("h2o", "released").select(scores, 3, None, [0], 1)[0].tolist() == [[2, 5]]
    best = OneSet(ranking="value").select(scores[0], torch.tensor([3]), torch.tensor([False] * 5 + [True]))
    assert best.tolist() == [[0, 2, 5]]


def test_one_set_refuses_caps_that_differ():
    with pytest.raises(ConfigError, match="equal caps everywhere"):
        OneSet().select(torch.rand(2, 5), torch.tensor([2, 3]), torch.zeros(5, dtype=torch.bool))
