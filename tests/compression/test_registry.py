"""What every registered method promises; a file in conf/method joins this matrix by being there."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.session import attach
from mmkv_bench.config import options
from mmkv_bench.methods import OUTSIDE, build_compressor
from mmkv_bench.planning.compose import method_defaults
from tests import reference, zoo
from tests.compression import oracles
from tests.generation import common

LAYERS = 3
UNBUDGETED = {"full", "kivi"}  # nothing is evicted: what they promise is tested with their decode policies
NAMES = sorted(set(options("method")) - UNBUDGETED - set(OUTSIDE))  # custom and kvpress: tests/methods
READINGS = ("paper", "released")
HELD_BACK = {"blind"}  # controls that leave a budget unused: only so many entries are of the kind they keep
# Released readings may exceed the budget, by at most so many entries per KV head and layer on average.
RELEASED_SHORT = {"h2o"}  # ElasticCache's ranking drops one entry too many
RELEASED_EXCESS = {"keydiff": 32, "pyramidkv": (LAYERS - 1) / 2, "adakv": 0.5}

every_method = pytest.mark.parametrize("name", NAMES)
every_reading = pytest.mark.parametrize("reading", READINGS)


@functools.cache
def method(name: str, reading: str = "paper") -> Compressor:
    return build_compressor(name, method_defaults([name])[name], reading)


@functools.cache
def union() -> Needs:
    return functools.reduce(Needs.__or__, (method(n, r).scorer.needs for n in NAMES for r in READINGS))


def types_of(length: int) -> torch.Tensor:
    """Text, an image, text again; a prompt of one or two tokens has an image token too."""
    types = torch.zeros(length, dtype=torch.int64)
    types[length // 4 : length // 4 + max(1, length // 2)] = 1
    return types


def prompt(length: int, heads: int, group: int, seed: int, needs: Needs, dtype=torch.float32, identity="sample"):
    """A model's observations of one prompt: other weights and hidden states in every layer."""
    seen = []
    for i in range(LAYERS):
        layer = oracles.make_layer(length, heads, group, seed=seed + i)
        seen.append(layer.observe(needs, layer=i, identity=identity, dtype=dtype))
        seen[-1].token_types = types_of(length)
    return seen


def scores_of(made: Compressor, seen, budget: int, seed: int = 0) -> list[torch.Tensor]:
    return [made.scorer.score(one, budget, seed) for one in seen]


def keep(made: Compressor, scores, budget: int, strict: bool) -> list[torch.Tensor]:
    return made.select(scores, budget, types_of(scores[0].shape[1]), range(LAYERS), LAYERS, strict)


def same(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


problems = {
    "length": st.integers(2, 150),
    "heads": st.sampled_from([1, 2, 4]),
    "group": st.sampled_from([1, 3]),
    "share": st.floats(0, 1),
    "strict": st.booleans(),
    "seed": st.integers(0, 10**6),
}


@every_method
@every_reading
@settings(max_examples=8, deadline=None, derandomize=True)
@given(**problems)
def test_exactly_the_budget_is_kept(name, reading, length, heads, group, share, strict, seed):
    made = method(name, reading)
    budget = 1 + int(share * (length - 2))  # 1 .. T - 1
    index = keep(made, scores_of(made, prompt(length, heads, group, seed, made.scorer.needs), budget), budget, strict)
    candidates, granted = length - int(strict), budget - int(strict)
    assert len(index) == LAYERS
    for rows in index:
        assert rows.dtype == torch.int64 and rows.shape[0] == heads
        for row in rows.tolist():
            real = [j for j in row if j >= 0]
            assert row == [-1] * (len(row) - len(real)) + sorted(set(real))  # ascending, once each, padded on the left
            assert all(j < candidates for j in real)
    kept = sum(int((rows >= 0).sum()) for rows in index)
    if name in HELD_BACK:
        assert kept <= granted * heads * LAYERS
    elif reading == "released" and name in RELEASED_SHORT:
        assert max(granted - 1, 0) * heads * LAYERS <= kept <= granted * heads * LAYERS
    elif reading == "released" and name in RELEASED_EXCESS:
        least = granted - 1.5 if name == "adakv" else granted  # its floor is rounded down, then each cap by itself
        most = min(granted + RELEASED_EXCESS[name], candidates)
        assert least * heads * LAYERS <= kept <= most * heads * LAYERS
    else:
        assert kept == granted * heads * LAYERS


@every_method
@settings(max_examples=4, deadline=None, derandomize=True)
@given(**problems)
def test_a_layer_decided_alone_is_decided_as_among_the_others(name, length, heads, group, share, strict, seed):
    made = method(name)
    budget = 1 + int(share * (length - 2))
    scores = scores_of(made, prompt(length, heads, group, seed, made.scorer.needs), budget)
    together = keep(made, scores, budget, strict)
    if made.scope == "layer":
        types = types_of(length)
        alone = [made.select([scores[i]], budget, types, [i], LAYERS, strict)[0] for i in range(LAYERS)]
        assert same(alone, together)


@every_method
@every_reading
@pytest.mark.parametrize("strict", [False, True])
def test_the_same_prompt_keeps_the_same_entries_whatever_ran_before(name, reading, strict):
    made = method(name, reading)
    shape = (70, 2, 3, 5)
    alone = keep(made, scores_of(made, prompt(*shape, made.scorer.needs), 24), 24, strict)
    crowd = prompt(*shape, union())
    for other in reversed(NAMES):  # other methods and another sample on the way, the stream of torch moved
        keep(method(other), scores_of(method(other), crowd, 30, 3), 30, strict)
        torch.rand(3)
    keep(made, scores_of(made, prompt(40, 2, 3, 11, union(), identity="other"), 9), 9, strict)
    again = [keep(made, scores_of(made, crowd, 24), 24, strict) for _ in range(2)]
    assert same(again[0], alone) and same(again[1], alone)


@every_method
@every_reading
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("length", "budget"), [(1, 1), (2, 1), (6, 3), (80, 33)])
def test_half_precision_gives_finite_scores_and_the_budget(name, reading, dtype, length, budget):
    made = method(name, reading)
    scores = scores_of(made, prompt(length, 2, 2, 3, made.scorer.needs, dtype), budget)
    for score in scores:
        assert score.shape == (2, length) and score.dtype == torch.float32 and torch.isfinite(score).all()
    if budget < length and reading == "paper":
        kept = sum(int((rows >= 0).sum()) for rows in keep(made, scores, budget, False))
        assert kept == budget * 2 * LAYERS or name in HELD_BACK


@every_method
def test_half_precision_keeps_the_float32_selection_up_to_near_ties(name):
    """Inputs are rounded to half precision first, so that both sides start from the same numbers."""
    made = method(name)
    if made.scorer.stochastic and name != "random":
        pytest.skip("proxies are projected in the model's dtype, which moves votes")
    seen = {}
    for dtype in (torch.float32, torch.bfloat16):
        layer = oracles.make_layer(90, 2, 2, seed=8)
        layer.key, layer.value = layer.key.bfloat16().double(), layer.value.bfloat16().double()
        obs = layer.observe(made.scorer.needs, dtype=dtype)
        obs.token_types = types_of(90)
        seen[dtype] = [obs] * LAYERS
    exact, half = (keep(made, scores_of(made, obs, 30), 30, False) for obs in seen.values())
    for a, b in zip(exact, half, strict=True):
        ours, theirs = ({(h, j) for h, row in enumerate(x.tolist()) for j in row if j >= 0} for x in (a, b))
        assert len(ours - theirs) <= 3, "more than rounding of the queries to 8 bits can move"


# ---------------------------------------------------------------- through a model


@pytest.fixture(scope="module", params=["qwen2_5_vl", "llava_next"])
def family(request):
    return request.param


@every_method
def test_a_budget_of_the_whole_prompt_is_the_full_cache(name, family):
    model, inputs = zoo.model(family), zoo.prompt(family)
    length = inputs["input_ids"].shape[1]
    untouched = reference.generate(model, inputs, 4)
    for budget in (length, length + 5, 1.0):
        with attach(model, method(name), budget=Budget.parse(budget)) as session:
            run, kept = reference.generate(model, inputs, 4), session.kept()
        assert torch.equal(run.logits, untouched.logits)
        for index in kept:
            assert torch.equal(index, torch.arange(length).expand_as(index))


@every_method
@every_reading
def test_the_stored_tensors_hold_what_was_planned(name, reading, family):
    """Counted from the cache; a layer-scope method reduces each layer by itself during the prefill."""
    model, inputs = zoo.model(family), zoo.prompt(family)
    length, made = inputs["input_ids"].shape[1], method(name, reading)
    budget = length // 3
    with attach(model, made, budget=Budget.parse(budget)) as session:
        reference.generate(model, inputs, 1)
        kept, layers = session.kept(), session.cache.layers
    heads = kept[0].shape[1]
    total = sum(int((index >= 0).sum()) for index in kept)
    for index, layer in zip(kept, layers, strict=True):
        stored = layer.slot_positions()[..., : index.shape[-1]]
        assert torch.equal(stored, index.to(stored))
    if name in HELD_BACK:
        types = inputs["input_ids"][0] == model.config.image_token_id
        assert total == min(budget, int((~types).sum())) * heads * zoo.LAYERS
        assert not types[torch.cat([index[index >= 0] for index in kept])].any()
    elif reading == "released" and name in RELEASED_EXCESS:
        assert total <= min(budget + RELEASED_EXCESS[name], length) * heads * zoo.LAYERS
    elif reading == "released" and name in RELEASED_SHORT:
        assert total == (budget - 1) * heads * zoo.LAYERS
    else:
        assert total == budget * heads * zoo.LAYERS


@every_method
def test_methods_that_need_visual_tokens_refuse_text_and_the_others_do_not(name):
    family, made = "qwen2_5_vl", method(name)
    model = zoo.model(family)
    text = common.encoded(family, zoo.without_visual(family, 20))
    cells = [common.cell(made, 8, protocol) for protocol in common.PROTOCOLS[:2]]
    for results in (common.together(model, family, text, cells), common.alone(model, family, text, cells)):
        for result in results:
            if made.scorer.needs_visual:
                assert result.status == "error" and "prompts with images or videos" in result.error
            else:
                assert result.status == "ok"
