"""Every scorer equals the formula of its paper, for any shape, budget and chunking, and nothing else matters."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.compressor import SCORE_DTYPES
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.scorers.expected_attention import ExpectedAttentionScorer
from mmkv_bench.compression.scorers.keydiff import KeyDiffScorer
from mmkv_bench.compression.scorers.mmshift import MMShiftScorer
from mmkv_bench.compression.scorers.random import RandomScorer
from mmkv_bench.compression.scorers.recency import RecencyScorer
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.config.files import content
from mmkv_bench.errors import ConfigError
from tests.compression import oracles
from tests.each import each

SMALL = {"samples": 24, "groups": 4, "gamma": 3.0}
RELEASED = {
    "statistics": "scalar",
    "offsets": "tiled",
    "anchor_in_groups": True,
    "cover": "right",
    "drop_last_key": True,
    "rounding": "model",
}
ALL = [
    RandomScorer(),
    RecencyScorer(),
    WindowScorer(),
    WindowScorer(window=1, pool=1),
    WindowScorer(window=8, pool=7, pooling="max", heads="last"),
    KeyDiffScorer(),
    KeyDiffScorer(window=32),
    WindowScorer(window=8, score_rounding="model"),
    KeyDiffScorer(score_rounding="model"),
    ExpectedAttentionScorer(future=16),
    ExpectedAttentionScorer(future=16, rounding="model"),
    MMShiftScorer(**SMALL),
    MMShiftScorer(**SMALL, gqa="vote"),
    MMShiftScorer(**SMALL, **RELEASED),
    MMShiftScorer(**SMALL, voting="none", last_tokens=9),
]
names = [f"{type(s).__name__}{i}" for i, s in enumerate(ALL)]
layers = st.builds(
    oracles.make_layer,
    length=st.integers(1, 200),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 7]),
    seed=st.integers(0, 10**6),
)
cuts = st.lists(st.integers(1, 199), max_size=4)
examples = settings(max_examples=25, deadline=None, derandomize=True)


def budget_for(layer, share):
    """1 .. T + 5"""
    return 1 + int(share * (layer.length + 4))


def assert_close(got, want, limit=2e-5):
    assert got.dtype == torch.float32 and torch.isfinite(got).all() and got.shape == want.shape
    assert ((got.double() - want).abs() <= limit * want.abs() + 1e-12).all()


# ---------------------------------------------------------------- against the formulas


@examples
@given(
    layer=layers, cuts=cuts, share=st.floats(0, 1), window=st.sampled_from([1, 8, 32]), pool=st.sampled_from([1, 5, 7])
)
def test_snapkv_equals_its_formula(layer, cuts, share, window, pool):
    scorer, budget = WindowScorer(window, pool), budget_for(layer, share)
    got = scorer.score(layer.observe(scorer.needs, cuts), budget, 0)
    assert_close(got, oracles.snapkv(layer, window, pool, budget))


HALVES = (torch.bfloat16, torch.float16)


def nearly_all_equal(got, want, dtype):
    """Equal numbers of a half precision, but for a last digit where a sum lies between two of them."""
    assert got.dtype == want.dtype == dtype
    close = (got.float() - want.float()).abs() <= 4 * torch.finfo(dtype).eps * want.float().abs() + 1e-6
    assert close.all() and (got == want).float().mean() > 0.97


@each(
    ("parameters", "length"),
    [
        ((1, 5, "average", "first"), 90),
        ((8, 5, "average", "last"), 61),
        ((8, 7, "max", "first"), 77),
        ((4, 1, "average", "first"), 9),
    ],
)
def test_rounded_windows_equal_the_releases_steps_in_half_precision(parameters, length):
    layer, scorer = oracles.make_layer(length, 2, 7, dim=16, seed=4), WindowScorer(*parameters, score_rounding="model")
    for dtype in HALVES:
        got = scorer.score(layer.observe(scorer.needs, (40,), dtype=dtype), 64, 0)
        nearly_all_equal(got, oracles.half_snapkv(layer, parameters, dtype), dtype)
    plain = WindowScorer(*parameters).score(layer.observe(scorer.needs), 64, 0)
    assert torch.equal(scorer.score(layer.observe(scorer.needs), 64, 0), plain)  # float32 has nothing to round to


def test_rounded_similarities_equal_the_releases_steps_in_half_precision():
    for (dtype, window), length in product(product(HALVES, (0, 32)), (20, 90)):
        layer, scorer = oracles.make_layer(length, 2, 2, dim=16, seed=2), KeyDiffScorer(window, score_rounding="model")
        got = scorer.score(layer.observe(scorer.needs, dtype=dtype), 64, 0)
        if window < length:
            nearly_all_equal(got, oracles.half_keydiff(layer, window, dtype), dtype)
        plain = KeyDiffScorer(window).score(layer.observe(scorer.needs), 64, 0)
        assert torch.equal(scorer.score(layer.observe(scorer.needs), 64, 0), plain)


@examples
@given(layer=layers, cuts=cuts, window=st.sampled_from([0, 1, 32]))
def test_keydiff_equals_its_formula(layer, cuts, window):
    scorer = KeyDiffScorer(window)
    got = scorer.score(layer.observe(scorer.needs, cuts), 8, 0)
    assert (got.double() - oracles.keydiff(layer, window)).abs().max() < 2e-6


@examples
@given(
    layer=layers,
    cuts=cuts,
    future=st.sampled_from([1, 16]),
    sinks=st.sampled_from([0, 4]),
    epsilon=st.sampled_from([0.0, 0.02]),
    covariance=st.booleans(),
    value_norm=st.booleans(),
)
def test_expected_attention_equals_its_formula(layer, cuts, future, sinks, epsilon, covariance, value_norm):
    scorer = ExpectedAttentionScorer(future, sinks, epsilon, covariance, value_norm)
    got = scorer.score(layer.observe(scorer.needs, cuts), 8, 0)
    if layer.length < 6:
        assert scorer.fallbacks(8, layer.length) == ("statistics_undefined",)
        assert got.tolist() == [list(range(layer.length))] * layer.key.shape[0]
        return
    assert scorer.fallbacks(8, layer.length) == ()
    assert_close(got, oracles.expected_attention(layer, future, sinks, epsilon, covariance, value_norm))


def proxies(scorer, layer, obs, seed):
    """Hidden states as the documentation says, from the documented stream."""
    noise = torch.randn(scorer.samples, layer.hidden.shape[1], generator=obs.generator("mmshift", seed)).double()
    hidden = layer.hidden
    if scorer.statistics == "scalar":
        mean, std = hidden.mean(), hidden.std(correction=0)
    else:
        mean, std = hidden.mean(0), hidden.std(0, correction=0)
    return (0 if scorer.centring == "none" else mean) + scorer.gamma * std * noise


@examples
@given(
    layer=layers,
    cuts=cuts,
    gamma=st.sampled_from([1.0, 3.0]),
    tau=st.sampled_from([0.5, 0.8, 0.95]),
    lam=st.sampled_from([0.0, 1.0, 50.0]),
    statistics=st.sampled_from(["elementwise", "scalar"]),
    centring=st.sampled_from(["sample", "none"]),
    gqa=st.sampled_from(["probability", "vote"]),
    offsets=st.sampled_from(["consecutive", "tiled"]),
    anchored=st.booleans(),
    cover=st.sampled_from(["left", "right"]),
    drop=st.booleans(),
    seed=st.integers(0, 3),
)
def test_mmshift_equals_its_formula(
    layer, cuts, gamma, tau, lam, statistics, centring, gqa, offsets, anchored, cover, drop, seed
):
    n, groups, size = 12, 3, 4
    scorer = MMShiftScorer(n, groups, gamma, tau, lam, statistics, centring, gqa, offsets, anchored, cover, drop)
    obs = layer.observe(scorer.needs, cuts)
    got = scorer.score(obs, 8, seed)
    heads, total = layer.key.shape[:2]
    assert got.dtype == (torch.float64 if lam else torch.float32) and got.shape == (heads, total)
    assert torch.isfinite(got).all()

    states = proxies(scorer, layer, obs, seed)
    places = [1 + i if offsets == "consecutive" else groups * (1 + i % size) for i in range(n)]
    mass = oracles.proxy_group_masses(layer, states, places, groups).view(heads, -1, groups, total)
    mass = mass if gqa == "vote" else mass.mean(1, keepdim=True)
    anchor = oracles.window_mass(layer.query.float(), layer.key, layer.scaling, 1)
    if anchored:
        mass = (mass + anchor[:, None, None]) / (1 + size)
    keep = total - 1 if drop else total
    votes = got.double() - lam * anchor
    assert ((votes - votes.round()).abs() < 1e-3).all()  # what is not anchor is whole votes
    sure = torch.zeros(heads, total)
    possible = torch.zeros(heads, total)
    for h in range(heads if keep else 0):
        for m in mass[h, ..., :keep].reshape(-1, keep):
            inside, maybe = oracles.sure_and_possible(m, tau, cover)
            sure[h, :keep] += inside
            possible[h, :keep] += maybe
    assert (votes.round() >= sure).all() and (votes.round() <= possible).all()
    # The oracle leaves little open: float32 noise may move only keys at the very edge of a set.
    assert float((possible - sure).sum()) <= max(2.0, 0.02 * float(possible.sum()))


def test_mmshift_released_rounds_like_a_half_precision_pipeline():
    layer = oracles.make_layer(50, 2, 3, seed=4)
    scorer = MMShiftScorer(**SMALL, tau=0.8, **RELEASED)
    obs = layer.observe(scorer.needs, dtype=torch.bfloat16)
    got = scorer.score(obs, 8, 0)
    key, last = obs.key.float(), obs.tail(1).float()
    query = obs.future_queries(
        scorer.gamma * obs.hidden_scalar_moments[1] * torch.randn(24, 12, generator=obs.generator("mmshift", 0))
        + obs.hidden_scalar_moments[0],
        (4 * torch.arange(1, 7)).repeat(4),
    )

    def probability(q):  # [Hq,n,D] -> [Hkv,n,T] in bfloat16
        s = torch.einsum("hgnd,htd->hgnt", q.view(2, 3, -1, 8), key) * layer.scaling
        return s.softmax(-1).to(torch.bfloat16)[..., :-1].mean(1)

    anchor = probability(last)
    mass = (probability(query).view(2, 4, 6, 49).sum(2) + anchor) / (1.0 + 6)
    want = anchor[:, 0].float()
    for h in range(2):
        for g in range(4):
            for j in oracles.covering_set(mass[h, g].tolist(), 0.8, "right"):
                want[h, j] += 1
    assert torch.equal(got[:, :-1], want)


def test_a_proxy_group_drawn_to_one_key_gives_it_the_vote():
    layer = oracles.make_layer(20, 1, 1, seed=2)
    layer.bq = layer.key[0, 7] * 0  # proxies below replace the projection: all of them point along key 7
    direction = layer.key[0, 7] * 60
    layer.project = lambda hidden: oracles.turn(direction.to(hidden.dtype), torch.tensor([0])).expand(
        1, hidden.shape[0], -1
    )
    scorer = MMShiftScorer(4, 2, gamma=0.0, lam=0.0, offsets="consecutive")
    obs = layer.observe(scorer.needs)
    obs._future_rope = lambda offsets: (torch.ones(len(offsets), 8), torch.zeros(len(offsets), 8))
    votes = scorer.score(obs, 8, 0)
    assert votes[0, 7] == 2 and votes.sum() == 2
    assert replace(scorer, cover="right").score(obs, 8, 0).sum() == 0  # the release casts none


def test_streamingllm_keeps_sinks_and_the_latest():
    layer = oracles.make_layer(20, 2, 1)
    scores = RecencyScorer().score(layer.observe(Needs()), 8, 0)
    selector = TopK(sinks=4)
    for budget, want in ((8, [0, 1, 2, 3, 16, 17, 18, 19]), (3, [0, 1, 19]), (1, [19])):
        caps = torch.full((2,), budget)
        assert selector.select(scores, caps, selector.protected(20, budget, None)).tolist() == [want] * 2


def test_random_draws_differ_by_head_layer_sample_and_seed():
    layer = oracles.make_layer(40, 2, 1)

    def draw(seed=0, **where):
        return RandomScorer().score(layer.observe(Needs(), **where), 8, seed)

    base = draw()
    assert ((base >= 0) & (base < 1)).all() and not torch.equal(base[0], base[1])
    for other in (draw(1), draw(layer=1), draw(identity="other")):
        assert not torch.equal(base, other)


# ---------------------------------------------------------------- contracts of all scorers


@each("scorer", ALL)
@each("length", [1, 2, 5, 6, 33])
@each("budget", [1, 2, 40])
def test_any_prompt_and_budget_has_finite_scores(scorer, length, budget):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = oracles.make_layer(length, 2, 3)
        got = scorer.score(layer.observe(scorer.needs, dtype=dtype), budget, 0)
        allowed = (*SCORE_DTYPES, str(dtype)) if scorer.halves else SCORE_DTYPES
        assert got.shape == (2, length) and str(got.dtype) in allowed and torch.isfinite(got).all()


@each("scorer", ALL)
def test_scores_do_not_depend_on_what_ran_before(scorer):
    layer, needs = oracles.make_layer(50, 2, 3), Needs(32, True, True, True, True, states=True)
    alone = scorer.score(layer.observe(scorer.needs), 24, 1)
    crowd = layer.observe(needs)
    for other in ALL:
        other.score(crowd, 10, 2)
        torch.rand(3)
    assert torch.equal(scorer.score(crowd, 24, 1), alone)
    assert torch.equal(scorer.score(crowd, 24, 1), alone)


@each("scorer", ALL)
def test_identical_query_heads_score_like_one(scorer):
    layer = oracles.make_layer(40, 2, 1, seed=6)
    wide = replace(
        layer,
        wq=layer.wq.view(2, 1, 8, -1).expand(2, 3, 8, -1).reshape(48, -1),
        bq=layer.bq.view(2, 1, 8).expand(2, 3, 8).reshape(48),
    )
    one, three = (scorer.score(x.observe(scorer.needs), 16, 0) for x in (layer, wide))
    if getattr(scorer, "gqa", "") == "vote":  # every query head votes
        anchor = layer.observe(scorer.needs).last_attention()
        one = 3 * (one - anchor) + anchor
    assert torch.allclose(one, three, rtol=1e-5, atol=1e-6)


@each("scorer", ALL)
def test_stochastic_scorers_alone_read_the_seed(scorer):
    layer = oracles.make_layer(60, 2, 2)
    obs = layer.observe(scorer.needs)
    differs = not torch.equal(scorer.score(obs, 16, 0), scorer.score(obs, 16, 1))
    assert differs == scorer.stochastic


@each("scorer", ALL)
def test_equal_keys_mean_equal_scores(scorer):
    layer = oracles.make_layer(60, 2, 2)
    obs = layer.observe(scorer.needs)
    scores = {}
    for budget in (1, 2, 3, 16, 17, 64, 65, 200):
        scores.setdefault(scorer.key(budget, 60), []).append(scorer.score(obs, budget, 0))
    assert all(torch.equal(a, group[0]) for group in scores.values() for a in group)
    if not isinstance(scorer, WindowScorer):
        assert len(scores) == 1  # one score for all budgets


@each(
    ("scorer", "changes"),
    [
        (WindowScorer(), {"window": 8, "pool": 7, "pooling": "max", "heads": "last", "score_rounding": "model"}),
        (KeyDiffScorer(), {"window": 4, "score_rounding": "model"}),
        (
            ExpectedAttentionScorer(),
            {
                "future": 8,
                "sinks": 0,
                "epsilon": 0.1,
                "covariance": False,
                "value_norm": False,
                "rounding": "model",
            },
        ),
        (
            MMShiftScorer(expansion="layer", calibration={"gamma": [1.0], "mean": [[0.0]]}),
            {
                "samples": 64,
                "groups": 16,
                "gamma": 1.0,
                "tau": 0.5,
                "lam": 0.0,
                "centring": "none",
                "gqa": "vote",
                **RELEASED,
                "voting": "none",
                "modality": "separate",
                "expansion": "global",
                "layer_gamma": (2.0, 3.0),
                "last_tokens": 512,
                "plain_layers": 2,
                "calibration": {"gamma": [1.0], "mean": [[0.5]]},
            },
        ),
    ],
)
def test_every_parameter_is_in_the_key(scorer, changes):
    assert set(changes) == set(scorer.__dataclass_fields__)
    for name, value in changes.items():
        assert replace(scorer, **{name: value}).key(512, 1000) != scorer.key(512, 1000), name


def test_a_reduced_window_is_reported():
    scorer = WindowScorer(32)
    assert scorer.fallbacks(64, 1000) == () and scorer.window_effective(64, 1000) == 32
    assert scorer.fallbacks(62, 1000) == ("window_reduced",) and scorer.window_effective(62, 1000) == 31
    assert scorer.fallbacks(64, 20) == ("window_reduced",) and scorer.window_effective(64, 20) == 20
    assert KeyDiffScorer().window_effective(64, 20) is None


@each(
    ("build", "message"),
    [
        (lambda: MMShiftScorer(samples=500), "samples=500 cannot be split into groups=32"),
        (lambda: MMShiftScorer(groups=0), "groups=0"),
        (lambda: MMShiftScorer(gamma=-1.0), "gamma is -1.0"),
        (lambda: MMShiftScorer(tau=0.0), "tau is 0.0"),
        (lambda: MMShiftScorer(tau=1.0), "tau is 1.0; allowed: a fraction of the attention mass, 0 < tau < 1"),
        (lambda: MMShiftScorer(lam=-1.0), "lambda is -1.0"),
        (lambda: MMShiftScorer(statistics="elementwize"), "did you mean 'elementwise'"),
        (lambda: MMShiftScorer(gqa="mean"), "allowed: probability, vote"),
        (lambda: WindowScorer(window=0), "window is 0"),
        (lambda: WindowScorer(pool=4), "odd kernel sizes"),
        (lambda: WindowScorer(pooling="maximum"), "pooling is 'maximum'"),
        (lambda: WindowScorer(heads="apart"), "allowed: first, last"),
        (lambda: ExpectedAttentionScorer(rounding="bf16"), "rounding is 'bf16'"),
        (lambda: KeyDiffScorer(window=-1), "window is -1"),
        (lambda: ExpectedAttentionScorer(future=0), "future is 0"),
        (lambda: ExpectedAttentionScorer(sinks=-1), "sinks is -1"),
        (lambda: ExpectedAttentionScorer(epsilon=-0.1), "epsilon is -0.1"),
    ],
)
def test_impossible_parameters_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


# ---------------------------------------------------------------- shipped method files


def parts(name, reading="paper"):
    """scorer, allocator, selector, reducer of a shipped file: each `${..x}` is the value of x, the released one if asked."""
    import importlib

    node = content("method", name)
    assert set(node["released"]) <= set(node), "a released value must override a flat parameter"
    values = {**node, **(node["released"] if reading == "released" else {})}

    def built(spec):
        if spec is None:
            return None
        module, _, cls = spec["_target_"].rpartition(".")
        given = {key: value for key, value in spec.items() if key != "_target_"}
        arguments = {k: values[v[4:-1]] if str(v).startswith("${..") else v for k, v in given.items()}
        return getattr(importlib.import_module(module), cls)(**arguments)

    return [built(node[part]) for part in ("scorer", "allocator", "selector", "reducer")]


METHODS = ["random", "streamingllm", "snapkv", "keydiff", "expected_attention", "mmshift"]


@pytest.mark.parametrize("name", ["full", *METHODS])
def test_shipped_defaults_are_the_documented_ones(name):
    scorer, _, selector, _ = parts(name)
    want = {
        "full": (None, TopK()),
        "random": (RandomScorer(), TopK()),
        "streamingllm": (RecencyScorer(), TopK(sinks=4)),
        "snapkv": (WindowScorer(32, 5), TopK(window=32)),
        "keydiff": (KeyDiffScorer(), TopK(recents=1)),
        "expected_attention": (ExpectedAttentionScorer(512), TopK(sinks=4, recents=0)),
        "mmshift": (MMShiftScorer(512, 32, 10.0, 0.95, 1.0), TopK(recents=1)),
    }[name]
    assert (scorer, selector) == want


@pytest.mark.parametrize("name", METHODS)
@each("budget", [1, 7, 64, 90])
def test_paper_readings_store_exactly_the_budget(name, budget):
    scorer, allocator, selector, reducer = parts(name)
    layer = oracles.make_layer(90, 2, 2)
    obs = layer.observe(scorer.needs)
    scores = scorer.score(obs, budget, 0)
    (caps,) = allocator.caps([scores], budget, [0], 4)
    index = selector.select(scores, caps, selector.protected(90, budget, None))
    key, _ = reducer.reduce(obs.key, obs.value, index)
    assert allocator.excess == 0 and key.shape[:2] == (2, budget)
    if name != "expected_attention":
        assert (index[:, -1] == 89).all()  # the last token stays


def test_released_readings_change_what_the_release_changes():
    assert parts("snapkv", "released")[0].window == 1 and parts("snapkv", "released")[2] == TopK(window=1)
    assert parts("mmshift", "released")[0] == MMShiftScorer(**RELEASED)
    assert parts("expected_attention", "released")[2] == TopK(sinks=4, recents=1)
    for name in ("random", "streamingllm"):
        assert parts(name, "released") == parts(name)


@each(("length", "stored"), [(90, 52), (40, 40)])
def test_released_keydiff_really_stores_its_excess_and_declares_it(length, stored):
    scorer, allocator, selector, reducer = parts("keydiff", "released")
    obs = oracles.make_layer(length, 2, 2).observe(scorer.needs)
    scores = scorer.score(obs, 20, 0)
    (caps,) = allocator.caps([scores], 20, [0], 4)
    index = selector.select(scores, caps, selector.protected(length, 20, None))
    key, value = reducer.reduce(obs.key, obs.value, index)
    assert key.shape[1] == value.shape[1] == stored == min(20 + allocator.excess, length)
    assert index[0, -32:].tolist() == list(range(length - 32, length))
    assert Uniform(excess=32) == allocator
