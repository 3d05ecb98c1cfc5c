"""An observation holds what was asked for, whatever the chunks, and refuses the rest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.observation import Chunk, Needs, effective_window
from tests.compression import oracles

EVERYTHING = Needs(tail_queries=9, query_moments=True, hidden_moments=True, hidden_scalars=True, column_sums=True)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 80),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    cuts=st.lists(st.integers(1, 79), max_size=6),
    seed=st.integers(0, 10**6),
)
def test_every_statistic_equals_its_definition_in_any_chunking(length, kv_heads, group, cuts, seed):
    layer = oracles.make_layer(length, kv_heads, group, seed=seed)
    obs = layer.observe(EVERYTHING, cuts)
    query = layer.query.float()
    assert obs.length == length and obs.groups == group and obs.hidden_size == layer.hidden.shape[1]
    assert torch.equal(obs.key, layer.key.float()) and torch.equal(obs.value, layer.value.float())
    w = min(9, length)
    assert torch.equal(obs.tail(9), query[:, -w:])
    assert torch.allclose(
        obs.window_mass(w).double(), oracles.window_mass(query, layer.key, layer.scaling, w), rtol=5e-6
    )
    assert torch.allclose(
        obs.last_attention().double(), oracles.window_mass(query, layer.key, layer.scaling, 1), rtol=5e-6
    )
    assert torch.allclose(obs.column_sums.double(), oracles.column_sums(query, layer.key, layer.scaling), rtol=5e-6)
    hidden = layer.hidden
    assert torch.allclose(obs.hidden_mean.double(), hidden.mean(0), rtol=1e-6, atol=1e-7)
    assert torch.allclose(obs.hidden_std.double(), hidden.std(0, correction=0), rtol=1e-5, atol=1e-6)
    mean, std = obs.hidden_scalar_moments
    assert float(mean) == pytest.approx(float(hidden.mean()), rel=1e-5, abs=1e-7)
    assert float(std) == pytest.approx(float(hidden.std(correction=0)), rel=1e-5)
    if length <= 4:
        with pytest.raises(ValueError, match="no rows"):
            _ = obs.query_covariance
    else:
        pre = layer.project(hidden)[:, 4:]
        centred = pre - pre.mean(1, keepdim=True)
        assert torch.allclose(obs.query_mean, pre.mean(1), atol=2e-6)
        assert torch.allclose(obs.query_covariance, centred.transpose(1, 2) @ centred / (length - 4), atol=5e-6)


def test_future_queries_stand_behind_the_last_token():
    layer = oracles.make_layer(11, 2, 2)
    obs = layer.observe(Needs())
    states = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    want = oracles.turn(layer.project(states.double()), torch.tensor([11, 12, 40]))
    assert torch.allclose(obs.future_queries(states, torch.tensor([1, 2, 30])).double(), want, atol=1e-5)


def test_projection_runs_in_the_models_dtype():
    layer = oracles.make_layer(8, 1, 1)
    seen = []
    obs = layer.observe(Needs(), dtype=torch.bfloat16)
    obs._project_query = lambda hidden: seen.append(hidden.dtype) or torch.zeros(1, hidden.shape[0], 8)
    assert obs.future_queries(torch.zeros(2, 12), torch.tensor([1, 2])).dtype == torch.float32
    assert seen == [torch.bfloat16]


def test_needs_unite_to_the_larger_window_and_either_flag():
    a, b = Needs(tail_queries=4, hidden_moments=True), Needs(tail_queries=32, column_sums=True)
    assert a | b == b | a == Needs(tail_queries=32, hidden_moments=True, column_sums=True)
    assert Needs() | a == a
    assert Needs(query_moments=True) | Needs(hidden_scalars=True) == Needs(query_moments=True, hidden_scalars=True)


def test_a_longer_tail_than_declared_raises():
    obs = oracles.make_layer(6, 1, 1).observe(Needs(tail_queries=1))
    for read in (obs.tail, obs.window_mass):
        with pytest.raises(RuntimeError, match="tail_queries >= 3 but its `needs` does not declare"):
            read(3)


def test_reading_before_the_last_chunk_raises():
    layer = oracles.make_layer(6, 1, 1)
    obs = layer.observe(EVERYTHING)
    obs.length = 7
    for read in (lambda: obs.key, lambda: obs.tail(1), lambda: obs.hidden_mean, lambda: obs.column_sums):
        with pytest.raises(RuntimeError, match="6 of 7 prompt tokens observed"):
            read()


def test_a_repeated_or_missing_chunk_raises():
    layer = oracles.make_layer(6, 1, 1)
    obs = layer.observe(Needs())
    chunk = Chunk(layer.query.float()[:, 3:], layer.key.float(), layer.value.float(), layer.hidden[3:], *([None] * 2))
    with pytest.raises(RuntimeError, match="feed every prefill chunk once"):
        obs.observe(chunk)


def test_random_streams_depend_on_seed_sample_layer_and_method_only():
    layer = oracles.make_layer(6, 1, 1)

    def draw(*salt, layer_index=0, identity="a", busy=False):
        obs = layer.observe(Needs(), layer=layer_index, identity=identity)
        if busy:
            torch.rand(100)
            torch.rand(7, generator=obs.generator("other", 5))
        return torch.rand(4, generator=obs.generator(*salt)).tolist()

    first = draw("m", 0)
    assert draw("m", 0, busy=True) == first
    others = [
        draw("m", 1),
        draw("n", 0),
        draw("m", 0, layer_index=1),
        draw("m", 0, identity="b"),
        draw("m0"),
        draw("m", "0", 0),
    ]
    assert first not in others and len({tuple(o) for o in others}) == len(others)


def test_long_chunks_are_taken_in_blocks_of_rows():
    layer = oracles.make_layer(2500, 1, 2, seed=9)
    obs = layer.observe(Needs(query_moments=True, hidden_moments=True), cuts=[3])
    pre = layer.project(layer.hidden)[:, 4:]
    centred = pre - pre.mean(1, keepdim=True)
    assert torch.allclose(obs.query_covariance, centred.transpose(1, 2) @ centred / 2496, atol=5e-6)
    assert torch.allclose(obs.hidden_std.double(), layer.hidden.std(0, correction=0), rtol=1e-5)


def test_a_memo_is_made_once():
    obs = oracles.make_layer(6, 1, 1).observe(Needs(tail_queries=2))
    made = []
    for _ in range(3):
        obs.memo("x", lambda: made.append(1) or torch.zeros(1))
    assert made == [1]
    obs.window_mass(2).zero_()  # what one method writes to, no other reads
    assert obs.window_mass(2).sum() > 0


def test_the_tail_does_not_keep_the_whole_query_alive():
    obs = oracles.make_layer(60, 1, 2).observe(Needs(tail_queries=3))
    assert obs.tail(3).untyped_storage().nbytes() == 2 * 3 * 8 * 4


def test_effective_window_spends_at_most_half_the_budget():
    assert [effective_window(32, c, 100) for c in (1, 2, 3, 4, 63, 64, 500)] == [1, 1, 1, 2, 31, 32, 32]
    assert effective_window(32, 64, 5) == 5
