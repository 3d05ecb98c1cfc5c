"""Streaming statistics equal their definitions, in any chunking, in bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.numerics.attention import column_sums, window_mass
from mmkv_bench.compression.numerics.moments import (
    ElementMoments,
    JointMoments,
    average_rotation,
    expected_logits,
    rotate,
    unrotate,
)
from mmkv_bench.compression.numerics.ordering import nucleus
from mmkv_bench.compression.numerics.proxies import group_mass, group_votes
from mmkv_bench.devices import Device
from tests.compression import oracles
from tests.each import each

examples = settings(max_examples=40, deadline=None, derandomize=True)
shapes = {
    "length": st.integers(1, 200),
    "kv_heads": st.sampled_from([1, 2, 3]),
    "group": st.sampled_from([1, 2, 7]),
    "seed": st.integers(0, 10**6),
}


def tensors(length, kv_heads, group, seed, dim=8, rows=None):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(kv_heads * group, rows or length, dim, generator=g) * 2
    key = torch.randn(kv_heads, length, dim, generator=g) * 2
    return query, key, dim**-0.5


def assert_relative(got, want, limit=5e-6):
    assert got.dtype == torch.float32 and torch.isfinite(got).all()
    assert got.shape == want.shape
    assert ((got.double() - want).abs() / want.abs().clamp_min(1e-30)).max() <= limit


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that every statistic needs many blocks, as a long prompt does."""
    monkeypatch.setattr(Device, "tile", 64)


# ---------------------------------------------------------------- attention mass


@examples
@given(**shapes, w=st.integers(1, 40))
def test_window_mass_equals_its_definition(length, kv_heads, group, seed, w):
    query, key, scaling = tensors(length, kv_heads, group, seed)
    w = min(w, length)
    assert_relative(window_mass(query[:, -w:], key, scaling), oracles.window_mass(query, key, scaling, w))


@examples
@given(**shapes)
def test_column_sums_equal_their_definition(length, kv_heads, group, seed):
    query, key, scaling = tensors(length, kv_heads, group, seed)
    got = column_sums(query, key, scaling)
    assert_relative(got, oracles.column_sums(query, key, scaling))
    assert torch.allclose(got.sum(1), torch.full((kv_heads,), float(length * group)))


@pytest.mark.full
@examples
@given(**shapes, cuts=st.lists(st.integers(1, 199), max_size=4))
def test_column_sums_of_chunks_add_up_to_those_of_the_prompt(length, kv_heads, group, seed, cuts):
    query, key, scaling = tensors(length, kv_heads, group, seed)
    edges = [0, *sorted({c for c in cuts if c < length}), length]
    total = torch.zeros(kv_heads, length)
    for start, end in zip(edges, edges[1:], strict=False):
        total[:, :end] += column_sums(query[:, start:end], key[:, :end], scaling, start)
    assert_relative(total, oracles.column_sums(query, key, scaling))


@each("group", [1, 3])
def test_tiling_changes_no_attention_statistic(small_tiles, group):
    query, key, scaling = tensors(150, 2, group, 5)
    assert_relative(column_sums(query, key, scaling), oracles.column_sums(query, key, scaling))
    assert_relative(window_mass(query[:, -33:], key, scaling), oracles.window_mass(query, key, scaling, 33))


@each("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_are_float32_and_finite(dtype):
    query, key, scaling = tensors(120, 2, 3, 7)
    query, key = (query * 150).to(dtype), (key * 150).to(dtype)  # products beyond float16's range
    assert float((query.double()[0] @ key.double()[0].T).abs().max()) > torch.finfo(torch.float16).max
    for got, want in (
        (window_mass(query[:, -9:], key, scaling), window_mass(query[:, -9:].float(), key.float(), scaling)),
        (column_sums(query, key, scaling), column_sums(query.float(), key.float(), scaling)),
        (
            group_votes(query[:, :8], key, scaling, 4, 0.9),
            group_votes(query[:, :8].float(), key.float(), scaling, 4, 0.9),
        ),
    ):
        assert got.dtype == torch.float32 and torch.isfinite(got).all() and torch.equal(got, want)


def test_column_sums_hold_one_tile_not_the_attention_matrix():
    query, key, scaling = tensors(2048, 1, 7, 3, dim=16)
    naive = 7 * 2048 * 2048 * 4
    inputs_and_result = 2 * key.numel() * 4 + 2048 * 4
    peak = oracles.allocator_peak(lambda: column_sums(query, key, scaling))
    assert Device.tile * 4 / 2 < peak <= 3 * Device.tile * 4 + inputs_and_result < naive / 3


# ---------------------------------------------------------------- nucleus


masses = st.lists(st.integers(0, 8), min_size=1, max_size=60).filter(lambda m: sum(m) > 0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows=st.lists(masses, min_size=1, max_size=4), tau=st.sampled_from([0.25, 0.5, 0.75, 0.875, 1.0]))
@pytest.mark.parametrize("side", ["left", "right"])
def test_nucleus_is_the_covering_set_also_with_ties(rows, tau, side):
    width = max(map(len, rows))
    rows = [r + [0] * (width - len(r)) for r in rows]  # small integers: every sum is exact
    got = nucleus(torch.tensor(rows, dtype=torch.float32), tau, side)
    for row, members in zip(rows, got, strict=True):
        want = oracles.covering_set([float(m) for m in row], tau, side)
        if side == "right":  # keys without mass come after the cut when it is met exactly; their votes are free
            members, want = members & (torch.tensor(row) > 0), {j for j in want if row[j] > 0}
        assert members.nonzero().flatten().tolist() == sorted(want)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    width=st.integers(1, 400),
    seed=st.integers(0, 10**6),
    sharp=st.sampled_from([0.0, 1.0, 4.0, 12.0]),
    tau=st.floats(0.01, 1.0),
)
def test_nucleus_equals_the_sort_on_attention(width, seed, sharp, tau):
    g = torch.Generator().manual_seed(seed)
    mass = (torch.randn(3, 5, width, generator=g) * sharp + torch.rand(3, 5, width, generator=g)).softmax(-1)
    got = nucleus(mass, tau)
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    cum = ordered.double().cumsum(-1)
    count = torch.searchsorted(cum, tau * mass.double().sum(-1, keepdim=True)) + 1
    want = torch.zeros_like(got).scatter_(-1, order, torch.arange(width) < count)
    if tau < 1:
        assert torch.equal(got, want)
    covered = (mass.double() * got).sum(-1)
    assert (covered >= tau * mass.double().sum(-1) * (1 - 1e-12)).all()


def test_one_key_with_nearly_all_mass_is_a_covering_set_of_one():
    mass = torch.tensor([[0.002, 0.99, 0.008]])
    assert nucleus(mass, 0.95).tolist() == [[False, True, False]]
    assert nucleus(mass, 0.95, "right").tolist() == [[False, False, False]]


def test_equal_masses_are_taken_from_the_lowest_index():
    assert nucleus(torch.full((1, 100), 0.25), 0.5)[0].nonzero().flatten().tolist() == list(range(50))


# ---------------------------------------------------------------- proxies


def naive_groups(query, key, scaling, groups):
    share, size = query.shape[0] // key.shape[0], query.shape[1] // groups
    out = torch.zeros(query.shape[0], groups, key.shape[1], dtype=torch.float64)
    for h in range(query.shape[0]):
        for i in range(query.shape[1]):
            out[h, i // size] += oracles.attention(query[h, i], key[h // share], scaling, None)
    return out


@examples
@given(**shapes, groups=st.sampled_from([1, 2, 4]), size=st.integers(1, 5), apart=st.booleans())
def test_group_mass_equals_its_definition(length, kv_heads, group, seed, groups, size, apart):
    query, key, scaling = tensors(length, kv_heads, group, seed, rows=groups * size)
    got = torch.cat(list(group_mass(query, key, scaling, groups, per_query_head=apart)), 2)
    want = naive_groups(query, key, scaling, groups).view(kv_heads, group, groups, length)
    assert_relative(got, want if apart else want.mean(1, keepdim=True))


def test_tiling_changes_no_group_mass(small_tiles):
    query, key, scaling = tensors(90, 2, 3, 11, rows=24)
    blocks = list(group_mass(query, key, scaling, 4))
    assert len(blocks) == 4  # one group at a time, and each in several blocks of rows
    want = naive_groups(query, key, scaling, 4).view(2, 3, 4, 90).mean(1, keepdim=True)
    assert_relative(torch.cat(blocks, 2), want)


@pytest.mark.parametrize("cover", ["left", "right"])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("anchored", [False, True])
def test_votes_count_covering_sets(cover, drop, anchored):
    query, key, scaling = tensors(70, 2, 3, 13, rows=24)
    anchor = torch.rand(2, 70, generator=torch.Generator().manual_seed(1))
    got = group_votes(query, key, scaling, 4, 0.8, cover=cover, drop_last=drop, anchor=anchor if anchored else None)
    mass = naive_groups(query, key, scaling, 4).view(2, 3, 4, 70).mean(1)
    mass = (mass + anchor[:, None]) / 7 if anchored else mass
    keep = 69 if drop else 70
    want = torch.zeros(2, 70)
    for h in range(2):
        for m in mass[h, :, :keep].tolist():
            for j in oracles.covering_set(m, 0.8, cover):
                want[h, j] += 1
    assert torch.equal(got, want)


def test_widely_spread_proxies_keep_their_mass():
    query, key, scaling = tensors(300, 1, 2, 19, rows=8)
    query = query * 60  # softmax rows whose smallest entries are below float32's range
    want = naive_groups(query, key, scaling, 2).view(1, 2, 2, 300).mean(1, keepdim=True)
    assert float(want.min()) < 1e-60
    got = torch.cat(list(group_mass(query, key, scaling, 2)), 2)
    # Large scores carry a float32 error of their own; what is checked is that no mass appears or is lost.
    assert torch.allclose(got.double(), want, rtol=2e-4, atol=1e-37)


def test_dropping_the_only_key_leaves_no_votes():
    query, key, scaling = tensors(1, 2, 1, 0, rows=4)
    assert group_votes(query, key, scaling, 2, 0.95, drop_last=True).tolist() == [[0.0], [0.0]]
    assert group_votes(query, key, scaling, 2, 0.95).tolist() == [[2.0], [2.0]]


def test_rounding_follows_a_half_precision_pipeline_step_by_step():
    query, key, scaling = tensors(60, 2, 3, 17, rows=16)
    got = torch.cat(list(group_mass(query, key, scaling, 4, rounding=torch.bfloat16)), 2)[:, 0]
    scores = torch.einsum("hgnd,htd->hgnt", query.view(2, 3, 16, 8), key) * scaling
    step = scores.softmax(-1).to(torch.bfloat16).mean(1)  # bfloat16 ops round once per operation
    want = step.view(2, 4, 4, 60).sum(2)
    assert torch.equal(got.to(torch.bfloat16), want) and torch.equal(got, want.float())


# ---------------------------------------------------------------- moments and rotations


@examples
@given(count=st.integers(1, 200), seed=st.integers(0, 10**6), cuts=st.lists(st.integers(1, 199), max_size=5))
def test_moments_do_not_depend_on_chunks(count, seed, cuts):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, count, 6, generator=g) * 0.5 + 40 * torch.randn(3, 1, 6, generator=g)  # mean >> spread
    joint, elements = JointMoments(), ElementMoments()
    edges = [0, *sorted({c for c in cuts if c < count}), count]
    for start, end in zip(edges, edges[1:], strict=False):
        joint.add(x[:, start:end])
        elements.add(x[0, start:end])
    rows = x.double()
    centred = rows - rows.mean(1, keepdim=True)
    assert torch.allclose(joint.mean(), rows.mean(1), rtol=1e-12)
    assert torch.allclose(joint.covariance(), centred.transpose(1, 2) @ centred / count, rtol=5e-6, atol=1e-9)
    assert torch.allclose(elements.mean(), rows[0].mean(0), rtol=1e-12)
    assert torch.allclose(elements.std(), rows[0].std(0, correction=0), rtol=5e-6, atol=1e-6)
    mean, std = elements.scalars()
    assert float(mean) == pytest.approx(float(rows[0].mean()), rel=1e-12)
    assert float(std) == pytest.approx(float(rows[0].std(correction=0)), rel=1e-9, abs=1e-6)


def test_moments_of_float16_do_not_overflow():
    x = torch.full((3000, 4), 300.0, dtype=torch.float16)
    x[::2] = -300.0
    moments = ElementMoments()
    moments.add(x)
    assert moments.std().tolist() == [300.0] * 4


@each("scale", [1.0, 1.7])
def test_unrotate_undoes_rotate(scale):
    x = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = (scale * t for t in oracles.cos_sin(torch.arange(20), 8))
    assert torch.allclose(rotate(x, cos, sin).double(), scale * oracles.turn(x, torch.arange(20)), atol=1e-5)
    assert torch.allclose(unrotate(rotate(x, cos, sin), cos, sin), x, atol=1e-6)


@each("scale", [1.0, 1.7])
def test_a_partial_rotation_leaves_the_other_dimensions_as_they_are(scale):
    """Qwen3.5 rotates a quarter of each head; a covariance is rotated on both sides."""
    x = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = (scale * t for t in oracles.cos_sin(torch.arange(20), 4))
    turned = rotate(x, cos, sin)
    assert torch.allclose(turned[..., :4].double(), scale * oracles.turn(x[..., :4], torch.arange(20)), atol=1e-5)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.allclose(unrotate(turned, cos, sin), x, atol=1e-6)
    matrix = rotate(torch.eye(16).expand(20, 16, 16).transpose(0, 1), cos, sin).mean(1).double()
    mean, covariance = x.double().mean(1), torch.stack([row.double().T.cov() for row in x])
    moved, spread = average_rotation(mean, covariance, cos, sin)
    assert torch.allclose(moved, mean @ matrix, atol=1e-5)
    assert torch.allclose(spread, matrix.T @ covariance @ matrix, atol=1e-4)


def test_joint_moments_of_turned_queries_hold_some_tiles_whatever_the_heads(monkeypatch):
    monkeypatch.setattr(Device, "tile", 2**13)
    x = torch.randn(48, 64, 32, generator=torch.Generator().manual_seed(1))
    rotation, moments = [one.float() for one in oracles.cos_sin(torch.arange(64), 32)], JointMoments()
    result = 48 * (32 + 32 * 32) * 8
    peak = oracles.allocator_peak(lambda: moments.add(x, rotation))
    assert result < peak <= result + 6 * Device.tile * 4 < result + x.nbytes
    rows = unrotate(x, *rotation)[5].double()
    assert torch.allclose(moments.mean()[5], rows.mean(0), rtol=1e-12)
    assert torch.allclose(moments.covariance()[5], rows.T.cov(correction=0), atol=1e-12)


def test_expected_logits_are_the_log_of_the_mean_exponential():
    g = torch.Generator().manual_seed(2)
    key, mean = torch.randn(1, 5, 2, generator=g), torch.randn(2, 2, generator=g, dtype=torch.float64)
    root = torch.randn(2, 2, 2, generator=g, dtype=torch.float64)
    got = expected_logits(key, mean, root @ root.transpose(1, 2), 0.7)
    draws = mean[:, None] + torch.randn(2, 400_000, 2, generator=g, dtype=torch.float64) @ root.transpose(1, 2)
    want = torch.exp(draws @ key[0].double().T * 0.7).mean(1).log()
    assert (got[0].double() - want).abs().max() < 0.03


def test_average_rotation_turns_both_moments():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(1, 50, 6, generator=g, dtype=torch.float64)
    moments = JointMoments()
    moments.add(x)
    cos, sin = oracles.cos_sin(torch.tensor([7]), 6)  # the average of one rotation is that rotation
    mean, covariance = average_rotation(moments.mean(), moments.covariance(), cos, sin)
    turned = oracles.turn(x, torch.full((50,), 7))
    centred = turned - turned.mean(1, keepdim=True)
    assert torch.allclose(mean, turned.mean(1), atol=1e-6)
    assert torch.allclose(covariance, centred.transpose(1, 2) @ centred / 50, atol=1e-6)


def test_expected_logits_do_not_depend_on_tiles(small_tiles):
    g = torch.Generator().manual_seed(4)
    key, mean = torch.randn(2, 37, 4, generator=g), torch.randn(6, 4, generator=g)
    covariance = torch.eye(4).expand(6, 4, 4) * 0.3
    want = torch.einsum("hgd,htd->hgt", mean.view(2, 3, 4), key) * 0.5 + 0.3 / 8 * key.square().sum(-1)[:, None]
    assert torch.allclose(expected_logits(key, mean, covariance, 0.5), want, atol=1e-6)
    assert math.isclose(
        float(expected_logits(key, mean, None, 0.5)[0, 0, 0]), float(mean[0] @ key[0, 0] * 0.5), rel_tol=1e-5
    )


def test_moments_leave_their_input_alone_in_every_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
        before = x.clone()
        moments = ElementMoments()
        moments.add(x)
        assert torch.equal(x, before)
        torch.testing.assert_close(moments.std(), before.double().std(0, correction=0))
