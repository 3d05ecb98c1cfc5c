"""H2O, PyramidKV, AdaKV, LastAttn and the blind control against naive versions of their formulas, and composed."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.allocators.head_pool import HeadPool
from mmkv_bench.compression.allocators.positive import PositiveOnly
from mmkv_bench.compression.allocators.pyramid import Pyramid
from mmkv_bench.compression.allocators.waterfill import largest_remainder
from mmkv_bench.compression.compressor import Compressor, OverBudgetError
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.scorers.blind import BlindScorer
from mmkv_bench.compression.scorers.column_sums import ColumnSumScorer
from mmkv_bench.compression.scorers.last_query import LastQueryScorer
from mmkv_bench.compression.scorers.mmshift import MMShiftScorer
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.selectors.recent_share import RecentShare
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.methods.build import build_compressor
from tests.compression import oracles
from tests.each import each

LAYERS = 3
layers = st.builds(
    oracles.make_layer,
    length=st.integers(1, 150),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 7]),
    seed=st.integers(0, 10**6),
)
cuts = st.lists(st.integers(1, 149), max_size=4)
examples = settings(max_examples=20, deadline=None, derandomize=True)
many = settings(max_examples=150, deadline=None, derandomize=True)


def shipped(name: str, reading: str = "paper") -> Compressor:
    return build_compressor(name, method_defaults([name])[name], reading)


def budget_for(length: int, share: float) -> int:
    """1 .. T + 5"""
    return 1 + int(share * (length + 4))


def window_of(w: int, budget: int, length: int) -> int:
    """Section 0.6 of the method sheet; a budget of nothing has no window either."""
    return min(w, max(1, budget // 2), length, budget)


# ---------------------------------------------------------------- naive selection of a whole model


def kept_by(compressor: Compressor, scores: list[torch.Tensor], budget: int, strict: bool, types=None):
    index = compressor.select(scores, budget, types, range(len(scores)), len(scores), strict)
    return [[[j for j in row if j >= 0] for row in layer.tolist()] for layer in index]


def chosen(scores: list[torch.Tensor], caps: list[list[int]], last: int, strict: bool):
    """Per layer and head: the last `last` tokens of the prompt that are candidates, then the best others."""
    found = []
    for score, cap in zip(scores, caps, strict=True):
        total = score.shape[1]
        candidates = total - 1 if strict else total
        protected = [j >= total - last for j in range(candidates)]
        found.append(oracles.select(score[:, :candidates], cap, protected))
    return found


def round_shares(shares: list[Fraction]) -> list[int]:
    """One entry at a time to whoever lacks most of its share."""
    whole = [math.floor(share) for share in shares]
    while sum(whole) < sum(shares):
        lack = [share - count for share, count in zip(shares, whole, strict=True)]
        whole[lack.index(max(lack))] += 1
    return whole


def pyramid_caps(budget: int, n: int, n_layers: int, window: int, beta: int) -> list[int]:
    if budget >= n:
        return [n] * n_layers
    w = window_of(window, budget, n) if window else 0
    base, room = budget - w, n - w
    low = Fraction(base, beta)
    high = base + (base - low)  # as far above the average as low is below it
    if high > room:
        high, low = Fraction(room), base - (room - Fraction(base))
    if n_layers == 1:
        return [budget]
    shares = [(high * (n_layers - 1 - i) + low * i) / (n_layers - 1) for i in range(n_layers)]
    return [count + w for count in round_shares(shares)]


def credits(prefix: list[list[float]], base: int, normalize: bool) -> list[int]:
    entries = []
    for head, row in enumerate(prefix):
        share = 1.0
        if normalize and sum(row) > 0:
            share = sum(sorted(row, reverse=True)[:base]) / sum(row)
        entries += [(-value * share, head, j) for j, value in enumerate(row)]
    winners = sorted(entries)[: len(prefix) * base]
    return [sum(head == h for _, head, _ in winners) for h in range(len(prefix))]


def pool_caps(score: torch.Tensor, budget: int, window: int, alpha: Fraction, normalize=False) -> list[int]:
    heads, n = score.shape
    if budget >= n:
        return [n] * heads
    w = window_of(window, budget, n) if window else 0
    won = credits(score.double()[:, : n - w].tolist(), budget - w, normalize)
    return [count + w for count in round_shares([(1 - alpha) * c + alpha * (budget - w) for c in won])]


def close(got, want):
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert ((got.double() - want).abs() <= 2e-5 * want.abs() + 1e-12).all()


def observed(scorer, layer, seeds=range(LAYERS)):
    """Scores of a small model: the same shapes with other numbers in every layer."""
    heads, group = layer.key.shape[0], layer.wq.shape[0] // layer.dim // layer.key.shape[0]
    made = [oracles.make_layer(layer.length, heads, group, seed=seed) for seed in seeds]
    return [one.observe(scorer.needs, layer=i) for i, one in enumerate(made)]


# ---------------------------------------------------------------- H2O


@examples
@given(layer=layers, cuts=cuts)
def test_h2o_scores_are_causal_column_sums(layer, cuts):
    scorer = ColumnSumScorer()
    got = scorer.score(layer.observe(scorer.needs, cuts), 8, 0)
    close(got, oracles.column_sums(layer.query.float(), layer.key, layer.scaling))


@examples
@given(layer=layers, share=st.floats(0, 1), strict=st.booleans())
def test_h2o_keeps_half_recents_and_half_heavy_hitters(layer, share, strict):
    method, total = shipped("h2o"), layer.length
    budget = min(budget_for(total, share), total - 1)
    if budget < 1:
        return
    scores = [method.scorer.score(o, budget, 0) for o in observed(method.scorer, layer)]
    got = kept_by(method, scores, budget, strict)
    recents = set(range(total - budget // 2, total))
    for score, rows in zip(scores, got, strict=True):
        for values, row in zip(score.tolist(), rows, strict=True):
            others = [j for j in range(total - int(strict)) if j not in recents]
            heavy = sorted(others, key=lambda j: (-values[j], j))
            # under strict the last token is kept by being fed again: of C its entry is the first recent
            want = recents - {total - 1} if strict else recents
            room = budget - int(strict) - len(want)
            assert row == sorted(want | set(heavy[:room]))


@each(
    ("share", "length", "budget", "recents"),
    [(0.5, 10, 5, 2), (0.5, 10, 4, 2), (0.5, 10, 1, 0), (0.29, 200, 100, 29), (1.0, 10, 4, 4), (0.0, 10, 4, 0)],
)
def test_the_share_of_recents_is_exact(share, length, budget, recents):
    got = RecentShare(share=share).protected(length, budget, None).nonzero().flatten().tolist()
    assert got == list(range(length - recents, length))


def test_old_tokens_collect_more_terms_and_nothing_is_normalised():
    """Equal keys: row i gives 1 / (i + 1) to each key it sees, so column j holds the tail of the harmonic series."""
    layer = oracles.make_layer(5, 1, 2)
    layer.key = layer.key[:, :1].expand(-1, 5, -1)
    got = ColumnSumScorer().score(layer.observe(ColumnSumScorer().needs), 4, 0)
    want = [2 * sum(1 / (i + 1) for i in range(j, 5)) for j in range(5)]
    assert got[0].tolist() == pytest.approx(want, rel=1e-6)


# ---------------------------------------------------------------- LastAttn


@examples
@given(layer=layers, cuts=cuts)
def test_last_query_scores_are_the_last_rows_attention(layer, cuts):
    scorer = LastQueryScorer()
    got = scorer.score(layer.observe(scorer.needs, cuts), 8, 0)
    close(got, oracles.window_mass(layer.query.float(), layer.key, layer.scaling, 1))


def test_last_query_is_mmshift_without_votes():
    layer, mmshift = oracles.make_layer(40, 2, 3), MMShiftScorer(24, 4, lam=1.0)
    votes = mmshift.score(layer.observe(mmshift.needs), 8, 0)
    votes -= replace(mmshift, lam=0.0).score(layer.observe(mmshift.needs), 8, 0)
    last = LastQueryScorer().score(layer.observe(LastQueryScorer().needs), 8, 0)
    assert torch.allclose(votes.float(), last, atol=2e-6)


# ---------------------------------------------------------------- blind


def blind(length: int, types: list[int], budget: int, strict: bool = False):
    method = shipped("blind")
    obs = oracles.make_layer(length, 2, 2).observe(method.scorer.needs)
    obs.token_types = torch.tensor(types)
    scores = [method.scorer.score(obs, budget, 0)] * 2
    return kept_by(method, scores, budget, strict, obs.token_types)


@each(
    ("budget", "strict", "kept"),
    [
        (1, False, [7]),
        (2, False, [6, 7]),
        (3, False, [1, 6, 7]),
        (4, False, [0, 1, 6, 7]),
        (6, False, [0, 1, 6, 7]),  # no visual entry fills what text leaves
        (3, True, [1, 6]),
        (6, True, [0, 1, 6]),
        (1, True, []),
    ],
)
def test_blind_keeps_the_latest_text_and_nothing_else(budget, strict, kept):
    assert blind(8, [0, 0, 1, 1, 2, 1, 0, 0], budget, strict) == [[kept] * 2] * 2


def test_blind_drops_a_visual_last_token_too():
    assert blind(4, [0, 1, 1, 1], 2) == [[[0]] * 2] * 2
    assert blind(4, [1, 1, 1, 1], 2) == [[[]] * 2] * 2


@each("types", [None, torch.zeros(6, dtype=torch.int64)])
def test_blind_refuses_prompts_without_visual_tokens(types):
    assert BlindScorer.needs_visual
    obs = oracles.make_layer(6, 2, 1).observe(BlindScorer().needs)
    obs.token_types = types
    with pytest.raises(UnsupportedError, match="allowed: prompts with images or videos"):
        BlindScorer().score(obs, 4, 0)


def test_positive_only_counts_each_heads_positive_scores():
    scores = [torch.tensor([[1.0, 2, 0], [-1, -2, 3]]), torch.tensor([[1.0, 1, 1], [0, 0, 0]])]
    assert [c.tolist() for c in PositiveOnly().caps(scores, 2, [0, 1], 2)] == [[2, 1], [2, 0]]


# ---------------------------------------------------------------- PyramidKV


@many
@given(
    n=st.integers(0, 150),
    share=st.floats(0, 1),
    n_layers=st.sampled_from([1, 2, 3, 28, 32]),
    window=st.sampled_from([0, 1, 8, 32]),
    beta=st.sampled_from([1, 2, 7, 20]),
)
def test_pyramid_caps_equal_the_formula_and_add_up(n, share, n_layers, window, beta):
    budget = int(share * (n + 5))
    allocator, scores = Pyramid(window, beta), [torch.zeros(2, n)] * n_layers
    got = allocator.caps(scores, budget, range(n_layers), n_layers)
    assert all(c.dtype == torch.int64 and c.device.type == "cpu" and c.shape == (2,) for c in got)
    caps = [c.tolist() for c in got]
    assert caps == [[c, c] for c in pyramid_caps(budget, n, n_layers, window, beta)]
    flat = [c[0] for c in caps]
    assert sum(flat) == min(budget, n) * n_layers == allocator.allowance(budget, n, range(n_layers), n_layers)
    assert flat == sorted(flat, reverse=True) and flat[-1] >= 0 and flat[0] <= n
    alone = [allocator.caps([scores[i]], budget, [i], n_layers)[0].tolist() for i in range(n_layers)]
    assert alone == caps  # a layer's cap does not wait for the others
    assert [allocator.allowance(budget, n, [i], n_layers) for i in range(n_layers)] == flat


@each(
    ("n", "budget", "caps"),
    [
        (100, 8, [11, 9, 7, 5]),  # w 4, base 4, low 1, high 7
        (10, 8, [10, 9, 7, 6]),  # high is cut to 6: 6, 4.67, 3.33, 2
        (9, 8, [9, 8, 8, 7]),  # 5, 4.33, 3.67, 3
        (100, 7, [10, 8, 6, 4]),  # w 3, base 4
        (100, 1, [1, 1, 1, 1]),
        (100, 0, [0, 0, 0, 0]),
        (6, 6, [6, 6, 6, 6]),
    ],
)
def test_pyramid_caps_by_hand(n, budget, caps):
    assert Pyramid(window=4, beta=4).layer_caps(budget, n, 4) == caps


@each(("n_layers", "means"), [(28, (68.0, 139.0, 266.5, 522.5)), (32, (64.0, 142.5, 267.5, 518.5))])
def test_floored_steps_store_what_the_releases_store(n_layers, means):
    """Average caps of the released arithmetic at T = 4000 (window 32, beta 20)."""
    for budget, mean in zip((64, 128, 256, 512), means, strict=True):
        caps = Pyramid(step="floored").layer_caps(budget, 4000, n_layers)
        assert sum(caps) / n_layers == mean
        assert sum(Pyramid().layer_caps(budget, 4000, n_layers)) == budget * n_layers


def test_frozen_caps_are_those_of_the_first_prompt():
    first, later = Pyramid(step="floored").layer_caps(64, 80, 4), Pyramid(step="floored").layer_caps(64, 500, 4)
    assert first != later
    frozen = Pyramid(step="floored", frozen=80)
    assert frozen.layer_caps(64, 500, 4) == first == frozen.layer_caps(64, 80, 4)
    assert max(Pyramid(step="floored", frozen=500).layer_caps(64, 80, 4)) == 80  # a cap never exceeds the prompt


def test_caps_above_the_budget_are_refused_outside_of_the_released_reading():
    method = shipped("pyramidkv", "released")
    scores = [torch.rand(2, 400) for _ in range(28)]
    paper = replace(method, reading="paper")
    with pytest.raises(OverBudgetError, match="divides 1904 entries per KV head among 28 layers"):
        paper.select(scores, 64, None, range(28), 28)
    with pytest.raises(OverBudgetError, match="divides 1904"):
        paper.select(scores[27:], 64, None, [27], 28)  # also from a layer that is below the average itself
    assert sum((i >= 0).sum() for i in method.select(scores, 64, None, range(28), 28)) == 2 * 1904


class TopHeavy(Allocator):
    """Grants the first layer more than its own share, and the others what is right."""

    def caps(self, scores, budget, layers, n_layers, context=None):
        return [torch.tensor([budget + (layer == 0)]) for layer in layers]


def test_a_layer_above_its_declared_share_is_an_error():
    made = Compressor("topheavy", LastQueryScorer(), TopHeavy(), TopK(), Evict())
    made.select([torch.rand(1, 9)], 4, None, [1], 3)
    with pytest.raises(OverBudgetError, match="topheavy kept 5 entries, but the budget allows 4"):
        made.select([torch.rand(1, 9)], 4, None, [0], 3)


@examples
@given(layer=layers, share=st.floats(0, 1), strict=st.booleans())
def test_pyramidkv_keeps_what_the_naive_method_keeps(layer, share, strict):
    method, total = shipped("pyramidkv"), layer.length
    budget = min(budget_for(total, share), total - 1)
    if budget < 1:
        return
    seen = observed(method.scorer, layer)
    scores = [method.scorer.score(o, budget, 0) for o in seen]
    n, granted = (total - 1, budget - 1) if strict else (total, budget)
    caps = [[cap] * layer.key.shape[0] for cap in pyramid_caps(granted, n, LAYERS, 32, 20)]
    want = chosen(scores, caps, window_of(32, budget, total), strict)
    assert kept_by(method, scores, budget, strict) == want
    assert sum(len(row) for rows in want for row in rows) == granted * LAYERS * layer.key.shape[0]


# ---------------------------------------------------------------- AdaKV


@st.composite
def head_scores(draw):
    heads, n = draw(st.integers(1, 4)), draw(st.integers(0, 40))
    if draw(st.booleans()):  # few values: ties everywhere
        values = draw(st.lists(st.integers(0, 3), min_size=heads * n, max_size=heads * n))
        return torch.tensor(values, dtype=torch.float32).view(heads, n)
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    return torch.rand(heads, n, generator=g) ** 4 * torch.rand(heads, 1, generator=g)


@many
@given(
    score=head_scores(),
    share=st.floats(0, 1),
    window=st.sampled_from([0, 1, 8, 32]),
    alpha=st.sampled_from(["0", "0.2", "0.29", "0.5", "1"]),
)
def test_adakv_caps_equal_the_formula_and_add_up(score, share, window, alpha):
    heads, n = score.shape
    budget = int(share * (n + 5))
    (got,) = HeadPool(window, float(alpha)).caps([score], budget, [2], 5)
    assert got.dtype == torch.int64 and got.device.type == "cpu"
    assert got.tolist() == pool_caps(score, budget, window, Fraction(alpha))
    assert int(got.sum()) == min(budget, n) * heads and int(got.max()) <= n
    if budget < n:
        w = window_of(window, budget, n) if window else 0
        assert int(got.min()) >= w + math.floor(Fraction(alpha) * (budget - w))
    if heads == 1 or alpha == "1":
        assert got.tolist() == [min(budget, n)] * heads


@many
@given(score=head_scores(), share=st.floats(0, 1))
def test_normalised_credit_equals_the_formula(score, share):
    score = (score * 64).round()  # whole numbers: the oracle's products tie exactly where the allocator's do, or not
    budget = int(share * (score.shape[1] + 5))
    (got,) = HeadPool(1, 0.0, normalize=True).caps([score], budget, [0], 1)
    want = pool_caps(score, budget, 1, Fraction(0), normalize=True)
    assert int(got.sum()) == sum(want)
    if budget < score.shape[1]:
        w = window_of(1, budget, score.shape[1])
        prefix, base = score.double()[:, : score.shape[1] - w], budget - w
        totals = prefix.sum(-1, keepdim=True)
        weighted = prefix * prefix.sort(descending=True).values[:, :base].sum(-1, keepdim=True) / totals.clamp_min(1)
        worst = weighted.flatten().sort(descending=True).values[: len(score) * base]
        edge = float(worst[-1]) if len(worst) else math.inf
        for h, row in enumerate(weighted):  # rounding may move only values at the very edge
            sure, possible = int((row > edge * (1 + 1e-5)).sum()), int((row >= edge * (1 - 1e-5)).sum())
            assert sure <= int(got[h]) - w <= possible


def test_adakv_caps_by_hand():
    score = torch.tensor([[9.0, 8, 7, 6, 0], [4, 3, 2, 1, 99]])  # the last column is the window
    # base 2: all four best are head 0's; shares .4 + .8 * 4 = 3.6 and .4; the larger remainder gets the entry
    assert HeadPool(1).caps([score], 3, [0], 1)[0].tolist() == [1 + 4, 1 + 0]
    # the release: floor int(.4) = 0, round(3.2) = 3 and round(0) = 0: one entry short of 6
    assert HeadPool(1, rounding="nearest").caps([score], 3, [0], 1)[0].tolist() == [1 + 3, 1 + 0]
    assert HeadPool(1, alpha=1.0).caps([score], 3, [0], 1)[0].tolist() == [3, 3]
    assert HeadPool(1, alpha=0.0).caps([score], 3, [0], 1)[0].tolist() == [5, 1]


def test_normalising_favours_concentrated_heads():
    score = torch.tensor([[3.0, 3, 3, 3, 0, 0], [6, 2, 0, 0, 0, 0]])
    assert HeadPool(2, alpha=0.0).caps([score], 4, [0], 1)[0].tolist() == [2 + 3, 2 + 1]
    assert HeadPool(2, alpha=0.0, normalize=True).caps([score], 4, [0], 1)[0].tolist() == [2 + 2, 2 + 2]
    nothing = torch.zeros(2, 6)
    assert HeadPool(2, normalize=True).caps([nothing], 4, [0], 1)[0].sum() == 8  # no 0 / 0
    with pytest.raises(UnsupportedError, match="allowed: normalize=false"):
        HeadPool(2, normalize=True).caps([-score], 4, [0], 1)


def test_equal_scores_go_to_the_lower_head():
    assert HeadPool(0, alpha=0.0).caps([torch.ones(3, 4)], 2, [0], 1)[0].tolist() == [4, 2, 0]


@examples
@given(layer=layers, share=st.floats(0, 1), strict=st.booleans())
def test_adakv_keeps_what_the_naive_method_keeps(layer, share, strict):
    method, total = shipped("adakv"), layer.length
    budget = min(budget_for(total, share), total - 1)
    if budget < 1:
        return
    scores = [method.scorer.score(o, budget, 0) for o in observed(method.scorer, layer)]
    granted = budget - 1 if strict else budget
    caps = [pool_caps(s[:, : total - int(strict)], granted, 32, Fraction(1, 5)) for s in scores]
    assert kept_by(method, scores, budget, strict) == chosen(scores, caps, window_of(32, budget, total), strict)


def test_a_single_kv_head_makes_adakv_snapkv():
    adakv, snapkv = shipped("adakv"), shipped("snapkv")
    assert adakv.scorer == snapkv.scorer and adakv.selector == snapkv.selector
    obs = oracles.make_layer(120, 1, 4).observe(snapkv.scorer.needs)
    scores = [snapkv.scorer.score(obs, 40, 0)]
    assert kept_by(adakv, scores, 40, False) == kept_by(snapkv, scores, 40, False)


@each(
    ("build", "message"),
    [
        (lambda: Pyramid(window=-1), "window is -1"),
        (lambda: Pyramid(beta=0), "beta is 0; allowed: 1 or more"),
        (lambda: Pyramid(step="floor"), "did you mean 'floored'"),
        (lambda: Pyramid(frozen=80), "frozen is 80 with step=real"),
        (lambda: Pyramid(step="floored", frozen=-1), "frozen is -1"),
        (lambda: HeadPool(window=-1), "window is -1"),
        (lambda: HeadPool(alpha=1.5), "alpha is 1.5"),
        (lambda: HeadPool(rounding="near"), "did you mean 'nearest'"),
        (lambda: RecentShare(share=-0.1), "share is -0.1"),
        (lambda: RecentShare(sinks=-1), "sinks is -1"),
    ],
)
def test_impossible_parameters_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_rounding_keeps_the_sum_or_refuses():
    third = Fraction(1, 3)
    assert largest_remainder([third, third, third]) == [1, 0, 0]  # ties: the lower index
    assert largest_remainder([Fraction(1, 4), Fraction(5, 2), Fraction(9, 4)]) == [0, 3, 2]
    assert largest_remainder([]) == []
    with pytest.raises(ValueError, match="not a whole number"):
        largest_remainder([third])


# ---------------------------------------------------------------- shipped files


def test_shipped_defaults_are_the_documented_ones():
    assert shipped("h2o").selector == RecentShare(share=0.5)
    assert shipped("last_query").selector == TopK(recents=1)
    assert shipped("blind").selector == TopK(recents=0)
    for name, allocator in (("pyramidkv", Pyramid(32, 20)), ("adakv", HeadPool(32, 0.2))):
        method = shipped(name)
        assert (method.scorer, method.selector, method.allocator) == (WindowScorer(32, 5), TopK(window=32), allocator)


def test_released_readings_change_what_the_releases_change():
    assert shipped("pyramidkv", "released").allocator == Pyramid(step="floored")
    assert shipped("adakv", "released").allocator == HeadPool(normalize=True, rounding="nearest")
    for name in ("last_query", "blind"):
        assert replace(shipped(name, "released"), reading="paper") == shipped(name)


def test_one_window_parameter_reaches_scorer_allocator_and_selector():
    for name in ("pyramidkv", "adakv"):
        config = compose([f"method={name}", f"methods.{name}.window=16"])
        method = build_compressor(name, config.methods[name], "paper")
        assert (method.scorer.window, method.allocator.window, method.selector.window) == (16, 16, 16)


# ---------------------------------------------------------------- combinations by configuration alone

COMBINED = """# @package methods.{name}
base: {name}
samples: 24
groups: 4
scorer: {{_target_: mmkv_bench.compression.scorers.mmshift.MMShiftScorer, samples: "${{..samples}}", groups: "${{..groups}}"}}
allocator: {{_target_: mmkv_bench.compression.allocators.{allocator}}}
selector: {{_target_: mmkv_bench.compression.selectors.topk.TopK, recents: 1}}
reducer: {{_target_: mmkv_bench.compression.reducers.evict.Evict}}
"""


@pytest.mark.full
@each("allocator", ["pyramid.Pyramid, window: 32", "head_pool.HeadPool, window: 1"])
@each("strict", [False, True])
@each("budget", [1, 2, 20, 63])
def test_mmshift_scores_with_the_allocation_of_another_method(tmp_path, allocator, strict, budget):
    """MM-ShiftKV's table 3 as a file of the user's: nothing but names and parameters."""
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mixed.yaml").write_text(COMBINED.format(name="mixed", allocator=allocator))
    config = compose([f"hydra.searchpath=[file://{tmp_path}]", "method=[mixed]"])
    method = build_compressor("mixed", config.methods["mixed"], "paper")
    assert method.scorer == MMShiftScorer(24, 4)
    layer = oracles.make_layer(90, 2, 3)
    scores = [method.scorer.score(o, budget, 7) for o in observed(method.scorer, layer)]
    n, granted = 90 - int(strict), budget - int(strict)
    if "pyramid" in allocator:
        caps = [[cap] * 2 for cap in pyramid_caps(granted, n, LAYERS, 32, 20)]
    else:
        caps = [pool_caps(score[:, :n], granted, 1, Fraction(1, 5)) for score in scores]
    assert kept_by(method, scores, budget, strict) == chosen(scores, caps, 1, strict)
