"""MEDA's figures: entropies of attention between text and image, and of the full causal rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.allocators.entropy import Entropy
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.numerics.entropy import causal_entropy, cross_modal_entropy, map_entropy
from mmkv_bench.devices import Device
from tests.compression import oracles
from tests.each import each
from tests.oracles import meda

few = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
shapes = st.sampled_from([(1, 1), (2, 3), (3, 1)])


def mixed(length: int) -> list[int]:
    """Text, an image, text, a video, text."""
    part = max(1, length // 5)
    return ([0] * part + [1] * part + [0] * part + [2] * part + [0] * length)[:length]


@few
@given(shape=shapes, length=st.integers(2, 50), seed=st.integers(0, 10**6), cut=st.integers(1, 49))
def test_summaries_are_the_papers_entropies(shape, length, seed, cut):
    layer, types = oracles.make_layer(length, *shape, seed=seed), mixed(length)
    for kind in ("cross_modal", "full"):
        allocator = Entropy(entropy=kind)
        obs = layer.observe(allocator.needs, [cut])
        obs.token_types = torch.tensor(types)
        got = allocator.summary(obs, 4, 0)
        query = layer.query.float()
        if kind == "full":
            want = meda.full_rows(query, layer.key, layer.scaling)
        else:
            want = meda.cross_modal(query, layer.key, layer.scaling, types)
        assert got.shape == (1,) and got.dtype == torch.float64 and got.device.type == "cpu"
        assert float(got) == pytest.approx(want, rel=2e-5, abs=2e-6)


@pytest.mark.slow
def test_entropies_of_300_tokens_in_several_blocks(monkeypatch):

    layer = oracles.make_layer(300, 2, 2, seed=4)
    query, key, types = layer.query.float(), layer.key.float(), torch.tensor(mixed(300))
    whole = (cross_modal_entropy(query, key, 0.4, types), causal_entropy(query, key, 0.4))
    monkeypatch.setattr(Device, "tile", 4000)
    blocks = (cross_modal_entropy(query, key, 0.4, types), causal_entropy(query, key, 0.4))
    assert blocks == pytest.approx(whole, rel=1e-6)
    assert whole[1] == pytest.approx(meda.full_rows(query, key, 0.4), rel=1e-5)


@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_uniform_attention_over_m_keys_has_entropy_log_m(dtype):
    query = torch.randn(4, 11, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    key = torch.ones(2, 11, 8, dtype=dtype)
    types = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 2, 2, 0])
    assert cross_modal_entropy(query, key, 1.0, types) == pytest.approx(math.log(7) + math.log(4), rel=1e-6)
    assert causal_entropy(query, key, 1.0) == pytest.approx(math.log(math.factorial(11)) / 11, rel=1e-6)


def test_maps_are_averaged_over_heads_before_the_entropy_and_heads_are_not():
    """Two heads, each sure of another key: their mean map is undecided, they themselves are not."""
    key = torch.tensor([[[1.0, 0], [0, 1]]])
    query = torch.tensor([[[1.0, 0]], [[0, 1.0]]])
    assert map_entropy(query, key, 200.0) == pytest.approx(math.log(2))
    assert causal_entropy(query.expand(-1, 2, -1), key, 200.0) == pytest.approx(0, abs=1e-12)


@each("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_vanishing_probabilities_gives_no_nan(dtype):
    g = torch.Generator().manual_seed(2)
    query, key = (torch.randn(2, 64, 8, generator=g) * 30 for _ in range(2))
    for made in (query.to(dtype), key.to(dtype)):
        assert torch.isfinite(made).all()
    found = cross_modal_entropy(query.to(dtype), key.to(dtype), 8**-0.5, torch.tensor(mixed(64)))
    full = causal_entropy(query.to(dtype), key.to(dtype), 8**-0.5)
    assert 0 <= found < 2 * math.log(64) and 0 <= full < math.log(64)


def test_entropies_hold_tiles_and_nothing_of_the_prompts_square():
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4000, 8, generator=g), torch.randn(1, 4000, 8, generator=g)
    types = torch.tensor(mixed(4000))
    for work in (lambda: cross_modal_entropy(query, key, 0.3, types), lambda: causal_entropy(query, key, 0.3)):
        peak = oracles.allocator_peak(work)
        assert peak < 25e6, f"{peak} bytes; one head's map is {4000 * 4000 * 4}"


def test_one_modality_has_no_map():
    layer, allocator = oracles.make_layer(12, 2, 1), Entropy()
    for types, names in (
        ([0] * 12, ("no_visual_tokens",)),
        ([1] * 12, ("single_modality",)),
        (None, ("no_visual_tokens",)),
    ):
        obs = layer.observe(allocator.needs)
        obs.token_types = None if types is None else torch.tensor(types)
        summaries = {i: allocator.summary(obs, 5, 0) for i in range(3)}
        caps = allocator.caps([torch.zeros(2, 12)] * 3, 5, range(3), 3, Context(5, 12, summaries=summaries))
        assert [c.tolist() for c in caps] == [[5, 5]] * 3
        assert allocator.fallbacks(5, 12, obs.token_types) == names
        assert Entropy(entropy="full").fallbacks(5, 12, obs.token_types) == ()
        assert Entropy(dynamic=False).fallbacks(5, 12, obs.token_types) == ()
    assert allocator.fallbacks(5, 12, torch.tensor(mixed(12))) == ()
    with pytest.raises(ValueError, match="needs text and visual tokens"):
        cross_modal_entropy(layer.query, layer.key, 1.0, torch.ones(12, dtype=torch.int64))
