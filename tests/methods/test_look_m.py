"""LOOK-M: text prior, recents and heavy hitters, merging; its released rules; whole answers of three families."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor, OverBudgetError
from mmkv_bench.compression.reducers.lookm_merge import LookMMerge
from mmkv_bench.compression.scorers.text_prior import TextPriorScorer
from mmkv_bench.compression.selectors.text_recents import TextRecents
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods.build import build_compressor
from tests import cover, reference, zoo
from tests.compression import oracles
from tests.each import each
from tests.generation import common
from tests.methods import stock
from tests.oracles import look_m as oracle

few = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
many = settings(
    max_examples=cover.examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
FAMILIES = ("qwen2_5_vl", "llava_next", "internvl_qwen3")  # grouped queries with mrope, MHA, grouped queries
shapes = st.sampled_from([(1, 1), (2, 3), (3, 1), (4, 2)])  # KV heads, query heads of each


@functools.cache
def method(reading: str = "paper", **parameters) -> Compressor:
    config = compose(["method=look_m", *(f"methods.look_m.{name}={value}" for name, value in parameters.items())])
    return build_compressor("look_m", config.methods["look_m"], reading, method_defaults(["look_m"])["look_m"])


@st.composite
def token_types(draw, length: int) -> list[int]:
    """Runs of text, images and videos, in any order, one kind alone included."""
    types: list[int] = []
    while len(types) < length:
        types += [draw(st.sampled_from([0, 1, 2]))] * draw(st.integers(1, max(1, length // 2)))
    return types[:length]


def observe(layer, types, cuts=()):
    obs = layer.observe(TextPriorScorer().needs, cuts)
    obs.token_types = None if types is None else torch.tensor(types)
    return obs


# ---------------------------------------------------------------- scores


@few
@given(shape=shapes, length=st.integers(1, 70), seed=st.integers(0, 10**6), cut=st.integers(1, 69), data=st.data())
def test_scores_are_column_sums_and_text_gets_the_largest_on_top(shape, length, seed, cut, data):
    layer, types = oracles.make_layer(length, *shape, seed=seed), data.draw(token_types(length))
    got = TextPriorScorer().score(observe(layer, types, [cut]), 8, 0)
    sums = oracle.accumulated(layer.query.float(), layer.key, layer.scaling)
    want = torch.tensor([oracle.with_prior(row, types) if any(types) else row for row in sums])
    assert got.dtype == torch.float32 and torch.isfinite(got).all()
    assert torch.allclose(got.double(), want.double(), rtol=2e-5, atol=1e-6)
    plain = TextPriorScorer(prior=False).score(observe(layer, types), 8, 0)
    assert torch.allclose(plain.double(), torch.tensor(sums).double(), rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_scores_of_300_tokens():
    layer = oracles.make_layer(300, 2, 2, seed=1)
    types = [0] * 20 + [1] * 250 + [0] * 30
    got = TextPriorScorer().score(observe(layer, types), 8, 0)
    sums = oracle.accumulated(layer.query.float(), layer.key, layer.scaling)
    assert torch.allclose(got.double(), torch.tensor([oracle.with_prior(r, types) for r in sums]).double(), rtol=2e-5)


def test_all_text_ranks_before_all_visual_tokens_even_where_the_sum_rounds_away():
    class Sums:
        column_sums = torch.tensor([[3e4, 1e-6, 5.0, 0.0, 7.0, 2.9e4]])
        token_types = torch.tensor([1, 0, 2, 0, 0, 1])

    got = TextPriorScorer().score(Sums(), 4, 0)[0]
    assert got[[1, 3, 4]].min() > got[[0, 2, 5]].max()
    assert got[4] > got[1] and torch.equal(got[[0, 2, 5]], Sums.column_sums[0, [0, 2, 5]])


@each("types", [None, [0] * 40])
def test_a_text_prompt_is_h2o_and_says_so(types):
    h2o = build_compressor("h2o", method_defaults(["h2o"])["h2o"], "paper")
    layer, made = oracles.make_layer(40, 2, 3, seed=3), method()
    scores = [made.scorer.score(observe(layer, types), 11, 0)]
    assert torch.equal(scores[0], h2o.scorer.score(observe(layer, types), 11, 0))
    tensor = None if types is None else torch.tensor(types)
    for strict in (False, True):
        (got,) = made.select(scores, 11, tensor, [0], 1, strict)
        assert torch.equal(got, h2o.select(scores, 11, tensor, [0], 1, strict)[0])
    assert made.fallbacks(11, 40, tensor) == ("no_visual_tokens", "nothing_merged")
    assert method(merge="none").fallbacks(11, 40, tensor) == ("no_visual_tokens",)


# ---------------------------------------------------------------- selection


@st.composite
def problems(draw):
    length = draw(st.integers(1, 120))
    heads, seed = draw(st.integers(1, 3)), draw(st.integers(0, 10**6))
    types = draw(token_types(length))
    g = torch.Generator().manual_seed(seed)
    sums = torch.rand(heads, length, generator=g) ** 3 * 5
    if draw(st.booleans()):
        sums = sums.mul(2).round()  # many ties
    scores = torch.tensor([oracle.with_prior(row, types) if any(types) else row for row in sums.tolist()])
    return scores, types, draw(st.integers(1, length + 5)), draw(st.booleans())


@many
@given(problem=problems(), share=st.sampled_from(["0.5", "0.29", "0", "1"]))
def test_the_budget_is_strict_and_text_outranks_visual_tokens(problem, share):
    scores, types, budget, strict = problem
    length = scores.shape[1]
    if budget >= length:
        return
    (got,) = method(recent=share).select([scores], budget, torch.tensor(types), [0], 1, strict)
    n, granted = length - int(strict), budget - int(strict)
    # under strict the token that is fed again is the last of the recents
    recents = max(0, oracle.share_of(share, budget) - int(strict))
    for row, values in zip(got.tolist(), scores.tolist(), strict=True):
        kept = [j for j in row if j >= 0]
        assert kept == oracle.strict_set(values[:n], granted, recents)
        old_text = [j for j in range(n - recents) if types[j] == 0]
        chosen = [j for j in kept if j < n - recents]
        if any(types) and any(types[j] for j in chosen):
            assert set(old_text) <= set(chosen), "a visual token stays only where all older text does"


@many
@given(problem=problems(), share=st.sampled_from(["0.5", "0.29", "0", "1"]), prior=st.booleans())
def test_equation_8_as_printed_keeps_all_text_besides_and_says_so(problem, share, prior):
    scores, types, budget, strict = problem
    length = scores.shape[1]
    if budget >= length:
        return
    made = method(recent=share, prior=str(prior).lower(), budget_rule="union")
    assert made.reading == "paper" and made.exceeds and made.exceeds_as_printed and not made.falls_short
    (got,) = made.select([scores], budget, torch.tensor(types), [0], 1, strict)
    n, granted = length - int(strict), budget - int(strict)
    recents = max(0, oracle.share_of(share, budget) - int(strict))
    for row, values in zip(got.tolist(), scores.tolist(), strict=True):
        kept = [j for j in row if j >= 0]
        mixed = any(types[:n])
        wanted = oracle.union_set(values[:n], types[:n], granted, recents)
        assert kept == (wanted if mixed else oracle.strict_set(values[:n], granted, recents))


@each(
    ("reading", "parameters", "version"),
    [
        ("paper", {}, 2),
        ("paper", {"merge": "weighted"}, 2),
        ("paper", {"merge": "none"}, 1),
        ("paper", {"budget_rule": "union"}, 1),
        ("released", {}, 1),
    ],
)
def test_only_methods_that_evict_text_and_merge_have_a_new_version(reading, parameters, version):
    assert method(reading, **parameters).version == version


@many
@given(problem=problems())
def test_the_released_rule_keeps_all_text_above_the_budget(problem):
    scores, types, budget, strict = problem
    length = scores.shape[1]
    n, granted = length - int(strict), budget - int(strict)
    if budget >= length or not any(types[:n]):
        return
    (got,) = method("released").select([scores], budget, torch.tensor(types), [0], 1, strict)
    recents = important = oracle.share_of("0.5", granted)
    old_text = sum(kind == 0 for kind in types[: n - recents])
    for row, values in zip(got.tolist(), scores.tolist(), strict=True):
        kept = [j for j in row if j >= 0]
        assert kept == oracle.released_set(values[:n], types[:n], recents, important)
        assert len(kept) == max(important, old_text) + recents and {j for j in range(n) if not types[j]} <= set(kept)


def test_selection_by_hand():
    types = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0])
    sums = torch.tensor([[9.0, 8, 7, 1, 6, 2, 5, 1]])
    scores = torch.where(types == 0, sums + 9, sums)

    def kept(made: Compressor, budget: int, strict: bool = False) -> list[int]:
        values = scores if made.scorer.prior else sums
        return made.select([values], budget, types, [0], 1, strict)[0][0].tolist()

    assert kept(method(), 4) == [0, 5, 6, 7]  # recents 6 7; the two best of text 0 3 5
    assert kept(method(), 6) == [0, 1, 3, 5, 6, 7]  # recents 5 6 7; text 0 3; the best visual token
    assert kept(method(), 4, strict=True) == [0, 5, 6]  # 7 is fed again
    assert kept(method("released"), 4) == [0, 3, 5, 6, 7]  # one more than the budget: all text
    assert kept(method("released"), 7) == [0, 1, 3, 5, 6, 7]  # halves of 3 and 3
    assert kept(method(prior="false"), 3) == [0, 1, 7] and kept(method(prior="false", sinks=2), 4) == [0, 1, 6, 7]
    assert kept(method(prior="false", sinks=2, recent=0), 3) == [0, 1, 2]


def test_all_text_is_refused_outside_of_the_released_reading():
    types = torch.tensor([0] * 9 + [1] * 9)
    scores = [torch.rand(2, 18)]
    released = method("released")
    assert [int(r) for r in (released.select(scores, 4, types, [0], 1)[0] >= 0).sum(-1)] == [11, 11]
    with pytest.raises(OverBudgetError, match="look_m kept 22 entries, but the budget allows 8"):
        replace(released, reading="paper").select(scores, 4, types, [0], 1)
    with pytest.raises(ConfigError, match="allowed: the paper's parameters, or reading=released"):
        method(budget_rule="all_text")


@each(
    ("types", "budget", "names"),
    [
        ([0] * 6 + [1] * 10, 12, ()),  # recents are 6 visual tokens, and 6 text tokens fit
        ([0] * 7 + [1] * 9, 12, ("text_over_budget",)),
        ([1] * 9 + [0] * 7, 12, ()),  # six of them are recents
        ([1] * 9 + [0] * 7, 3, ("text_over_budget",)),
        ([1] * 16, 3, ()),
        ([0] * 16, 3, ("no_visual_tokens", "nothing_merged")),
        ([0] * 16, 16, ("prompt_within_budget",)),
    ],
)
def test_what_does_not_fit_is_recorded(types, budget, names):
    assert method().fallbacks(budget, len(types), torch.tensor(types)) == names
    assert method(prior="false").fallbacks(budget, len(types), torch.tensor(types)) == tuple(
        name for name in names if name in ("prompt_within_budget", "nothing_merged")
    )


# ---------------------------------------------------------------- whole answers


def expected(model, inputs, budget: int, made: Compressor, strict: bool):
    """Kept sets of the oracle, and its merged entries, per layer, from the stock model's queries, keys and values."""
    types, found, least = stock.types_of(model, inputs), [], math.inf
    n, granted = len(types) - int(strict), budget - int(strict)
    for ((query, key, value),) in stock.watch(model, inputs):
        scaling = key.shape[-1] ** -0.5
        rows = []
        for sums in oracle.accumulated(query, key, scaling):
            scores = oracle.with_prior(sums, types)[:n]
            if made.reading == "released":
                rows.append(oracle.released_set(scores, types[:n], granted // 2, granted // 2))
            elif made.selector.rule == "union":
                rows.append(oracle.union_set(scores, types[:n], granted, budget // 2 - int(strict)))
            else:
                rows.append(oracle.strict_set(scores, granted, budget // 2 - int(strict)))
        merge = made.reducer.merge
        misaligned = made.reducer.sources == "misaligned" and merge != "pivot"
        keys, values, margin = oracle.reduced(key[:, :n], value[:, :n], rows, types[:n], merge, misaligned)
        found.append((rows, (keys, values)))
        least = min(least, margin)
    assert least > 1e-6, "an assignment hangs on rounding: take another prompt"
    return found


@pytest.mark.full
@each(
    ("name", "reading", "merge", "protocol"),
    [
        ("qwen2_5_vl", "paper", "pivot", "paper"),
        ("llava_next", "paper", "average", "paper"),
        ("internvl_qwen3", "paper", "weighted", "strict"),
        ("llava_next", "released", "average", "paper"),
        ("qwen2_5_vl", "released", "weighted", "strict"),
    ],
)
def test_answers_are_those_of_the_oracles_cache(name, reading, merge, protocol):
    model, inputs, strict = zoo.model(name, "eager"), zoo.prompt(name, seed=1), protocol == "strict"
    made = method(reading, merge=merge)
    length = inputs["input_ids"].shape[1]
    budget = math.ceil(length * 0.4)
    want = expected(model, inputs, budget, made, strict)
    with attach(model, made, budget=Budget.parse(budget), protocol=protocol) as session:
        run = reference.generate(model, inputs, 1 if strict else 6)
        kept, layers = session.kept(), session.cache.layers
    for index, layer, (rows, (keys, values)) in zip(kept, layers, want, strict=True):
        assert [[j for j in row if j >= 0] for row in index[0].tolist()] == rows
        m = index.shape[-1]
        assert torch.allclose(layer.keys[0, :, :m].double(), torch.stack(keys), rtol=2e-6, atol=2e-6)
        assert torch.allclose(layer.values[0, :, :m].double(), torch.stack(values), rtol=2e-6, atol=2e-6)
    if not strict:
        other = stock.decode_from(model, inputs, [w[0] for w in want], [w[1] for w in want], 1, 6)
        assert (run.logits - other.logits).abs().max() <= 2e-6 and torch.equal(run.tokens, other.tokens)


@pytest.mark.full
@cover.few("name", FAMILIES, first=2)
def test_forks_answer_as_they_do_alone(name):
    model, prompt = zoo.model(name), common.encoded(name)
    variants = [method(), method(merge="average", budget_rule="union"), method(prior="false")]
    variants.append(method("released", merge="average"))
    cells = [
        common.cell(made, budget, protocol, name=f"{i}@{budget}/{protocol}")
        for i, made in enumerate(variants)
        for budget in (1, "40%")
        for protocol in common.PROTOCOLS
    ]
    forks = common.assert_forks_equal_alone(model, name, prompt, cells)
    assert len({fork.kept_digest for fork in forks}) > 8


# ---------------------------------------------------------------- parameters


def test_parameters_reach_every_part():
    made = method(merge="weighted", recent=0.25, prior="false", sinks=4)
    assert made.reducer == LookMMerge("weighted") and made.scorer == TextPriorScorer(False)
    assert made.selector == TextRecents(share=0.25, sinks=4, text_first=False)
    released = method("released")
    assert released.selector == TextRecents(rule="all_text") and released.reducer == LookMMerge("pivot", "misaligned")
    assert (method().reducer.merges, method(merge="none").reducer.merges) == (True, False)


@each(
    ("build", "message"),
    [
        (lambda: LookMMerge("mean"), "merge is 'mean'"),
        (lambda: LookMMerge(sources="aligne"), "did you mean 'aligned'"),
        (lambda: TextRecents(rule="all"), "rule is 'all'"),
        (lambda: TextRecents(follow="caps"), "did you mean 'cap'"),
        (lambda: TextRecents(margin=-2), "margin is -2"),
        (lambda: TextRecents(share=1.1), "share is 1.1"),
    ],
)
def test_impossible_parameters_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
