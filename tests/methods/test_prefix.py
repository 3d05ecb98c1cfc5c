"""PrefixKV's importance and allocation, and ElasticCache's ranking, against naive versions of their equations."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mmkv_bench.calibrate.released_files import prefix_profile
from mmkv_bench.compression.allocators.prefix import Prefix
from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor, OverBudgetError
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.numerics.prefix import interpolate_ratios, prefix_curves, prefix_ratios, scale_to, search
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.reducers.merging import Merging
from mmkv_bench.compression.reducers.position_merge import PositionMerge
from mmkv_bench.compression.scorers.layer_mean import LayerMeanScorer, permutation_scores
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.errors import CalibrationError, ConfigError, UnsupportedError
from tests import cover
from tests.compression.oracles import make_layer
from tests.each import each
from tests.oracles import prefix as oracle

examples = settings(max_examples=15, deadline=None, derandomize=True)
many = settings(max_examples=cover.examples(120), deadline=None, derandomize=True)

PROFILE = {
    "grid": [0.1, 0.2, 0.5, 0.9],
    "ratios": [[0.3, 0.06, 0.05, 0.02], [0.52, 0.1, 0.13, 0.05], [1.0, 0.5, 0.3, 0.2], [1.0, 0.95, 0.9, 0.75]],
}


# ---------------------------------------------------------------- importance


@examples
@given(
    length=st.integers(1, 40),
    heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 2, 7]),
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(1, 39), max_size=3),
)
def test_importance_is_the_mean_over_query_heads_of_column_sums(length, heads, group, seed, cuts):
    layer = make_layer(length, heads, group, seed=seed)
    scorer = LayerMeanScorer()
    got = scorer.score(layer.observe(scorer.needs, cuts), 8, 0)
    want = torch.tensor(oracle.importance(layer.query.float(), layer.key, layer.scaling))
    assert got.dtype == torch.float32 and got.shape == (heads, length)
    assert ((got.double() - want).abs() <= 2e-5 * want + 1e-12).all()  # every KV head has the layer's scores
    assert got.sum(-1).tolist() == pytest.approx([length] * heads, rel=1e-5)  # one row of attention sums to 1


@many
@given(
    values=st.lists(st.integers(0, 30), min_size=2, max_size=60),
    sinks=st.sampled_from([0, 1, 4]),
    share=st.floats(0, 1),
)
def test_permutation_scores_select_what_the_release_keeps(values, sinks, share):
    total = len(values)
    assume(sinks + 2 <= total)
    kept = sinks + 2 + int(share * (total - sinks - 2))  # as many as the release needs to keep its protected tokens
    want = oracle.released_kept([float(v) for v in values], kept, sinks)
    scores = permutation_scores(torch.tensor(values, dtype=torch.float32), sinks)[None]
    selector = TopK(sinks=sinks, recents=1)
    got = selector.select(scores, torch.tensor([kept - 1]), selector.protected(total, total, None))
    assert got[0].tolist() == want and len(want) == kept - 1


def test_a_permutation_is_no_ranking():
    """Importance 3, 1, 4, 2 of the inner tokens sorts as permutation 1, 3, 0, 2: token 2 looks best and token 3 worst."""
    scores = permutation_scores(torch.tensor([9.0, 3, 1, 4, 2, 0]), 1)
    assert scores.tolist() == [-1, 1, 3, 0, 2, -1]
    assert oracle.released_kept([9.0, 3, 1, 4, 2, 0], 4, 1) == [0, 2, 5]  # forgets 6 - 4 = 2 and one more


@each("length", [1, 2, 3])
def test_permutation_scores_of_prompts_without_inner_tokens_are_finite(length):
    scores = permutation_scores(torch.ones(length), 1)
    assert scores.tolist() == {1: [-1], 2: [-1, -1], 3: [-1, 0, -1]}[length]


def test_only_true_rankings_share_a_score_over_all_sinks():
    assert LayerMeanScorer(sinks=1).key(4, 9) == LayerMeanScorer(sinks=2).key(9, 4)
    permuted = {LayerMeanScorer("permutation", sinks).key(4, 9) for sinks in (1, 2)}
    assert len(permuted | {LayerMeanScorer().key(4, 9)}) == 3


# ---------------------------------------------------------------- the search


@st.composite
def importances(draw):
    layers, n = draw(st.integers(1, 5)), draw(st.integers(1, 80))
    if draw(st.booleans()):  # few values: plateaus and ties, no exact total
        values = draw(st.lists(st.integers(1, 4), min_size=layers * n, max_size=layers * n))
        return torch.tensor(values, dtype=torch.float32).view(layers, n)
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    power = torch.rand(layers, 1, generator=g) * 12
    return torch.rand(layers, n, generator=g) ** power + 1e-6


@many
@given(rows=importances(), p=st.floats(0, 1))
def test_curves_are_the_cumulative_priorities(rows, p):
    curves = prefix_curves(list(rows))
    assert curves.dtype == torch.float64
    for got, row in zip(curves.tolist(), rows.double().tolist(), strict=True):
        assert got == pytest.approx(oracle.cumulative(row), rel=1e-12)
        assert got[-1] == 1.0


@many
@given(
    rows=importances(),
    share=st.floats(0, 1),
    delta=st.sampled_from(["0", "0.0125", "0.1", "1"]),
    steps=st.sampled_from([0, 0, 1, 7, 12]),
)
def test_the_search_is_algorithm_1(rows, share, delta, steps):
    curves = prefix_curves(list(rows))
    layers, n = curves.shape
    total = Fraction(layers * max(1, int(share * n)))
    got = search(curves, total, float(delta), steps)
    assert got == oracle.algorithm_1(curves.tolist(), total, Fraction(delta), steps)
    if not steps and got[1] < 64:
        assert abs(sum(got[0]) - total) <= Fraction(delta) * n
    if steps:
        assert got[1] <= steps


def test_a_looser_tolerance_never_needs_more_steps():
    g = torch.Generator().manual_seed(1)
    curves = prefix_curves([torch.rand(600, generator=g) ** (1 + layer / 4) for layer in range(32)])
    deltas = (0.0125, 0.025, 0.05, 0.075, 0.1)
    mean = [sum(prefix_ratios(curves, rho / 20, delta)[1] for rho in range(1, 20)) / 19 for delta in deltas]
    assert mean == sorted(mean, reverse=True) and mean[0] > mean[-1] > 5  # as in the paper's table 10


@many
@given(
    weights=st.lists(st.integers(0, 40).map(Fraction), min_size=1, max_size=9),
    most=st.integers(1, 30),
    least=st.sampled_from([0, 1, 2]),
    share=st.floats(0, 1),
)
def test_scaling_is_repeated_clipping_and_redistribution(weights, most, least, share):
    least = min(least, most)
    total = least * len(weights) + Fraction(int(share * (most - least) * len(weights)))
    got = scale_to(weights, total, Fraction(most), Fraction(least))
    assert sum(got) == total and all(least <= x <= most for x in got)
    if all(weights):
        assert got == oracle.shared(weights, total, least, most)


@each(
    ("weights", "total", "most", "least", "shares"),
    [
        ([6, 2, 1, 1], 20, 10, 0, [10, 5, Fraction(5, 2), Fraction(5, 2)]),  # 12 is cut; the others share 10 as 2:1:1
        ([1, 1, 2], 8, 10, 0, [2, 2, 4]),
        ([9, 1], 4, 10, 2, [2, 2]),
        ([9, 1, 10], 20, 10, 2, [Fraction(162, 19), 2, Fraction(180, 19)]),  # 1 is lifted to 2; 18 are shared as 9:10
        ([0, 0], 3, 10, 0, [Fraction(3, 2)] * 2),
        ([5, 0], 12, 10, 0, [10, 2]),  # more than all that have a weight can take
    ],
)
def test_scaling_by_hand(weights, total, most, least, shares):
    got = scale_to([Fraction(w) for w in weights], Fraction(total), Fraction(most), Fraction(least))
    assert got == shares and sum(shares) == total


@each("total", [-1, 21, 1])
def test_impossible_totals_are_refused(total):
    with pytest.raises(ValueError, match="2 shares between 1 and 10 cannot add up"):
        scale_to([Fraction(1)] * 2, Fraction(total), Fraction(10), Fraction(1))


@pytest.mark.slow
@many
@given(rows=importances(), rho=st.integers(1, 100), delta=st.sampled_from([0.0, 0.0125, 0.1]))
def test_ratios_meet_the_budget(rows, rho, delta):
    ratios, steps = prefix_ratios(prefix_curves(list(rows)), rho / 100, delta)
    assert math.fsum(ratios) == pytest.approx(len(rows) * rho / 100) and 1 <= steps <= 64
    assert all(0 < ratio <= 1 for ratio in ratios)


def test_every_layer_keeps_the_same_share_of_importance():
    g = torch.Generator().manual_seed(3)
    rows = [torch.rand(500, generator=g) ** (1 + 2 * layer) for layer in range(8)]
    curves = prefix_curves(rows)
    counts, _ = search(curves, Fraction(8 * 150))
    held = [float(curve[count - 1]) for curve, count in zip(curves, counts, strict=True)]
    assert max(held) - min(held) < 0.01 and counts == sorted(counts, reverse=True)
    uniform = [float(curve[149]) for curve in curves]
    assert min(held) > min(uniform)  # the layer that loses most loses less


def test_layers_without_importance_count_as_evenly_important():
    assert prefix_curves([torch.zeros(4), torch.tensor([0.0, 0, 2, 2])]).tolist() == [
        [0.25, 0.5, 0.75, 1.0],
        [0.5, 1.0, 1.0, 1.0],
    ]


# ---------------------------------------------------------------- allocation


@many
@given(
    rows=importances(),
    share=st.floats(0, 1),
    heads=st.sampled_from([1, 3]),
    delta=st.sampled_from(["0", "0.0125", "0.1"]),
    steps=st.sampled_from([0, 0, 8]),
)
def test_online_caps_equal_the_formula_and_add_up(rows, share, heads, delta, steps):
    layers, n = rows.shape
    budget = int(share * (n + 5))
    scores = [row.expand(heads, -1) for row in rows]
    allocator = Prefix("online", delta=float(delta), steps=steps)
    got = allocator.caps(scores, budget, range(layers), layers)
    assert all(c.dtype == torch.int64 and c.device.type == "cpu" and c.shape == (heads,) for c in got)
    caps = [c.tolist() for c in got]
    assert caps == [[c[0]] * heads for c in caps]
    flat = [c[0] for c in caps]
    assert sum(flat) == min(budget, n) * layers and max(flat) <= n and min(flat) >= min(2, budget, n)
    curves = prefix_curves(list(rows)).tolist()  # checked above; the last digit of a sum decides on a plateau
    assert flat == oracle.online_caps(curves, budget, Fraction(delta), steps)


def test_online_caps_by_hand():
    """Layer 0 is even (10 tokens of 0.1), layer 1 has half its importance in one token; 12 entries in all.

    p = 0.5: 5 + 1; p = 0.75: 8 + 6 > 12; p = 0.625: 7 + 4 < 12; p = 0.6875: 7 + 5 = 12.
    """
    rows = torch.tensor([[1.0] * 10, [9.0] + [1.0] * 9])
    counts, steps = search(prefix_curves(list(rows)), Fraction(12))
    assert (counts, steps) == ([7, 5], 4)
    assert [c.tolist() for c in Prefix("online").caps([row[None] for row in rows], 6, [0, 1], 2)] == [[7], [5]]


def test_the_search_reads_the_mean_over_heads():
    g = torch.Generator().manual_seed(5)
    scores = [torch.rand(4, 60, generator=g) ** (1 + 3 * layer) for layer in range(3)]
    mean = [score.mean(0, keepdim=True) for score in scores]
    together = [c[0] for c in Prefix("online").caps(scores, 20, range(3), 3)]
    assert together == [c[0] for c in Prefix("online").caps(mean, 20, range(3), 3)]


@many
@given(n=st.integers(1, 300), share=st.floats(0, 1))
def test_offline_caps_lie_on_the_profile_and_add_up(n, share):
    budget = int(share * (n + 5))
    allocator = Prefix(calibration=PROFILE)
    caps = [c.tolist() for c in allocator.caps([torch.zeros(2, n)] * 4, budget, range(4), 4)]
    grid, ratios = [str(g) for g in PROFILE["grid"]], [[str(r) for r in row] for row in PROFILE["ratios"]]
    assert caps == [[c, c] for c in oracle.offline_caps(grid, ratios, budget, n)]
    assert sum(c[0] for c in caps) == 4 * min(budget, n) == allocator.allowance(budget, n, range(4), 4)
    alone = [allocator.caps([torch.zeros(2, n)], budget, [i], 4)[0].tolist() for i in range(4)]
    assert alone == caps  # a layer's cap does not wait for the others
    assert [allocator.allowance(budget, n, [i], 4) for i in range(4)] == [c[0] for c in caps]


@each(
    ("rho", "ratios"),
    [
        ("0.1", ["0.3", "0.06", "0.05", "0.02"]),
        ("0.15", ["0.41", "0.08", "0.09", "0.035"]),
        ("0.05", ["0.15", "0.03", "0.025", "0.01"]),  # towards nothing below the grid
        ("0.95", ["1", "0.975", "0.95", "0.875"]),  # towards everything above it
        ("1", ["1", "1", "1", "1"]),
    ],
)
def test_profiles_are_linear_between_budgets(rho, ratios):
    assert interpolate_ratios(PROFILE["grid"], PROFILE["ratios"], Fraction(rho)) == [Fraction(r) for r in ratios]


def test_a_profile_of_the_budget_itself_is_used_as_it_is():
    profile = {"grid": [0.3], "ratios": [[0.5, 0.3, 0.1]]}
    assert [c.tolist() for c in Prefix(calibration=profile).caps([torch.zeros(1, 100)] * 3, 30, range(3), 3)] == [
        [50],
        [30],
        [10],
    ]


def test_the_released_rounding_takes_a_profile_as_it_is():
    """Ratios that add up to 1.2 for a budget of three times 0.3: the release keeps them, the paper's text scales them."""
    profile, scores = {"grid": [0.3], "ratios": [[0.5, 0.4, 0.3]]}, [torch.zeros(1, 100)] * 3
    released = Prefix(calibration=profile, rounding="nearest")
    assert [c.tolist() for c in released.caps(scores, 30, range(3), 3)] == [[50], [40], [30]]
    assert sum(int(c) for c in Prefix(calibration=profile).caps(scores, 30, range(3), 3)) == 90
    assert [Compressor("", allocator=a).version for a in (released, Prefix(calibration=profile))] == [2, 1]
    assert Compressor("", allocator=Prefix("online", rounding="nearest")).version == 1


def test_the_released_rounding_reads_the_fraction_that_was_asked_for():
    """The release's rule: a file of evicted shares a budget, ``round(share * T)`` evicted, first and last token kept; T times
    the budget is mostly no whole number, so that C / T is less than what the file was made for."""
    g = torch.Generator().manual_seed(3)
    files = {
        f"m_{evicted}.json": torch.rand(32, generator=g).double().tolist() for evicted in ("0.9", "0.8", "0.55", "0.3")
    }
    data, _ = prefix_profile(files, SimpleNamespace(num_layers=32))
    released, moved = Prefix(calibration=data, rounding="nearest"), 0
    for (name, evicted), length, refed in product(files.items(), (7, 10, 271, 617, 1000, 2047), (0, 1)):
        budget = Budget.parse(str(1 - Decimal(name[2:-5])))
        c = budget.entries_for(length)
        scores = [torch.zeros(1, length - refed)] * 32
        context = Context(c, length, refed, asked=budget.asked)
        caps = [int(cap) for cap in released.caps(scores, c - refed, range(32), 32, context)]
        want = [max(length - round(share * length), min(2, c)) - refed for share in evicted]
        assert caps == want, (name, length, refed)
        one = released.caps(scores[:1], c - refed, [5], 32, context)
        assert int(one[0]) == want[5]
        moved += caps != [int(cap) for cap in released.caps(scores, c - refed, range(32), 32)]
    assert moved > 20  # C / T, which stands for a budget in entries, is another profile
    fraction, entries = Budget.parse(0.1), Budget.parse(64)
    compressors = [Compressor("", allocator=a) for a in (released, Prefix(calibration=data))]
    assert [(c.version_at(fraction), c.version_at(entries)) for c in compressors] == [(3, 2), (1, 1)]


def test_nearest_rounding_is_by_itself_and_may_exceed_the_budget():
    """Evicted: 0.5 of 9 = 4.5 -> 4 each (halves go to the even number, as in numpy), so 5 + 5 stay where 9 are granted."""
    profile = {"grid": [0.5], "ratios": [[0.5, 0.5]]}
    exact = Prefix(calibration={"grid": [0.5], "ratios": [[0.6, 0.4]]}, rounding="nearest")
    assert [c.tolist() for c in exact.caps([torch.zeros(1, 10)] * 2, 5, [0, 1], 2)] == [[6], [4]]
    odd = Prefix(calibration=profile, rounding="nearest")
    assert [c.tolist() for c in odd.caps([torch.zeros(1, 9)] * 2, 4, [0, 1], 2)] == [[4], [4]]
    over = Prefix(calibration={"grid": [0.5], "ratios": [[0.56, 0.56, 0.38]]}, rounding="nearest")
    caps = over.caps([torch.zeros(1, 10)] * 3, 5, range(3), 3)
    assert [c.tolist() for c in caps] == [[6], [6], [4]]  # evicted: 4.4, 4.4 and 6.2
    made = Compressor("near", LayerMeanScorer(), over, TopK(), Evict())
    with pytest.raises(OverBudgetError):
        made.select([torch.rand(1, 10) for _ in range(3)], 5, None, range(3), 3)
    released = replace(made, reading="released")
    assert sum((i >= 0).sum() for i in released.select([torch.rand(1, 10)] * 3, 5, None, range(3), 3)) == 16


@each(
    ("calibration", "message"),
    [
        (None, "mode=offline without a calibration"),
        ({"grid": [0.5]}, "no grid or no ratios"),
        ({"grid": [0.5, 0.2], "ratios": [[1.0], [1.0]]}, "rising fractions"),
        ({"grid": [], "ratios": []}, "rising fractions"),
        ({"grid": [0.5, 1.2], "ratios": [[1.0], [1.0]]}, "rising fractions"),
        ({"grid": [0.5], "ratios": [[1.0], [1.0]]}, "one row each"),
        ({"grid": [0.2, 0.5], "ratios": [[1.0], [1.0, 0.5]]}, "one row each"),
        ({"grid": [0.5], "ratios": [[1.5]]}, r"outside of \[0, 1\]"),
    ],
)
def test_a_missing_or_broken_profile_is_refused(calibration, message):
    with pytest.raises(CalibrationError, match=message):
        Prefix(calibration=calibration)


def test_a_profile_of_another_depth_is_refused():
    with pytest.raises(CalibrationError, match="ratios of 4 layers, but the model has 3"):
        Prefix(calibration=PROFILE).caps([torch.zeros(1, 9)], 4, [0], 3)


def test_negative_scores_cannot_be_searched():
    with pytest.raises(UnsupportedError, match="gives negative scores; allowed"):
        Prefix("online").caps([torch.tensor([[1.0, -1, 2]])], 2, [0], 1)


@each(
    "options",
    [
        {"mode": "offlin"},
        {"mode": "online", "delta": -0.1},
        {"mode": "online", "delta": float("nan")},
        {"mode": "online", "steps": -1},
        {"mode": "offline", "calibration": PROFILE, "rounding": "up"},
    ],
)
def test_senseless_allocations_are_refused(options):
    with pytest.raises(ConfigError):
        Prefix(**options)


def test_the_scope_follows_the_mode():
    assert Prefix("online").scope == "model" and Prefix(calibration=PROFILE).scope == "layer"


# ---------------------------------------------------------------- selection of a whole model


@examples
@given(
    length=st.integers(2, 60),
    heads=st.sampled_from([1, 2]),
    share=st.floats(0, 1),
    strict=st.booleans(),
    offline=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_kept_sets_equal_the_naive_method(length, heads, share, strict, offline, seed):
    budget = 1 + int(share * (length - 2))
    scorer = LayerMeanScorer()
    scores = [
        scorer.score(make_layer(length, heads, 2, seed=seed + i).observe(scorer.needs), budget, 0) for i in range(4)
    ]
    allocator = Prefix(calibration=PROFILE) if offline else Prefix("online")
    made = Compressor("prefixkv", scorer, allocator, TopK(sinks=1, recents=1), Evict())
    index = made.select(scores, budget, None, range(4), 4, strict)
    n, granted = length - int(strict), budget - int(strict)
    rows = [score[0].double().tolist() for score in scores]
    if offline:
        grid, ratios = [str(g) for g in PROFILE["grid"]], [[str(r) for r in row] for row in PROFILE["ratios"]]
        caps = oracle.offline_caps(grid, ratios, granted, n)
    else:
        caps = oracle.online_caps([oracle.cumulative(row[:n]) for row in rows], granted, Fraction("0.0125"), 0)
    for row, cap, kept in zip(rows, caps, index, strict=True):
        want = oracle.top(row, cap, n, budget)
        assert [[j for j in head if j >= 0] for head in kept.tolist()] == [want] * heads


# ---------------------------------------------------------------- parameters


def test_unknown_choices_are_refused():
    for make in (
        lambda: Merging("cosine"),
        lambda: PositionMerge(shift=-1),
        lambda: PositionMerge(closed=-1),
        lambda: LayerMeanScorer("rank"),
        lambda: LayerMeanScorer(sinks=-1),
    ):
        with pytest.raises(ConfigError):
            make()


@each(("budget", "cap"), [(0, 0), (1, 1), (2, 1), (5, 4), (9, 8), (12, 9)])
def test_an_unused_entry_is_not_the_last_one(budget, cap):
    assert Uniform(unused=1).caps([torch.zeros(2, 9)], budget, [0], 1)[0].tolist() == [cap, cap]
    with pytest.raises(ConfigError, match="unused is -1"):
        Uniform(unused=-1)


def test_every_head_of_a_layer_keeps_the_same_tokens():
    scorer = LayerMeanScorer()
    obs = make_layer(50, 4, 2, seed=2).observe(scorer.needs)
    made = Compressor("uniform", scorer, Uniform(), TopK(sinks=1, recents=1), Evict())
    (index,) = made.select([scorer.score(obs, 12, 0)], 12, None, [0], 1)
    assert (index == index[:1]).all() and index[0, 0] == 0 and index[0, -1] == 49
