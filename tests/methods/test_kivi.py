"""KIVI's quantiser against the float64 oracle: group by group, bit by bit, byte by byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.numerics.quantise import Packed, dequantise, quantise
from mmkv_bench.errors import ConfigError
from tests.each import each
from tests.oracles import kivi as oracle

PROPERTY = settings(max_examples=30, deadline=None, derandomize=True)


def random(*shape: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(*shape, generator=generator) * spread
    return torch.randn(*shape, generator=generator) * scale


def near(ours: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor, group: int) -> None:
    """Equal to float32 rounding, but for numbers half-way between two levels, which may be rounded to either."""
    error = (ours.double() - exact).abs()
    step = scale.double().repeat_interleave(group, -1)
    assert (error <= step * (1 + 1e-6) + 1e-5).all()
    assert (error > 1e-5).sum() <= max(1, ours.numel() // 1000), "more than ties differ from the oracle"


@PROPERTY
@given(
    st.integers(1, 5),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([4, 8, 16, 32]),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
def test_values_are_quantised_per_token_as_the_oracle_does(tokens, bits, group, groups, seed):
    value = random(tokens, group * groups, seed=seed)
    packed = quantise(value, bits, group)
    assert packed.data.dtype == torch.uint8
    assert packed.data.shape == (tokens, group * groups * bits // 8) and packed.scale.shape == (tokens, groups)
    near(dequantise(packed), oracle.values(value.double(), bits, group), packed.scale, group)


@PROPERTY
@given(
    st.integers(1, 5), st.sampled_from([2, 4, 8]), st.sampled_from([4, 8, 32]), st.integers(1, 3), st.integers(0, 10**6)
)
def test_keys_are_quantised_per_channel_as_the_oracle_does(channels, bits, group, groups, seed):
    key = random(group * groups, channels, seed=seed)
    packed = quantise(key.T, bits, group)
    near(dequantise(packed), oracle.keys(key.double(), bits, group).T, packed.scale, group)


def test_a_group_by_hand():
    """Range 6 at 2 bits: step 2, levels 0 1 2 3 of minimum -1; the first number is in the lowest bits."""
    packed = quantise(torch.tensor([[-1.0, 0.9, 3.2, 5.0]]), 2, 4)
    assert packed.data.tolist() == [[0b11_10_01_00]]
    assert packed.scale.tolist() == [[2.0]] and packed.zero.tolist() == [[-1.0]]
    assert dequantise(packed).tolist() == [[-1.0, 1.0, 3.0, 5.0]]
    four = quantise(torch.tensor([[0.0, 15.0, 7.0, 8.0]]), 4, 2)  # groups of two: (0, 15) and (7, 8)
    assert four.data.tolist() == [[0xF0, 0xF0]] and dequantise(four).tolist() == [[0.0, 15.0, 7.0, 8.0]]


@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("bits", [2, 4, 8])
def test_constant_groups_and_extremes_come_back_exactly(bits, dtype):
    constant = torch.tensor([3.3, -7.7, 0.0, 1e4, 6e-8]).to(dtype)[:, None].expand(-1, 32)
    back = dequantise(quantise(constant, bits, 32))
    assert back.dtype == dtype and torch.equal(back, constant)
    mixed = random(20, 32, seed=3).to(dtype)
    low = dequantise(quantise(mixed, bits, 32)).gather(-1, mixed.argmin(-1, keepdim=True))
    assert torch.equal(low, mixed.amin(-1, keepdim=True))


@each("dtype", [torch.float16, torch.bfloat16])
@each("bits", [2, 4, 8])
def test_half_precision_stores_16_bit_scales_and_equals_the_oracle_with_such_scales(bits, dtype):
    value = random(40, 64, seed=4).to(dtype)
    packed = quantise(value, bits, 32)
    assert packed.scale.dtype == packed.zero.dtype == dtype and packed.scale.element_size() == 2
    exact = oracle.values(value.double(), bits, 32, storage=dtype)
    near_in_dtype = (dequantise(packed).double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + 1e-6
    assert near_in_dtype.float().mean() > 0.999


@each(("bits", "group"), [(2, 32), (4, 32), (2, 64), (4, 128), (8, 32)])
def test_bytes_are_what_the_paper_counts(bits, group):
    """b + 32 / G bits per number in half precision; twice the scale bytes in float32."""
    x = random(7, 256, seed=1)
    for dtype, scale_bits in ((torch.float16, 32), (torch.float32, 64)):
        packed = quantise(x.to(dtype), bits, group)
        stored = sum(part.numel() * part.element_size() for part in packed.parts)
        assert stored * 8 == x.numel() * (bits + scale_bits / group)


def test_eight_bits_are_one_byte_a_number():
    packed = quantise(torch.tensor([[0.0, 255.0, 7.4, 128.6]]), 8, 4)
    assert packed.data.tolist() == [[0, 255, 7, 129]] and dequantise(packed).tolist() == [[0.0, 255.0, 7.0, 129.0]]


def test_a_group_can_be_read_without_its_neighbours():
    """Whole bytes per group: a store may append and slice groups freely."""
    x = random(3, 64, seed=2)
    packed = quantise(x, 2, 8)
    third = Packed(packed.data[:, 4:6], packed.scale[:, 2:3], packed.zero[:, 2:3], 2)
    assert torch.equal(dequantise(third), dequantise(packed)[:, 16:24])


def test_what_cannot_be_packed_is_refused():
    x = random(2, 12)
    for bits, group, words in ((3, 4, "2, 4, 8"), (2, 6, "multiples of 4"), (4, 0, "multiples of 2"), (2, 8, "divide")):
        with pytest.raises(ConfigError, match=words):
            quantise(x, bits, group)
