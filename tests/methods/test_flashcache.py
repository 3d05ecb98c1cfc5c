"""FlashCache: its transform, scores, budgets and kept entries against the cosine sums of the paper, through models too."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import fft

from mmkv_bench.compression.allocators.spectral import Spectral
from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.numerics.dct import dct, high_pass
from mmkv_bench.compression.scorers.deviation import DeviationScorer, cutoff, filter_needs
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.devices import Device
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods.build import build_compressor, identity_form
from mmkv_bench.methods.node import under_reading
from tests import cover, reference, zoo
from tests.compression import oracles
from tests.core import parts
from tests.each import each
from tests.generation import common
from tests.oracles import flashcache as oracle

LAYERS = 3
few = settings(max_examples=15, deadline=None, derandomize=True)
some = settings(max_examples=40, deadline=None, derandomize=True)
many = settings(max_examples=cover.examples(150), deadline=None, derandomize=True)
GAMMAS = ("0", "0.1", "0.2", "0.29", "0.5", "0.51", "0.9", "0.99")

layers = st.builds(
    oracles.make_layer,
    length=st.one_of(st.integers(1, 8), st.integers(1, 150)),
    kv_heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 10**6),
)


def shipped(**parameters) -> Compressor:
    node = copy.deepcopy(method_defaults(["flashcache"])["flashcache"])
    for name, value in parameters.items():
        node[name] = value
    return build_compressor("flashcache", node, "paper")


def heads_of(x: torch.Tensor) -> list[torch.Tensor]:
    return [head.float() for head in x]


def signal(length: int, channels: int, seed: int, offset: float = 3.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, channels, generator=g) + offset * torch.randn(2, 1, channels, generator=g)


# ---------------------------------------------------------------- transform


@some
@given(length=st.one_of(st.integers(1, 9), st.integers(1, 300)), seed=st.integers(0, 10**6))
def test_the_transform_is_the_papers_cosine_sum_and_its_inverse_undoes_it(length, seed):
    x = signal(length, 3, seed)[0]
    want = oracle.transform(x).T
    for dtype, near in ((torch.float32, 2e-6), (torch.float64, 1e-13)):
        got = dct(x.T.to(dtype))
        assert got.dtype == dtype and got.shape == (3, length)
        assert (got - want).norm() <= near * want.norm()
        back = torch.from_numpy(fft.idct(got.numpy(), norm="ortho"))
        assert (back - x.T).norm() <= near * x.norm()
    assert float(dct(x.T.double()).square().sum()) == pytest.approx(float(x.double().square().sum()), rel=1e-12)


def test_the_transform_by_hand():
    root = 3**-0.5
    assert dct(torch.tensor([1.0, 0, 0])).tolist() == pytest.approx([root, 0.5**0.5, 0.5 * (2 / 3) ** 0.5])
    assert dct(torch.tensor([2.0])).tolist() == pytest.approx([2])
    assert dct(torch.ones(4)).tolist() == pytest.approx([2, 0, 0, 0], abs=1e-6)


def test_half_precision_is_transformed_in_float32():
    x = signal(70, 4, 1).bfloat16()
    assert torch.equal(dct(x), dct(x.float())) and dct(x).dtype == torch.float32
    assert torch.equal(high_pass(x, 7).deviation, high_pass(x.float(), 7).deviation)


@some
@given(length=st.integers(1, 120), share=st.floats(0, 1.1), seed=st.integers(0, 10**6))
def test_what_the_filter_leaves_out_is_the_distance_from_the_base(length, share, seed):
    x, omega = signal(length, 3, seed), 1 + int(share * length)
    got = high_pass(x, omega)
    assert got.deviation.shape == (2, length) and got.deviation.dtype == torch.float32
    assert got.outlier.dtype == got.total.dtype == torch.float64 and got.outlier.shape == got.total.shape == (2,)
    for head, one in enumerate(x):
        want = (one.double() - oracle.base(one, omega)).square().mean(-1)
        assert ((got.deviation[head] - want).abs() <= 2e-5 * want + 1e-9).all()
        share_above = float(got.outlier[head] / got.total[head])
        assert share_above == pytest.approx(oracle.outlier_share([one], omega), rel=1e-5, abs=1e-6)


def test_a_large_constant_part_does_not_drown_what_varies():
    """Key biases of some models are a hundred times what the tokens add; float32 must still rank the tokens."""
    x = signal(200, 4, 3, offset=0.0)
    got, shifted = high_pass(x, 20).deviation, high_pass(x.double() + 1000, 20).deviation
    assert torch.allclose(got.double(), shifted, rtol=1e-5)
    rounded = (x + 1000).float()
    assert torch.allclose(
        high_pass(rounded, 20).deviation.double(), high_pass(rounded.double(), 20).deviation, rtol=1e-5
    )


@each("length", [1, 2, 3, 64, 97])
def test_constant_keys_and_values_deviate_by_nothing_at_all(length):
    got = high_pass(torch.randn(2, 1, 5).expand(2, length, 5), 1)
    assert not got.deviation.any() and not got.outlier.any() and (got.total > 0).all()
    assert not high_pass(torch.zeros(2, length, 5), 1).total.any()


def test_the_base_without_a_bin_is_refused():
    with pytest.raises(ValueError, match="omega is 0"):
        high_pass(torch.zeros(1, 4, 2), 0)


@each(("heads", "length", "dim"), [(8, 2048, 64), (3, 6000, 64), (32, 512, 32), (1, 400_000, 4)])
def test_extra_memory_is_one_tile_or_a_few_channels(heads, length, dim):
    """Neither T x T nor T x D numbers: a tile, or one channel at a time, beside a few rows per head."""
    x = torch.randn(heads, length, dim)
    peak = oracles.allocator_peak(lambda: high_pass(x, length // 5))
    assert peak <= 4 * max(Device.tile, 4 * length) + (heads * 8 + 64) * length


# ---------------------------------------------------------------- scores


@few
@given(layer=layers, gamma=st.sampled_from(GAMMAS), joint=st.booleans(), cuts=st.lists(st.integers(1, 149), max_size=3))
def test_scores_are_the_papers_deviations(layer, gamma, joint, cuts):
    scorer = DeviationScorer(float(gamma), "joint" if joint else "per_head")
    obs = layer.observe(scorer.needs, cuts)
    got = scorer.score(obs, 8, 0)
    omega = oracle.cutoff(gamma, layer.length)
    want = oracle.fast_deviation(heads_of(layer.key), heads_of(layer.value), omega, joint)
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert ((got - want).abs() <= 2e-5 * want + 1e-9).all()
    if joint:
        assert (got == got[:1]).all()


def test_the_oracles_two_forms_agree():
    layer = oracles.make_layer(9, 2, 2)
    for joint in (True, False):
        slow, fast = (
            form(heads_of(layer.key), heads_of(layer.value), 2, joint)
            for form in (oracle.deviation, oracle.fast_deviation)
        )
        assert torch.allclose(slow, fast, rtol=1e-12)


@few
@given(layer=layers, gamma=st.sampled_from(GAMMAS))
def test_unrotated_keys_are_the_keys_before_their_rotation(layer, gamma):
    scorer = DeviationScorer(float(gamma), "per_head", "unrotated")
    assert scorer.needs.states and not DeviationScorer().needs.states
    got = scorer.score(layer.observe(scorer.needs), 8, 0)
    before = oracles.turn(layer.key, -torch.arange(layer.length))
    want = oracle.fast_deviation(list(before), heads_of(layer.value), oracle.cutoff(gamma, layer.length), joint=False)
    assert ((got - want).abs() <= 1e-4 * want + 1e-8).all()


def test_deviations_by_hand():
    """Three tokens, omega 1: the base is the mean; keys (1, 0, 0) deviate by (4, 1, 1) / 9, values (0, 3, 0) by (1, 4, 1)."""
    layer = oracles.make_layer(3, 2, 1, dim=2)
    layer.key = torch.tensor([[[1.0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0], [0, 0]]]).double()
    layer.value = torch.tensor([[[0, 0], [0, 0], [0, 0]], [[0, 0], [0, 3.0], [0, 0]]]).double()
    per_head = DeviationScorer(0.2, "per_head").score(layer.observe(DeviationScorer().needs), 2, 0)
    assert per_head[0].tolist() == pytest.approx([4 / 18, 1 / 18, 1 / 18])
    assert per_head[1].tolist() == pytest.approx([1 / 2, 4 / 2, 1 / 2])
    joint = DeviationScorer().score(layer.observe(DeviationScorer().needs), 2, 0)
    assert joint[0].tolist() == joint[1].tolist() == pytest.approx([13 / 36, 37 / 36, 10 / 36])
    summary = Spectral().summary(layer.observe(Spectral().needs), 2, 0)
    # bin 2 alone is above omega: (2/3) * (1/4) of keys' energy 1, and (2/3) * 1 of the values'
    assert summary.tolist() == pytest.approx([1 / 6, 2 / 3])


def test_constant_keys_and_values_score_zero_and_add_no_ratio():
    layer = oracles.make_layer(40, 2, 1)
    layer.key, layer.value = layer.key[:, :1].expand(-1, 40, -1), layer.value[:, :1].expand(-1, 40, -1)
    obs = layer.observe(DeviationScorer().needs)
    assert not DeviationScorer().score(obs, 8, 0).any()
    assert Spectral().summary(obs, 8, 0).tolist() == [0, 0]
    layer.value = torch.zeros_like(layer.value)
    assert Spectral().summary(layer.observe(Spectral().needs), 8, 0).tolist() == [0, 0], "no 0 / 0"


@each(
    ("gamma", "length", "omega"),
    [(0.29, 100, 29), (0.2, 4, 1), (0.2, 10, 2), (0.0, 50, 1), (0.57, 100, 57), (0.2, 1, 1)],
)
def test_the_cut_off_is_exact_and_one_at_least(gamma, length, omega):
    assert cutoff(gamma, length) == omega == oracle.cutoff(str(gamma), length)


# ---------------------------------------------------------------- budgets of layers


@many
@given(
    ratios=st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 2)), min_size=1, max_size=32),
    n=st.integers(0, 200),
    share=st.floats(0, 1),
)
def test_layers_get_their_share_of_the_outlier_energy_exactly(ratios, n, share):
    budget = int(share * (n + 5))
    scores = [torch.zeros(2, n)] * len(ratios)
    summaries = {i: torch.tensor([r / 2, r / 2], dtype=torch.float64) for i, r in enumerate(ratios)}
    context = Context(max(1, budget), n, summaries=summaries)
    got = Spectral().caps(scores, budget, range(len(ratios)), len(ratios), context)
    assert all(c.dtype == torch.int64 and c.device.type == "cpu" and c.shape == (2,) for c in got)
    caps = [c.tolist() for c in got]
    held = [float(summaries[i].sum()) for i in range(len(ratios))]
    assert caps == [[c, c] for c in oracle.layer_budgets(held, min(budget, n), n)]
    assert sum(c[0] for c in caps) == min(budget, n) * len(ratios) and max(map(max, caps)) <= n


@each(
    ("ratios", "budget", "n", "caps"),
    [
        ([0.3, 0.1], 4, 100, [6, 2]),
        ([0.3, 0.1], 4, 5, [5, 3]),  # what exceeds the prompt goes to the others
        ([1.0, 0.0, 0.0], 4, 5, [5, 4, 3]),
        ([0.0, 0.0, 0.0], 4, 9, [4, 4, 4]),  # no outlier anywhere: equal shares
        ([2.0, 1.0, 1.0], 1, 9, [1, 1, 1]),  # 1.5, .75, .75
        ([1.0, 0.1], 1, 9, [2, 0]),
        ([0.5, 0.5], 0, 9, [0, 0]),
    ],
)
def test_layer_budgets_by_hand(ratios, budget, n, caps):
    context = Context(max(1, budget), n, summaries={i: torch.tensor([r, 0.0]) for i, r in enumerate(ratios)})
    got = Spectral().caps([torch.zeros(1, n)] * len(ratios), budget, range(len(ratios)), len(ratios), context)
    assert [int(c) for c in got] == caps


def test_budgets_without_the_summaries_are_refused():
    with pytest.raises(ValueError, match="give a summary of each"):
        Spectral().caps([torch.zeros(1, 9)], 2, [0], 1)


def test_without_allocation_every_layer_gets_the_budget_at_once():
    off = Spectral(dba=False)
    assert (off.scope, Spectral().scope) == ("layer", "model")
    assert off.summary_key(4, 9) is None and Spectral().summary_key(4, 9) is not None
    scores = [torch.rand(2, 9)] * 3
    assert [c.tolist() for c in off.caps(scores, 4, range(3), 3)] == [[4, 4]] * 3
    assert off.caps(scores[:1], 4, [1], 3)[0].tolist() == Uniform().caps(scores[:1], 4, [1], 3)[0].tolist()


# ---------------------------------------------------------------- the method


def wanted(keys, values, budget: int, strict: bool, gamma="0.2", joint=True, dba=True) -> list[list[list[int]]]:
    """The oracle's whole method: per layer and head, from K and V alone."""
    length = len(keys[0][0])
    omega, n, granted = oracle.cutoff(gamma, length), length - int(strict), budget - int(strict)
    ratios = [
        oracle.outlier_share(k, omega) + oracle.outlier_share(v, omega) for k, v in zip(keys, values, strict=True)
    ]
    caps = oracle.layer_budgets(ratios, granted, n) if dba else [granted] * len(keys)
    forced = set() if strict else {length - 1}
    return [
        oracle.keep(oracle.fast_deviation(k, v, omega, joint)[:, :n], cap, forced)
        for k, v, cap in zip(keys, values, caps, strict=True)
    ]


def rows_of(index) -> list[list[list[int]]]:
    return [[[j for j in row if j >= 0] for row in layer.tolist()] for layer in index]


@pytest.mark.slow
@few
@given(
    length=st.integers(2, 120),
    heads=st.sampled_from([1, 2, 4]),
    share=st.floats(0, 1),
    strict=st.booleans(),
    seed=st.integers(0, 10**6),
    gamma=st.sampled_from(GAMMAS[1:]),
    joint=st.booleans(),
    dba=st.booleans(),
)
def test_the_method_keeps_what_the_papers_equations_keep(length, heads, share, strict, seed, gamma, joint, dba):
    made = shipped(gamma=float(gamma), heads="joint" if joint else "per_head", dba=dba)
    budget = 1 + int(share * (length - 2))
    seen = [oracles.make_layer(length, heads, 2, seed=seed + i) for i in range(LAYERS)]
    observed = [layer.observe(made.needs, layer=i) for i, layer in enumerate(seen)]
    scores = [made.scorer.score(obs, budget, 0) for obs in observed]
    summaries = {i: made.allocator.summary(obs, budget, 0) for i, obs in enumerate(observed)} if dba else None
    got = rows_of(made.select(scores, budget, None, range(LAYERS), LAYERS, strict, summaries=summaries))
    keys, values = [heads_of(layer.key) for layer in seen], [heads_of(layer.value) for layer in seen]
    want = wanted(keys, values, budget, strict, gamma, joint, dba)
    assert same_up_to_ties(got, want, scores)
    assert sum(len(row) for rows in got for row in rows) == (budget - int(strict)) * heads * LAYERS


def same_up_to_ties(got, want, scores) -> bool:
    """Equal counts everywhere, and tokens that differ are ties to the rounding of float32."""
    for ours, theirs, score in zip(got, want, scores, strict=True):
        for head, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            mine, other = sorted(set(a) - set(b)), sorted(set(b) - set(a))
            if len(a) != len(b) or len(mine) > 2:
                return False
            values = score[head, mine + other]
            if len(values) and float(values.max() - values.min()) > 2e-5 * float(values.max()) + 1e-9:
                return False
    return True


@pytest.mark.slow
@few
@given(
    length=st.integers(2, 60),
    heads=st.sampled_from([1, 2, 4]),
    share=st.floats(0, 1),
    seed=st.integers(0, 10**6),
    joint=st.booleans(),
)
def test_either_end_of_the_deviations_leaves_first(length, heads, share, seed, joint):
    budget, obs = (
        1 + int(share * (length - 2)),
        oracles.make_layer(length, heads, 2, seed=seed).observe(filter_needs("cached")),
    )
    for removal in ("smallest", "largest"):
        made = shipped(removal=removal, heads="joint" if joint else "per_head", dba=False)
        score = made.scorer.score(obs, budget, 0)
        got = rows_of(made.select([score], budget, None, [0], 1))[0]
        deviations = DeviationScorer(heads="joint" if joint else "per_head").score(obs, budget, 0)
        assert got == oracle.after_removals(deviations, budget, {length - 1}, removal)


def test_random_removal_draws_tokens_evenly_and_for_all_joint_heads_at_once():
    made, obs = DeviationScorer(removal="random"), oracles.make_layer(12, 3, 2).observe(filter_needs("cached"))
    assert made.stochastic and not DeviationScorer().stochastic and not made.comparable
    first = torch.zeros(12)
    for seed in range(600):
        score = made.score(obs, 4, seed)
        assert (score == score[:1]).all() and torch.equal(score, made.score(obs, 9, seed))
        first[score[0].topk(4).indices] += 1
    # 4 of 12 each: binomial with sd .0192 a token
    assert ((first / 600 - 1 / 3).abs() < 0.08).all()
    apart = DeviationScorer(heads="per_head", removal="random").score(obs, 4, 0)
    assert len({tuple(row.topk(4).indices.tolist()) for row in apart}) > 1


def test_the_default_removal_is_in_no_identity():
    """Cells are older than the parameter: neither their hash nor what rows show of them may change."""
    node = method_defaults(["flashcache"])["flashcache"]
    forms = {}
    for removal in ("smallest", "largest"):
        node = node | {"removal": removal}
        plain = under_reading("flashcache", node, "paper")
        forms[removal] = identity_form(plain, build_compressor("flashcache", node, "paper"))
    assert "removal" not in forms["smallest"] and "removal" not in forms["smallest"]["scorer"]
    assert forms["largest"]["removal"] == forms["largest"]["scorer"]["removal"] == "largest"


def test_shipped_defaults_and_ablations_are_the_documented_ones():
    made = shipped()
    assert made.scorer == DeviationScorer(0.2, "joint", "cached") and made.allocator == Spectral(0.2, "cached", True)
    assert made.selector == TopK(recents=1) and made.scope == "model"
    config = compose(
        [
            "method=flashcache",
            "methods.flashcache.gamma=0.5",
            "methods.flashcache.dba=false",
            "methods.flashcache.keys=unrotated",
        ]
    )
    ablated = build_compressor("flashcache", config.methods["flashcache"], "paper")
    assert ablated.scorer == DeviationScorer(0.5, "joint", "unrotated")
    assert ablated.allocator == Spectral(0.5, "unrotated", False) and ablated.scope == "layer"
    node = method_defaults(["flashcache"])["flashcache"]
    assert replace(build_compressor("flashcache", node, "released"), reading="paper") == made


@each(
    ("build", "message"),
    [
        (lambda: DeviationScorer(gamma=1.0), "gamma is 1.0; allowed: a share of the T bins"),
        (lambda: DeviationScorer(gamma=-0.1), "gamma is -0.1"),
        (lambda: DeviationScorer(heads="perhead"), "did you mean 'per_head'"),
        (lambda: DeviationScorer(keys="rotated"), "did you mean 'unrotated'"),
        (lambda: DeviationScorer(removal="larges"), "did you mean 'largest'"),
        (lambda: Spectral(gamma=2), "gamma is 2"),
        (lambda: Spectral(keys="cache"), "did you mean 'cached'"),
    ],
)
def test_impossible_parameters_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


# ---------------------------------------------------------------- through models

FAMILIES = ("qwen2_5_vl", "llava_next", "internvl_qwen3")


def cached(model, inputs):
    """K and V of every layer and head as stock prefill stores them."""
    with torch.no_grad():
        layers = model(**inputs, use_cache=True).past_key_values.layers
    return [list(layer.keys[0]) for layer in layers], [list(layer.values[0]) for layer in layers]


@each("strict", [False, True])
@each("parameters", [{}, {"heads": "per_head", "gamma": 0.5}, {"dba": False}])
@cover.few("family", FAMILIES, keep=2)
def test_kept_sets_of_a_model_are_the_oracles(family, parameters, strict):
    model, inputs = zoo.model(family), zoo.prompt(family)
    budget = inputs["input_ids"].shape[1] // 4
    protocol = "strict" if strict else "paper"
    with attach(model, shipped(**parameters), parts.budget(budget), protocol) as session, torch.no_grad():
        model(**inputs, use_cache=True)
        kept = session.kept()
    want = wanted(
        *cached(model, inputs),
        budget,
        strict,
        str(parameters.get("gamma", "0.2")),
        parameters.get("heads") != "per_head",
        parameters.get("dba", True),
    )
    assert rows_of([index[0] for index in kept]) == want
    if not parameters:
        assert len({len(rows[0]) for rows in want}) > 1, "this model's layers do not tell the budgets apart"


@cover.few("family", FAMILIES, keep=2)
def test_decoding_equals_full_attention_with_the_evicted_entries_masked(family):
    model, inputs = zoo.model(family), zoo.prompt(family)
    length = inputs["input_ids"].shape[1]
    with attach(model, shipped(), parts.budget("25%")) as session:
        run = reference.generate(model, inputs, 6)
        kept = session.kept()
    masked = reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 6)
    assert (run.logits - masked.logits).abs().max() <= 2e-6
    assert torch.equal(run.tokens, masked.tokens)


def test_padding_is_no_part_of_the_signal():
    model = zoo.model("qwen2_5_vl")
    prompts = [zoo.prompt("qwen2_5_vl", seed=1, after=25), zoo.prompt("qwen2_5_vl", seed=2)]
    alone = []
    for inputs in prompts:
        with attach(model, shipped(), parts.budget(12)) as session, torch.no_grad():
            model(**inputs, use_cache=True)
            alone.append(rows_of([index[0] for index in session.kept()]))
    joined = zoo.batch(prompts)
    pad = int((joined["attention_mask"][1] == 0).sum())
    assert pad > 0
    with attach(model, shipped(), parts.budget(12)) as session, torch.no_grad():
        model(**joined, use_cache=True)
        kept = session.kept()
    assert rows_of([index[0] for index in kept]) == alone[0]
    assert [[[j - pad for j in row] for row in rows] for rows in rows_of([index[1] for index in kept])] == alone[1]


@pytest.mark.full
@cover.few("family", FAMILIES, first=1)
def test_forks_answer_as_the_method_alone(family):
    variants = [shipped(), shipped(dba=False, heads="per_head"), shipped(keys="unrotated", gamma=0.4)]
    variants = [replace(made, name=f"flashcache{i}") for i, made in enumerate(variants)]
    cells = [
        common.cell(made, budget, protocol)
        for made in variants
        for budget in (1, 9, "40%")
        for protocol in common.PROTOCOLS
    ]
    forks = common.assert_forks_equal_alone(zoo.model(family), family, common.encoded(family), cells)
    assert len({fork.kept_digest for fork in forks}) > len(cells) // 2


def test_a_text_prompt_is_compressed_like_any_other():
    model, inputs = zoo.model("llama"), zoo.prompt("llama")
    with attach(model, shipped(), parts.budget(10)) as session, torch.no_grad():
        model(**inputs, use_cache=True)
        kept = rows_of([index[0] for index in session.kept()])
    assert kept == wanted(*cached(model, inputs), 10, strict=False)
