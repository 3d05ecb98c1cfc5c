"""The fused statistics against their definitions in float64, kernels run by Triton's interpreter on the CPU, or on a device.

Triton decides when it is imported whether it interprets, so `test_fused.py` runs this file in a process of its own;
`benchmarks/gpu.py` runs it where there is a CUDA device.
"""

from __future__ import annotations

import os

import pytest
import torch

from mmkv_bench.compression.numerics import attention, fused, proxies
from mmkv_bench.compression.numerics.ordering import nucleus
from mmkv_bench.devices import Device
from tests.compression import oracles
from tests.each import each

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch):
    """The host runs kernels, too, and a row block would be a failure."""
    monkeypatch.setattr(Device, "fuses", True)
    for name in ("attention.exponentials", "proxies.exponentials", "proxies.nucleus"):
        monkeypatch.setattr(f"mmkv_bench.compression.numerics.{name}", None)


def tensors(heads, group, rows, length, dim, dtype=torch.float32, seed=0):
    """Query `[heads * group, rows, dim]` as a model's attention has it, rows before heads in memory, and key."""
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, heads * group, dim, generator=g).transpose(0, 1) * 2
    key = torch.randn(heads, length, dim, generator=g) * 2
    return query.to(DEVICE, dtype), key.to(DEVICE, dtype), dim**-0.5


def probabilities(query, key, scaling, causal, sinks=None):
    """float64 `[Hkv, g, n, T]` on the CPU; causal rows are the last of the prompt; sinks `[Hq]` are one more column."""
    query, key = query.cpu(), key.cpu()
    group, rows, length = query.shape[0] // key.shape[0], query.shape[1], key.shape[1]
    scores = query.double() @ key.double().repeat_interleave(group, 0).transpose(1, 2) * scaling
    if causal:
        scores.masked_fill_(torch.ones(rows, length, dtype=torch.bool).triu_(length - rows + 1), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, rows, 1)], -1)
    return scores.softmax(-1)[..., :length].view(-1, group, rows, length)


def assert_relative(got, want):
    assert (got.dtype, got.shape, got.device.type) == (torch.float32, want.shape, DEVICE)
    assert float(((got.cpu().double() - want).abs() / want).max()) <= 1e-5


def check_sums(heads, group, rows, length, dim, dtype):
    query, key, scaling = tensors(heads, group, rows, length, dim, dtype)
    want = probabilities(query, key, scaling, causal=True).sum((1, 2))
    assert_relative(attention.column_sums(query, key, scaling, length - rows), want)


def test_window_mass_equals_its_definition():
    query, key, scaling = tensors(1, 3, 9, 75, 24, torch.bfloat16)  # a head dimension that is no power of two
    want = probabilities(query, key, scaling, causal=True).mean((1, 2))
    assert_relative(attention.window_mass(query, key, scaling), want)


@each(
    "heads, group, rows, length, dim, dtype",
    [
        (1, 1, 70, 70, 16, torch.float32),
        (1, 2, 1, 1100, 16, torch.float32),  # one row, whose keys several programs share
    ],
)
def test_column_sums_equal_their_definition(heads, group, rows, length, dim, dtype):
    check_sums(heads, group, rows, length, dim, dtype)


@pytest.mark.full
@each(
    "heads, group, dim, dtype",
    [(1, 1, 128, torch.float32), (1, 7, 80, torch.bfloat16), (2, 2, 64, torch.float16)],
)
@each("rows, length", [(1, 1), (1, 65), (64, 64), (65, 129), (32, 193)])
def test_column_sums_equal_their_definition_at_every_edge(rows, length, heads, group, dim, dtype):
    check_sums(heads, group, rows, length, dim, dtype)


def test_learned_sinks_take_their_share_of_causal_and_of_other_rows():
    query, key, scaling = tensors(2, 2, 6, 70, 16)
    sinks = torch.linspace(-3, 20, 4)
    want = probabilities(query, key, scaling, causal=True, sinks=sinks).sum((1, 2))
    assert_relative(attention.column_sums(query, key, scaling, 64, sinks.to(DEVICE)), want)
    mass = probabilities(query, key, scaling, causal=False, sinks=sinks).unflatten(2, (2, -1)).sum(3)
    got = torch.cat(list(proxies.group_mass(query, key, scaling, 2, per_query_head=True, sinks=sinks.to(DEVICE))), 2)
    assert_relative(got, mass)


@pytest.mark.full
def test_a_part_whose_keys_a_row_does_not_see_adds_nothing():
    query, key, scaling = tensors(1, 2, 700, 1300, 16)
    want = probabilities(query, key, scaling, causal=True).sum((1, 2))
    assert_relative(attention.column_sums(query, key, scaling, 600), want)


def check_groups(heads, group, rows, length, groups, query_dtype, key_dtype, thorough=True):
    query, _, scaling = tensors(heads, group, rows, length, 16, query_dtype)
    _, key, _ = tensors(heads, group, rows, length, 16, key_dtype, seed=1)
    mass = probabilities(query, key, scaling, causal=False).unflatten(2, (groups, -1)).sum(3)
    anchor = torch.rand(heads, length, generator=torch.Generator().manual_seed(1))
    for apart in (False, True) if thorough else (False,):
        want = mass if apart else mass.mean(1, keepdim=True)
        got = torch.cat(list(proxies.group_mass(query, key, scaling, groups, per_query_head=apart)), 2)
        assert_relative(got, want)
        if thorough:
            assert_relative(proxies.total_mass(query, key, scaling, groups, per_query_head=apart), want.sum((1, 2)))
        adjust = {"per_query_head": apart, "drop_last": apart, "anchor": None if apart else anchor.to(DEVICE)}
        for cover in ("left", "right") if thorough else ("left",):
            votes = proxies.group_votes(query, key, scaling, groups, 0.8, cover=cover, **adjust)
            rows_of = want[..., :-1] if apart else (want + anchor[:, None, None].double()) / (1 + rows // groups)
            assert torch.equal(votes.cpu(), counted(rows_of, 0.8, cover, length))


def counted(mass, tau, cover, length):
    """Votes `[Hkv, length]` by sorting each group's mass."""
    want = torch.zeros(mass.shape[0], length)
    for h, own in enumerate(mass.flatten(1, 2)):
        for row in own.tolist():
            want[h, list(oracles.covering_set(row, tau, cover))] += 1
    return want


def test_group_mass_and_votes_equal_their_definition():
    check_groups(
        1, 2, 6, 70, 2, torch.float32, torch.bfloat16, thorough=False
    )  # proxies are float32 whatever the model is


@pytest.mark.full
@each(
    "heads, group, rows, length, groups, query_dtype, key_dtype",
    [
        (2, 3, 24, 150, 4, torch.float32, torch.float32),
        (1, 1, 66, 65, 1, torch.bfloat16, torch.bfloat16),
        (1, 7, 40, 64, 2, torch.float32, torch.float16),
    ],
)
def test_group_mass_and_votes_equal_their_definition_at_every_edge(
    heads, group, rows, length, groups, query_dtype, key_dtype
):
    check_groups(heads, group, rows, length, groups, query_dtype, key_dtype)


@pytest.mark.full
def test_the_only_key_has_all_votes_and_none_when_it_is_dropped():
    query, key, scaling = tensors(2, 1, 4, 1, 16)
    assert proxies.group_votes(query, key, scaling, 4, 0.9).tolist() == [[4.0], [4.0]]
    assert proxies.group_votes(query, key, scaling, 4, 0.9, drop_last=True).tolist() == [[0.0], [0.0]]


def test_widely_spread_proxies_keep_their_mass():
    query, key, scaling = tensors(1, 1, 4, 90, 16, seed=19)
    want = probabilities(query * 60, key, scaling, causal=False).view(1, 1, 2, 2, 90).sum(3)
    assert float(want.min()) < 1e-60
    got = next(proxies.group_mass(query * 60, key, scaling, 2))
    assert bool((got > 0).all()) and torch.allclose(got.cpu().double(), want, rtol=2e-4, atol=1e-37)


@each("tau, left", [(0.25, True), (0.875, False)])
def test_equal_masses_are_taken_from_the_lowest_index_over_blocks(monkeypatch, tau, left):
    monkeypatch.setattr(fused, "BLOCK", 16)
    mass = torch.randint(1, 4, (1, 1, 1, 40), generator=torch.Generator().manual_seed(3)).float()  # every sum is exact
    want = nucleus(mass, tau, "left" if left else "right").sum((1, 2))
    assert torch.equal(fused.cover_votes(mass.to(DEVICE), tau, left).cpu(), want)


@pytest.mark.full
@each("seed", range(4))
def test_votes_are_those_of_the_search_by_row_blocks(seed):
    g = torch.Generator().manual_seed(seed)
    mass = (torch.randn(1, 2, 2, 5000, generator=g) * 4 * seed).softmax(-1)
    for tau in (0.01, 0.5, 0.95, 0.9999):
        assert torch.equal(fused.cover_votes(mass.to(DEVICE), tau, True).cpu(), nucleus(mass, tau).sum((1, 2)))


@pytest.mark.full
def test_fake_tensors_are_told_what_kernels_return():
    from torch._subclasses.fake_tensor import FakeTensorMode  # seconds

    query, key, scaling = tensors(2, 2, 2, 20, 16)
    calls = (
        (fused.column_sums, (query, key, scaling, 18)),
        (fused.group_mass, (query, key, scaling, 1, True)),
        (fused.group_mass, (query, key, scaling, 2, False)),
        (fused.cover_votes, (torch.rand(2, 1, 1, 20, device=DEVICE), 0.5, True)),
    )
    for operation, given in calls:
        real = operation(*given)
        with FakeTensorMode() as mode:
            fake = operation(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given))
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
