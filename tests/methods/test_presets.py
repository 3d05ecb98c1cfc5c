"""Variants of the baselines: pooling by average and maximum, the order of heads and pooling, presets, sinks, releases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.scorers.expected_attention import ExpectedAttentionScorer
from mmkv_bench.compression.scorers.mmshift import MMShiftScorer
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.methods.build import build_compressor
from tests.compression import oracles
from tests.each import each

layers = st.builds(
    oracles.make_layer,
    length=st.integers(1, 300),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 10**6),
)


def built(name: str, reading: str = "paper", **changes):
    words = [f"methods.{name}.{key}={value}" for key, value in changes.items()]
    node = compose([f"method={name}", *words]).methods[name]
    return build_compressor(name, node, reading, method_defaults([name])[name])


def window_rows(layer, w: int) -> torch.Tensor:
    """[Hq,T]: mean attention of the last w queries, query heads apart."""
    share = layer.query.shape[0] // layer.key.shape[0]
    out = torch.zeros(layer.query.shape[0], layer.length, dtype=torch.float64)
    for h in range(out.shape[0]):
        for i in range(layer.length - w, layer.length):
            out[h] += oracles.attention(layer.query[h, i].float(), layer.key[h // share], layer.scaling, i) / w
    return out


def pooled(row: list[float], k: int, kind: str) -> list[float]:
    """Stride 1; the average divides by k at the edges too, the maximum looks at what is there."""
    near = [[row[i] for i in range(j - k // 2, j + k // 2 + 1) if 0 <= i < len(row)] for j in range(len(row))]
    return [sum(x) / k if kind == "average" else max(x) for x in near]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    layer=layers,
    cuts=st.lists(st.integers(1, 299), max_size=3),
    share=st.floats(0, 1),
    window=st.sampled_from([1, 8, 32]),
    pool=st.sampled_from([1, 5, 7]),
    kind=st.sampled_from(["average", "max"]),
    heads=st.sampled_from(["first", "last"]),
)
def test_pooling_and_the_order_of_heads_equal_their_formula(layer, cuts, share, window, pool, kind, heads):
    budget = 1 + int(share * (layer.length + 4))
    scorer = WindowScorer(window, pool, kind, heads)
    got = scorer.score(layer.observe(scorer.needs, cuts), budget, 0)
    w = min(window, max(1, budget // 2), layer.length)
    rows, kv = window_rows(layer, w), layer.key.shape[0]
    want, prefix = rows.view(kv, -1, layer.length).mean(1), layer.length - w
    for h in range(kv):
        members = rows.view(kv, -1, layer.length)[h, :, :prefix]
        if heads == "first":
            members = members.mean(0, keepdim=True)
        smooth = [pooled(row.tolist(), pool, kind) for row in members]
        want[h, :prefix] = torch.tensor(smooth, dtype=torch.float64).mean(0)
    assert got.dtype == torch.float32
    assert ((got.double() - want).abs() <= 2e-5 * want + 1e-12).all()


def test_the_order_of_heads_matters_to_the_maximum_alone():
    """Two query heads that look at neighbours: their maxima coincide, their mean's does not reach it."""
    layer = oracles.make_layer(60, 1, 2, seed=4)
    apart, together = (WindowScorer(4, 5, "max", heads) for heads in ("last", "first"))
    high, low = (s.score(layer.observe(s.needs), 40, 0) for s in (apart, together))
    assert (high >= low - 1e-7).all() and (high > low * 1.01).any()
    same = [WindowScorer(4, 5, "average", heads) for heads in ("last", "first")]
    assert torch.equal(*(s.score(layer.observe(s.needs), 40, 0) for s in same))


@pytest.mark.full
def test_presets_hold_the_constants_of_their_releases():
    kvpress, official, plain = built("snapkv_kvpress"), built("adakv_official"), built("snapkv")
    assert kvpress.scorer == WindowScorer(64, 5, "average", "last") and kvpress.selector == TopK(window=64)
    assert official.scorer == WindowScorer(32, 7, "max") and official.allocator == built("adakv").allocator
    assert plain.scorer == WindowScorer(32, 5, "average") and built("snapkv", "released").scorer.window == 1
    assert built("adakv_official", "released").allocator.rounding == "nearest"
    assert built("snapkv", window=64).scorer == WindowScorer(64, 5)


def test_the_llava_release_differs_from_the_qwen_one_where_its_code_does():
    qwen, llava = (built(name, "released").scorer for name in ("mmshift", "mmshift_llava"))
    assert built("mmshift_llava").scorer == built("mmshift").scorer == MMShiftScorer()
    changed = {name for name in MMShiftScorer.__dataclass_fields__ if getattr(qwen, name) != getattr(llava, name)}
    assert changed == {"groups", "last_tokens", "plain_layers"}
    assert (llava.samples, llava.groups, llava.last_tokens, llava.plain_layers) == (512, 16, 512, 2)


@each("sinks", [0, 4])
@each("budget", [1, 3, 9])
def test_random_keeps_its_sinks_and_the_last_token(sinks, budget):
    made, layer = built("random", sinks=sinks), oracles.make_layer(30, 2, 1)
    score = made.scorer.score(layer.observe(made.scorer.needs), budget, 7)
    (index,) = made.select([score], budget, None, [0], 1)
    first = min(sinks, budget - 1)
    for row, values in zip(index.tolist(), score.tolist(), strict=True):
        assert row[-1] == 29 and row[:first] == list(range(first)) and len(row) == budget
        others = sorted(range(first, 29), key=lambda j: (-values[j], j))[: budget - 1 - first]
        assert row == sorted([*range(first), *others, 29])


def test_a_model_in_float32_has_nothing_to_round():
    layer = oracles.make_layer(50, 2, 2)
    exact, rounded = (ExpectedAttentionScorer(16, rounding=kind) for kind in ("none", "model"))
    assert torch.equal(*(s.score(layer.observe(s.needs), 8, 0) for s in (exact, rounded)))


def test_expected_attention_rounds_like_a_half_precision_pipeline():
    """Every stored tensor of the release in bfloat16; scores of many keys are then equal."""
    layer = oracles.make_layer(200, 2, 2, seed=2)
    scorer = ExpectedAttentionScorer(16, rounding="model")
    obs = layer.observe(scorer.needs, dtype=torch.bfloat16)
    got = scorer.score(obs, 8, 0)[:, 4:]
    half = lambda x: x.to(torch.bfloat16).float()  # noqa: E731
    dim, key = 8, obs.key.float()[:, 4:]
    rotation = sum(oracles.turn(torch.eye(dim), torch.full((dim,), 199 + t)).T / 16 for t in range(1, 17))
    want = torch.zeros(2, 196)
    for h in range(4):
        mu = half(rotation @ obs.query_mean[h])
        sigma = half(rotation @ obs.query_covariance[h] @ rotation.T)
        z = torch.stack([mu @ k * dim**-0.5 + k @ sigma @ k / dim / 2 for k in key[h // 2]])
        want[h // 2] += half(half(z).softmax(0)) / 2
    want = half(half(want) * half(obs.value[:, 4:].float().norm(dim=-1)))
    near = (got - want).abs() <= 0.02 * want  # a unit in the last place may fall to the other side
    assert near.all() and (got == want).float().mean() > 0.9
    assert len(got[0].unique()) < 150, "bfloat16 ties"
    assert torch.equal(got, half(got))


@each(("length", "budget"), [(60, 10), (60, 40), (33, 5), (20, 6)])
def test_released_keydiff_keeps_its_window_and_a_whole_budget_besides(length, budget):
    made, layer = built("keydiff", "released"), oracles.make_layer(length, 2, 2)
    score = made.scorer.score(layer.observe(made.scorer.needs), budget, 0)
    (index,) = made.select([score], budget, None, [0], 1)
    prefix = max(0, length - 32)
    values = oracles.keydiff(layer, 32)
    for row, ranks in zip(index.tolist(), values.tolist(), strict=True):
        best = sorted(range(prefix), key=lambda j: (-ranks[j], j))[:budget]
        assert [j for j in row if j >= 0] == sorted([*best, *range(prefix, length)])


@each("sinks", [1, 4, 32])
def test_streamingllm_takes_the_sinks_that_its_release_was_left_with(sinks):
    made = built("streamingllm", "released", sinks=sinks)
    score = made.scorer.score(oracles.make_layer(100, 1, 1).observe(made.scorer.needs), 40, 0)
    (index,) = made.select([score], 40, None, [0], 1)
    assert index[0].tolist() == [*range(sinks), *range(100 - (40 - sinks), 100)]
