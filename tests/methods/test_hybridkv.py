"""HybridKV's parts against its equations in float64: sparsity, classes, budgets and the selection of static heads."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.allocators.hybrid import HeadClasses, Hybrid
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.retrieval import ChunkRetrieval
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.selectors.text_first import TextFirst
from mmkv_bench.devices import Device
from mmkv_bench.errors import ConfigError
from tests.compression import oracles
from tests.each import each
from tests.oracles import hybridkv as oracle

few = settings(max_examples=12, deadline=None, derandomize=True)
many = settings(max_examples=120, deadline=None, derandomize=True)
layers = st.builds(
    oracles.make_layer,
    length=st.one_of(st.integers(1, 40), st.integers(41, 160)),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 10**6),
)


def types_of(length: int, seed: int) -> torch.Tensor:
    """Runs of text and visual tokens; some prompts hold one kind only."""
    g = torch.Generator().manual_seed(seed)
    kinds = [(0, 0, 1), (0, 1, 2), (0,), (1,)][seed % 4]
    pieces = [[kinds[i % len(kinds)]] * int(torch.randint(1, 30, (1,), generator=g)) for i in range(length)]
    return torch.tensor(sum(pieces, [])[:length])


# ---------------------------------------------------------------- sparsity


@few
@given(layer=layers, cuts=st.lists(st.integers(1, 159), max_size=3), seed=st.integers(0, 99))
def test_sparsity_is_the_mean_of_the_top_masses_of_text_rows(layer, cuts, seed):
    allocator = Hybrid()
    obs = layer.observe(allocator.needs, cuts)
    obs.token_types = types_of(layer.length, seed)
    got = allocator.summary(obs, 8, 0)
    want = oracle.sparsity(layer.query.float(), layer.key, obs.token_types.tolist(), layer.scaling)
    assert got.dtype == torch.float64 and got.device.type == "cpu"
    assert got.tolist() == pytest.approx(want, rel=2e-6)


def test_the_share_of_top_keys_is_rounded_up_exactly():
    """0.05 of 60 tokens is 3 keys: equal keys give min(3 / (i + 1), 1) in row i; 61 tokens have 4."""
    for length, k in ((60, 3), (61, 4)):
        layer = oracles.make_layer(length, 1, 2)
        layer.key = layer.key[:, :1].expand(-1, length, -1)
        got = Hybrid().summary(layer.observe(Hybrid().needs), 8, 0)
        assert got.tolist() == pytest.approx([sum(min(1, k / (i + 1)) for i in range(length)) / length])


def test_rows_that_see_no_more_than_the_top_keys_are_fully_sparse():
    """A context whose text stands before the image alone tells nothing about its heads: all of them are static."""
    layer, allocator = oracles.make_layer(100, 4, 2), Hybrid()
    obs = layer.observe(allocator.needs)
    obs.token_types = (torch.arange(100) >= 5).long()
    assert allocator.summary(obs, 8, 0).tolist() == [1.0] * 4
    for threshold in ("absolute", "quantile"):
        assert not HeadClasses(1.0, threshold).dynamic({0: allocator.summary(obs, 8, 0)}).any()


def test_sparsity_does_not_depend_on_blocks_of_rows(monkeypatch):
    layer, allocator = oracles.make_layer(90, 2, 3), Hybrid()
    whole = allocator.summary(layer.observe(allocator.needs), 8, 0)
    monkeypatch.setattr(Device, "tile", 2000)
    assert torch.allclose(allocator.summary(layer.observe(allocator.needs), 8, 0), whole, rtol=1e-6)


def test_sparsity_needs_no_square_memory(monkeypatch):
    monkeypatch.setattr(Device, "tile", 2**16)
    layer, allocator = oracles.make_layer(600, 1, 4), Hybrid()
    obs = layer.observe(allocator.needs)
    assert oracles.allocator_peak(lambda: allocator.summary(obs, 8, 0)) < 4 * 4 * 2**16 < 600 * 600 * 4 * 4 / 4


def test_equal_query_heads_have_the_sparsity_of_one():
    layer = oracles.make_layer(50, 2, 1)
    wide = replace(
        layer,
        wq=layer.wq.view(2, 8, -1).repeat_interleave(3, 0).flatten(0, 1),
        bq=layer.bq.view(2, 8).repeat(1, 3).view(-1),
    )
    one, three = (Hybrid().summary(x.observe(Hybrid().needs), 8, 0) for x in (layer, wide))
    assert torch.allclose(one, three, rtol=1e-6)


# ---------------------------------------------------------------- classes and budgets


@st.composite
def sparsities(draw):
    n_layers, heads = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 8]))
    if draw(st.booleans()):
        value = st.sampled_from([0.5, 0.75, 0.9, 1.0])
    else:
        value = st.floats(0.05, 1)
    rows = st.lists(st.lists(value, min_size=heads, max_size=heads), min_size=n_layers, max_size=n_layers)
    return draw(rows)


def summaries(rows):
    return {i: torch.tensor(row, dtype=torch.float64) for i, row in enumerate(rows)}


@many
@given(
    rows=sparsities(),
    theta=st.sampled_from([0.0, 0.5, 0.75, 0.9, 1.0]),
    threshold=st.sampled_from(["absolute", "quantile"]),
    classes=st.sampled_from(["hybrid", "static", "dynamic"]),
)
def test_classes_equal_the_definition(rows, theta, threshold, classes):
    got = HeadClasses(theta, threshold, classes).dynamic(summaries(rows))
    assert got.tolist() == oracle.dynamic(rows, theta, threshold, classes)


@many
@given(
    rows=sparsities(),
    n=st.integers(1, 300),
    share=st.floats(0, 1),
    theta=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    r=st.sampled_from(["0.1", "0.25", "0.75", "1.0", "1.25", "3"]),
    alpha=st.sampled_from(["0", "0.5", "0.29", "1"]),
    power=st.sampled_from(["nearest", "nearest", "down", "none", "up"]),
    chunk=st.sampled_from([1, 6, 8]),
)
def test_budgets_equal_the_equations_and_stay_within_the_total(rows, n, share, theta, r, alpha, power, chunk):
    budget = int(share * (n - 1))  # 0 .. n - 1
    allocator = Hybrid(HeadClasses(theta), float(r), float(alpha), chunk=chunk, power=power)
    found = allocator.divide(summaries(rows), budget, n)
    moving = oracle.dynamic(rows, theta)
    want = oracle.budgets(rows, moving, budget, n, Fraction(r), Fraction(alpha), chunk, power)
    assert found.dynamic.tolist() == moving and found.entries.tolist() == want
    assert found.entries.dtype == torch.int64 and int(found.entries.min()) >= 0 and int(found.entries.max()) <= n
    total, heads = budget * found.entries.numel(), found.entries.numel()
    n_dynamic = int(found.dynamic.sum())
    assert found.clipped == (0 < n_dynamic < heads and -(-Fraction(r) * budget * n_dynamic // 1) > total)
    if power == "up" and int(found.entries.sum()) > total:
        assert not found.entries[~found.dynamic].any(), "static heads give all they have first"
        return
    assert int(found.entries.sum()) <= total
    unused = "budget_unused" in allocator.outcome(Context(budget, n, summaries=summaries(rows)))
    assert unused == (int(found.entries.sum()) < min(budget, n) * heads)
    static = found.entries[~found.dynamic]
    if len(static) and bool((static < n).any()):
        assert int(found.entries.sum()) == total  # a static head can take what rounding leaves
    for entries in found.entries[found.dynamic].tolist():
        assert entries == n or entries < chunk or entries % chunk == 0
        assert power == "none" or chunk != 8 or entries in (0, n) or entries & (entries - 1) == 0
    scores = [torch.zeros(len(rows[0]), n)] * len(rows)
    caps = allocator.caps(scores, budget, range(len(rows)), len(rows), Context(budget, n, summaries=summaries(rows)))
    assert [c.tolist() for c in caps] == want


def test_budgets_by_hand():
    """Two layers of two heads, C = 100 of 1000: B = 400; one dynamic head: ceil(75) -> 64; 336 for three static."""
    rows = [[0.95, 0.5], [1.0, 0.9]]
    found = Hybrid().divide(summaries(rows), 100, 1000)
    assert found.dynamic.tolist() == [[False, True], [False, False]]  # 0.9 is static: S* >= theta
    # base 56 each; 168 * (0.95, 1.0, 0.9) / 2.85 = 56, 58.947, 53.053
    assert found.entries.tolist() == [[112, 64], [115, 109]]
    # without head-level allocation, and without both levels
    assert Hybrid(alpha=1.0).divide(summaries(rows), 100, 1000).entries.tolist() == [[112, 64], [112, 112]]
    assert Hybrid(alpha=1.0, r=1.0).divide(summaries(rows), 100, 1000).entries.tolist() == [[91, 128], [91, 90]]
    down = Hybrid(alpha=1.0, r=1.0, power="down").divide(summaries(rows), 100, 1000)
    assert down.entries.tolist() == [[112, 64], [112, 112]]
    plain = Hybrid(alpha=1.0, r=1.0, power="none").divide(summaries(rows), 100, 1000)
    assert plain.entries.tolist() == [[102, 96], [101, 101]]  # whole chunks of 8
    up = Hybrid(power="up").divide(summaries(rows), 100, 1000)
    assert int(up.entries[0, 1]) == 128 and int(up.entries.sum()) == 400  # the static heads give what padding takes


def test_powers_of_two_are_the_nearest_ties_down_and_never_above_the_budget_unless_padded():
    """One static head of four; C = 100 of 1000, r = 1: dynamic heads ask for 100 each of 400."""
    rows = [[0.5, 0.5, 0.5, 1.0]]

    def entries(budget: int, power: str, heads=rows, r: float = 1.0) -> list[int]:
        return Hybrid(r=r, power=power, chunk=1).divide(summaries(heads), budget, 1000).entries[0].tolist()

    assert entries(100, "nearest") == entries(100, "up") == [128, 128, 128, 16]
    assert entries(96, "nearest") == [64, 64, 64, 192]  # as near to 64 as to 128
    assert entries(70, "nearest") == [64, 64, 64, 88] and entries(70, "up") == [128, 128, 128, 0]  # 384 of 280
    every = [[0.5, 0.5]]
    assert entries(120, "nearest", every) == [64, 64]  # 128 would be above the budget, and nobody can give
    assert entries(120, "up", every) == [128, 128] and entries(128, "nearest", every) == [128, 128]
    assert [Hybrid(power=power).exceeds for power in ("nearest", "down", "none", "up")] == [False, False, False, True]


def test_models_of_one_kind_of_head_get_the_whole_budget():
    rows = [[0.5, 0.6], [0.7, 0.8]]
    assert Hybrid().divide(summaries(rows), 100, 1000).entries.tolist() == [[64, 64]] * 2
    static = Hybrid(HeadClasses(classes="static")).divide(summaries(rows), 100, 1000)
    assert int(static.entries.sum()) == 400 and not static.dynamic.any()


def test_a_share_coefficient_above_the_budget_is_cut_and_said_to_be():
    rows = [[0.5] * 9 + [1.0]]
    assert not Hybrid(r=1.0).divide(summaries(rows), 80, 1000).clipped
    found = Hybrid(r=1.25).divide(summaries(rows), 80, 1000)
    assert found.clipped and found.entries.tolist() == [[64] * 9 + [800 - 9 * 64]]


def test_calibrated_thresholds_replace_theta():
    rows = summaries([[0.5, 0.7]])
    assert HeadClasses(calibration={"theta": 0.6}).dynamic(rows).tolist() == [[True, False]]
    with pytest.raises(ConfigError, match="no theta"):
        HeadClasses(calibration={"heads": []})
    with pytest.raises(ConfigError, match="threshold=absolute"):
        HeadClasses(threshold="quantile", calibration={"theta": 0.6})
    with pytest.raises(ConfigError, match="theta=0.8 has no effect with a calibration"):
        HeadClasses(0.8, calibration={"theta": 0.6})


# ---------------------------------------------------------------- static heads


@few
@given(layer=layers, share=st.floats(0, 1), strict=st.booleans(), seed=st.integers(0, 99), data=st.data())
def test_static_heads_keep_window_text_and_the_best_visual_tokens(layer, share, strict, seed, data):
    total = layer.length
    types, budget = types_of(total, seed), 1 + int(share * total)
    n, w = total - int(strict), min(32, max(1, budget // 2), total)
    heads = layer.key.shape[0]
    caps = torch.tensor([data.draw(st.integers(0, n)) for _ in range(heads)])
    scorer, selector = WindowScorer(window=32, pool=1), TextFirst(window=32)
    scores = scorer.score(layer.observe(scorer.needs), budget, 0)
    protected = selector.protected(total, budget, types)[:n]
    got = selector.select(scores[:, :n], caps, protected)
    sums = oracle.window_sums(layer.query.float(), layer.key, layer.scaling, w)
    for head, row in enumerate(got.tolist()):
        assert [j for j in row if j >= 0] == oracle.kept(sums[head], int(caps[head]), w, types.tolist(), n)


def test_text_that_does_not_fit_loses_its_oldest_tokens():
    types = torch.tensor([0, 0, 0, 1, 1, 0, 1, 1])
    selector, scores = TextFirst(window=2), torch.tensor([[9.0, 9, 9, 1, 5, 9, 2, 3]])
    for cap, kept in ((1, [7]), (2, [6, 7]), (4, [2, 5, 6, 7]), (6, [0, 1, 2, 5, 6, 7]), (7, [0, 1, 2, 4, 5, 6, 7])):
        index = selector.select(scores, torch.tensor([cap]), selector.protected(8, 4, types))
        assert index.tolist() == [kept]
    alone = selector.select(scores, torch.tensor([3]), selector.protected(8, 4, None))
    assert alone.tolist() == [[5, 6, 7]]  # without types all is text


def test_prompts_of_one_kind_of_token_are_recorded():
    text, visual, both = torch.zeros(4), torch.ones(4), torch.tensor([0, 2, 0, 0])
    assert TextFirst().fallbacks(4, 9, None) == TextFirst().fallbacks(4, 9, text) == ("no_visual_tokens",)
    assert TextFirst().fallbacks(4, 9, both) == TextFirst().fallbacks(4, 9, visual) == ()
    assert Hybrid().fallbacks(4, 9, visual) == ("no_text_tokens",)
    assert Hybrid().fallbacks(4, 9, None) == Hybrid().fallbacks(4, 9, text) == Hybrid().fallbacks(4, 9, both) == ()


@each(
    ("build", "message"),
    [
        (lambda: HeadClasses(theta=1.5), "theta is 1.5"),
        (lambda: HeadClasses(threshold="relative"), "threshold is 'relative'"),
        (lambda: HeadClasses(classes="dynamics"), "did you mean 'dynamic'"),
        (lambda: Hybrid(r=0), "r is 0"),
        (lambda: Hybrid(alpha=1.1), "alpha is 1.1"),
        (lambda: Hybrid(top=0), "top is 0"),
        (lambda: Hybrid(chunk=0), "chunk is 0"),
        (lambda: Hybrid(power="half"), "power is 'half'"),
        (lambda: ChunkRetrieval(chunk=0), "chunk is 0"),
        (lambda: ChunkRetrieval(partial="hidden"), "partial is 'hidden'"),
    ],
)
def test_impossible_parameters_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
