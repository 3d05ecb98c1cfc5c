"""MEDA: entropies, allocation, per-layer recents; its released rules and timing; whole answers of three families."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.allocators.entropy import Entropy
from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.allocators.uniform_model import UniformModel
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.base import Start
from mmkv_bench.compression.decoding.late import Late
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.reducers.lookm_merge import LookMMerge
from mmkv_bench.compression.scorers.text_prior import add_text_prior, remove_text_prior
from mmkv_bench.compression.selectors.text_recents import TextRecents
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods.build import build_compressor
from tests import cover, reference, zoo
from tests.each import each
from tests.generation import common
from tests.methods import stock
from tests.oracles import look_m, meda

few = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
many = settings(
    max_examples=cover.examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
FAMILIES = ("qwen2_5_vl", "llava_next", "internvl_qwen3")
shapes = st.sampled_from([(1, 1), (2, 3), (3, 1)])


@functools.cache
def method(reading: str = "paper", **parameters) -> Compressor:
    named = {name.replace("__", "."): value for name, value in parameters.items()}
    config = compose(["method=meda", *(f"methods.meda.{name}={value}" for name, value in named.items())])
    return build_compressor("meda", config.methods["meda"], reading, method_defaults(["meda"])["meda"])


def mixed(length: int) -> list[int]:
    """Text, an image, text, a video, text."""
    part = max(1, length // 5)
    return ([0] * part + [1] * part + [0] * part + [2] * part + [0] * length)[:length]


# ---------------------------------------------------------------- allocation


def caps_of(allocator: Entropy, entropies: list[float], budget: int, n: int, strict: bool = False) -> list[int]:
    """`budget` and `n` as the allocator gets them, without the token that is fed again."""
    layers = range(len(entropies))
    summaries = {i: torch.tensor([e], dtype=torch.float64) for i, e in enumerate(entropies)}
    context = Context(budget + strict, n + strict, strict, summaries=summaries)
    scores = [torch.zeros(2, n)] * len(entropies)
    caps = [c.tolist() for c in allocator.caps(scores, budget, layers, len(entropies), context)]
    assert all(first == second for first, second in caps)
    one = allocator.caps(scores[:1], budget, [layers[-1]], len(entropies), context)
    assert [c.tolist() for c in one] == caps[-1:]
    return [first for first, _ in caps]


entropies = st.lists(st.floats(0, 9), min_size=1, max_size=32)


@many
@given(entropies=entropies, n=st.integers(1, 300), share=st.floats(0, 1))
def test_allocation_is_the_formula_clipped_and_exact(entropies, n, share):
    budget = int(share * (n - 1))
    caps = caps_of(Entropy(), entropies, budget, n)
    assert caps == meda.allocation(entropies, budget, n)
    assert sum(caps) == budget * len(entropies) and max(caps) <= n
    ranked = sorted(range(len(caps)), key=lambda i: entropies[i])
    assert all(caps[a] <= caps[b] + 1 for a, b in zip(ranked, ranked[1:], strict=False)), "more entropy, more entries"


@many
@given(entropies=entropies, n=st.integers(1, 300), share=st.floats(0, 1), rho=st.sampled_from(["0", "0.2", "0.29"]))
def test_the_released_clamp_divides_nothing_again(entropies, n, share, rho):
    budget = int(share * (n - 1))
    mean = Fraction(rho) * n if rho != "0" else Fraction(budget)
    got = caps_of(Entropy(clamp="released", rho=float(rho)), entropies, budget, n)
    assert got == meda.released_allocation(entropies, mean, n)


def test_allocation_by_hand():
    """softmax(0, 2, 0) = .1065, .787, .1065: 15 entries would be 1.6, 11.8, 1.6 of 10 tokens."""
    assert caps_of(Entropy(), [0, 2, 0], 5, 10) == [3, 10, 2]  # 5 left for two equal layers, the lower index first
    assert caps_of(Entropy(), [0, 2, 0], 5, 12) == [2, 12, 1]  # nothing is clipped: 1.597 and 11.806 round up first
    assert caps_of(Entropy(clamp="released"), [0, 2, 0], 5, 10) == [1, 10, 1]  # 12 of 15 entries
    assert caps_of(Entropy(clamp="released"), [0, 9, 0], 5, 400) == [4, 14, 4]  # a hundredth at least: 22 of 15
    assert caps_of(Entropy(clamp="released", rho=0.2), [0, 0], 3, 50) == [10, 10]  # whatever was asked
    assert caps_of(Entropy(), [math.log(2), 0], 6, 20) == [8, 4]
    assert caps_of(Entropy(dynamic=False), [0, 2, 0], 5, 10) == [5, 5, 5]


# ---------------------------------------------------------------- selection


@st.composite
def problems(draw):
    length, layers = draw(st.integers(2, 100)), draw(st.integers(1, 4))
    types = draw(st.sampled_from([mixed(length), [1] * (length // 2) + [0] * (length - length // 2), [0] * length]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    sums = [torch.rand(2, length, generator=g) ** 3 * 5 for _ in range(layers)]
    scores = [
        torch.tensor([look_m.with_prior(r, types) if any(types) else r for r in layer.tolist()]) for layer in sums
    ]
    found = draw(st.lists(st.floats(0, 3), min_size=layers, max_size=layers))
    return scores, types, found, draw(st.integers(1, max(1, length - 1))), draw(st.booleans())


def select(made: Compressor, scores, types, found, budget, strict):
    summaries = {i: torch.tensor([e], dtype=torch.float64) for i, e in enumerate(found)}
    count = len(scores)
    index = made.select(scores, budget, torch.tensor(types), range(count), count, strict, summaries=summaries)
    return [[[j for j in row if j >= 0] for row in layer.tolist()] for layer in index]


@pytest.mark.slow
@many
@given(problem=problems(), share=st.sampled_from(["0.75", "0.5", "0.29"]))
def test_every_layer_splits_its_own_entries(problem, share):
    scores, types, found, budget, strict = problem
    n, granted = len(types) - int(strict), budget - int(strict)
    if budget >= len(types):
        return
    got = select(method(recent=share), scores, types, found, budget, strict)
    caps = meda.allocation(found, granted, n)
    for rows, layer, cap in zip(got, scores, caps, strict=True):
        for row, values in zip(rows, layer.tolist(), strict=True):
            assert row == look_m.strict_set(values[:n], cap, look_m.share_of(share, cap))
    assert sum(len(rows[0]) for rows in got) == granted * len(scores)


@pytest.mark.slow
@many
@given(problem=problems(), margin=st.sampled_from([-1, 0, 3, 100]))
def test_the_released_rules_raise_recents_and_keep_all_text(problem, margin):
    scores, types, found, budget, strict = problem
    n = len(types) - int(strict)
    if budget >= len(types) or not any(types[:n]):
        return
    made = method("released", released__margin=margin)
    got = select(made, scores, types, found, budget, strict)
    texts = sum(kind == 0 for kind in types[:n])
    for rows, layer, cap in zip(got, scores, meda.released_allocation(found, Fraction(n, 5), n), strict=True):
        recents = cap // 2
        if margin >= 0 and recents < texts:
            recents = min(n, texts + margin)
        for row, values in zip(rows, layer.tolist(), strict=True):
            assert row == look_m.released_set(values[:n], types[:n], recents, cap // 2)


def test_selection_by_hand():
    """Layers of 8 and 4 entries: 6 recents and 2 others, 3 recents and 1 other."""
    types = [0] * 4 + [1] * 8 + [0] * 4
    values = torch.tensor([[1.0, 2, 3, 4, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1]])
    scores = [torch.where(torch.tensor(types) == 0, values + 9, values)] * 2
    kept = select(method(), scores, types, [math.log(2), 0.0], 6, False)
    assert kept == [[[2, 3, 10, 11, 12, 13, 14, 15]], [[3, 13, 14, 15]]]
    kept = select(method(prior="false"), [values] * 2, types, [math.log(2), 0.0], 6, False)
    assert kept == [[[4, 5, 10, 11, 12, 13, 14, 15]], [[4, 13, 14, 15]]]


# ---------------------------------------------------------------- ablations and parameters


def test_ablations_of_table_5_are_parameters():
    full, dynamic, merging = method(), method(dynamic="false"), method(merge="none")
    both = method(dynamic="false", merge="none")
    assert (full.allocator, full.reducer) == (Entropy(), LookMMerge("average"))
    assert (dynamic.allocator, dynamic.reducer) == (Entropy(dynamic=False), LookMMerge("average"))
    assert (merging.allocator, merging.reducer) == (Entropy(), LookMMerge("none"))
    assert (both.allocator, both.reducer) == (Entropy(dynamic=False), LookMMerge("none"))
    assert (full.scope, dynamic.scope) == ("model", "layer")
    assert full.needs.queries and full.needs.column_sums
    assert dynamic.needs == full.scorer.needs and dynamic.allocator.summary_key(4, 9) is None
    scores, types = [torch.rand(2, 30)] * 2, torch.tensor(mixed(30))
    lookm = compose(["method=look_m", "methods.look_m.recent=0.75"]).methods["look_m"]
    lookm = build_compressor("look_m", lookm, "paper")
    for a, b in zip(*(m.select(scores, 8, types, [0, 1], 2) for m in (dynamic, lookm)), strict=True):
        assert torch.equal(a, b), "without dynamic allocation MEDA's selection is LOOK-M's with another split"


def test_the_released_reading_is_every_switch_of_the_release():
    made = method("released")
    assert made.allocator == Entropy("full", "released", 0.2)
    assert (made.selector.share, made.selector.rule, made.selector.margin) == (0.5, "all_text", 100)
    assert made.reducer == LookMMerge("average", "misaligned")
    assert made.decoding == Late(made.allocator, made.selector, made.reducer)
    assert method().decoding is None, "the paper reduces at the end of the prefill"


@each(
    ("build", "message"),
    [
        (lambda: Entropy(entropy="cross"), "entropy is 'cross'"),
        (lambda: Entropy(clamp="release"), "did you mean 'released'"),
        (lambda: Entropy(rho=1.5), "rho is 1.5"),
        (lambda: Late(None, None, None, when="first"), "when is 'first'"),
        (lambda: Late(UniformModel(), None, None), "UniformModel reads the scores of all layers"),
    ],
)
def test_impossible_parameters_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


# ---------------------------------------------------------------- whole answers


def entropies_of(calls, types, full: bool) -> list[float]:
    found = []
    for (query, key, _), *_ in calls:
        scaling = key.shape[-1] ** -0.5
        found.append(meda.full_rows(query, key, scaling) if full else meda.cross_modal(query, key, scaling, types))
    return found


def entries_of(key, value, rows, types, misaligned=False):
    keys, values, margin = look_m.reduced(key, value, rows, types, "average", misaligned)
    assert margin > 1e-6, "an assignment hangs on rounding: take another prompt"
    return keys, values


def assert_stored(layers, want):
    for layer, (rows, (keys, values)) in zip(layers, want, strict=True):
        m = len(rows[0])
        assert layer.slot_positions()[0, :, :m].tolist() == rows
        assert torch.allclose(layer.keys[0, :, :m].double(), torch.stack(keys), rtol=2e-6, atol=2e-6)
        assert torch.allclose(layer.values[0, :, :m].double(), torch.stack(values), rtol=2e-6, atol=2e-6)


@pytest.mark.full
@each(("name", "seed"), [("qwen2_5_vl", 1), ("llava_next", 3), ("llava_onevision_video", 2)])
def test_answers_are_those_of_the_oracles_cache(name, seed):
    model, inputs = zoo.model(name, "eager"), zoo.prompt(name, seed=seed)
    types = stock.types_of(model, inputs)
    budget = math.ceil(len(types) * 0.4)
    calls, want = stock.watch(model, inputs), []
    caps = meda.allocation(entropies_of(calls, types, full=False), budget, len(types))
    assert len(set(caps)) > 1
    for ((query, key, value),), cap in zip(calls, caps, strict=True):
        sums = look_m.accumulated(query, key, key.shape[-1] ** -0.5)
        rows = [look_m.strict_set(look_m.with_prior(row, types), cap, cap * 3 // 4) for row in sums]
        want.append((rows, entries_of(key, value, rows, types)))
    with attach(model, method(), budget=Budget.parse(budget)) as session:
        run, layers = reference.generate(model, inputs, 6), session.cache.layers
    assert_stored(layers, want)
    other = stock.decode_from(model, inputs, [w[0] for w in want], [w[1] for w in want], 1, 6)
    assert (run.logits - other.logits).abs().max() <= 2e-6 and torch.equal(run.tokens, other.tokens)


@pytest.mark.full
@each(("name", "margin"), [("qwen2_5_vl", -1), ("llava_next", 1), ("internvl_qwen3", 0)])
def test_the_release_reduces_inside_the_first_decode_step(name, margin):
    """Two tokens of the full cache; the first one's attention is scored, and its own entry is the last recent."""
    model, inputs = zoo.model(name, "eager"), zoo.prompt(name, seed=1)
    types = [*stock.types_of(model, inputs), 0]
    n = len(types)
    calls, want = stock.watch(model, inputs, 2), []
    found = entropies_of(calls, types, full=True)
    for (prefill, step), cap in zip(calls, meda.released_allocation(found, Fraction(n, 5), n), strict=True):
        query, key, value = step
        scaling, group = key.shape[-1] ** -0.5, query.shape[0] // key.shape[0]
        recents = cap // 2
        if margin >= 0 and recents < types.count(0):
            recents = types.count(0) + margin
        rows = []
        for h, sums in enumerate(look_m.accumulated(*prefill[:2], scaling)):
            sums = [*sums, 0.0]
            for q in query[h * group : (h + 1) * group, 0]:
                for j, mass in enumerate(look_m.softmax((scaling * (key[h].double() @ q.double())).tolist())):
                    sums[j] += mass
            rows.append(look_m.released_set(sums, types, recents, cap // 2))
        want.append((rows, entries_of(key, value, rows, types, misaligned=True)))
    with attach(model, method("released", released__margin=margin), budget=Budget.parse("20%")) as session:
        run, layers = reference.generate(model, inputs, 7), session.cache.layers
    assert_stored(layers, want)
    assert all(len(w[0][0]) < n for w in want), "something must have been evicted"
    untouched = reference.generate(model, inputs, 2)
    assert torch.equal(run.logits[:2], untouched.logits)
    other = stock.decode_from(model, inputs, [w[0] for w in want], [w[1] for w in want], 2, 7)
    assert (run.logits - other.logits).abs().max() <= 2e-6 and torch.equal(run.tokens, other.tokens)


@each(
    ("prior", "budget", "kept"),
    [
        (True, 3, [0, 2, 4]),  # all text, the new token's entry (4) included, before the visual token all look at
        (True, 2, [0, 2]),  # among text the sums decide
        (True, 4, [0, 1, 2, 4]),
        (False, 2, [1, 3]),
        (False, 3, [1, 2, 3]),
    ],
)
def test_text_stays_ahead_when_the_new_tokens_attention_is_added(prior, budget, kept):
    types = torch.tensor([0, 1, 0, 2])
    sums = torch.tensor([[0.5, 2.0, 0.6, 0.9]])
    key = torch.tensor([[[0.0, 0], [9, 0], [0, 0], [0, 0]]])
    start = Start(
        layer=0,
        n_layers=1,
        key=key,
        value=key.clone(),
        index=torch.tensor([[3]]),
        kept_key=key[:, 3:],
        kept_value=key[:, 3:],
        scores=add_text_prior(sums, types) if prior else sums,
        context=Context(budget, 4, False, types),
        pad=0,
        seen=4,
        acts_from=4,
        scaling=1.0,
        reserve=3,
    )
    layer = Late(Uniform(), TextRecents(share=0), Evict(), prior=prior).layer(start)
    new = torch.tensor([[[[0.0, 0]]]])
    layer.update(new, new)
    assert layer.entries().tolist() == [[5]], "the step attends to everything"
    layer.attended(torch.tensor([[[[1.0, 0]]]]), 1.0)  # nearly all of the new token's attention goes to token 1
    assert layer.slot_positions().tolist() == [[kept]] and layer.seen == 5
    layer.update(new, new)
    layer.attended(torch.tensor([[[[1.0, 0]]]]), 1.0)
    assert layer.slot_positions().tolist() == [[[*kept, 5]]], "it is reduced once"


def test_the_prior_can_be_taken_off_again():
    g = torch.Generator().manual_seed(0)
    for types in ([0, 1, 1, 0, 2], [1, 0, 0, 0, 0]):
        for _ in range(20):
            sums = torch.rand(3, 5, generator=g) * 7
            back = remove_text_prior(add_text_prior(sums, torch.tensor(types)), torch.tensor(types))
            assert torch.allclose(back, sums, atol=2e-6)


def test_recents_are_raised_only_where_they_are_fewer_than_text():
    """20 percent of 20 tokens: 2 recents and 2 others."""
    for texts, kept in ((2, [0, 1, 18, 19]), (3, list(range(20))), (1, [0, 1, 18, 19])):
        types = [0] * texts + [1] * (20 - texts)
        scores = [torch.arange(20.0, 0, -1).expand(1, -1)]
        assert select(method("released"), scores, types, [0.0], 4, False) == [[kept]], texts


def test_reducing_late_within_the_budget_keeps_the_budget():
    name = "qwen2_5_vl"
    model, prompt, made = zoo.model(name), common.encoded(name), method(when="first_step")
    cells = [common.cell(made, 12, protocol) for protocol in common.PROTOCOLS]
    heads = 2 * zoo.LAYERS
    for fork in common.assert_forks_equal_alone(model, name, prompt, cells):
        new = fork.n_tokens - 2  # after the first answer token, which was a candidate; the last one is never fed
        assert fork.entries_end == (12 + new) * heads and fork.entries_resident > fork.entries_asked
        assert fork.tokens_from_compressed == new  # the first two are the full cache's under every protocol


@pytest.mark.full
@cover.few("name", FAMILIES)
def test_forks_answer_as_they_do_alone(name):
    model, prompt = zoo.model(name), common.encoded(name)
    variants = [method(), method(dynamic="false", merge="none"), method("released", released__margin=0)]
    cells = [
        common.cell(made, budget, protocol, name=f"{i}@{budget}/{protocol}")
        for i, made in enumerate(variants)
        for budget in (1, "40%")
        for protocol in common.PROTOCOLS
    ]
    forks = common.assert_forks_equal_alone(model, name, prompt, cells)
    assert len({fork.kept_digest for fork in forks}) > 8


def test_prompts_of_one_modality_are_answered_with_a_uniform_budget():
    name = "qwen2_5_vl"
    model = zoo.model(name)
    prompt = common.encoded(name, zoo.without_visual(name, 30))
    forks = common.assert_forks_equal_alone(model, name, prompt, [common.cell(method(), 8)])
    assert forks[0].fallback == ["no_visual_tokens", "nothing_merged"] and forks[0].kept == [[8, 8]] * zoo.LAYERS
