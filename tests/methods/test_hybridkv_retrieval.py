"""Chunk retrieval against float64 attention over the tokens that the oracle reads at each step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.allocators.hybrid import HeadClasses
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.base import Start
from mmkv_bench.compression.decoding.retrieval import ChunkRetrieval
from mmkv_bench.compression.decoding.retrieval_layer import RetrievalLayer
from mmkv_bench.errors import UnsupportedError
from tests.each import each
from tests.oracles import hybridkv as oracle


def begin(n, heads, dynamic, entries, seed=0, pad=0, partial="ranked", chunk=8, dim=8, dtype=torch.float32, reserve=16):
    """A layer whose dynamic heads may read `entries` each and whose static heads keep the last `entries`."""
    g = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(heads, n, dim, generator=g).to(dtype) for _ in range(2))
    index = torch.arange(n - entries, n).expand(heads, -1)
    wide = index.unsqueeze(-1).expand(-1, -1, dim)
    rows = {0: torch.tensor([0.0 if h in dynamic else 1.0 for h in range(heads)], dtype=torch.float64)}
    start = Start(
        layer=0,
        n_layers=1,
        key=key,
        value=value,
        index=index,
        kept_key=key.gather(1, wide),
        kept_value=value.gather(1, wide),
        scores=None,
        context=Context(entries, n, summaries=rows),
        pad=pad,
        seen=pad + n,
        acts_from=pad + n,
        scaling=0.3,
        reserve=reserve,
    )
    return key, value, ChunkRetrieval(HeadClasses(0.5), chunk, partial).layer(start)


def step(layer: RetrievalLayer, query, new_key, new_value):
    """What a forward pass of m tokens does: append, attend causally, float64 softmax over what the layer shows."""
    heads, rows = new_key.shape[0], new_key.shape[1]
    key, value = layer.update(new_key[None], new_value[None])
    mask = torch.ones(rows, layer.seen, dtype=torch.bool).tril_(layer.seen - rows)[None, None]
    key, value, shown = layer.attend(query[None], key, value, mask)
    key, value = (x[0].double().repeat_interleave(query.shape[0] // heads, 0) for x in (key, value))
    shown = shown[0].repeat_interleave(query.shape[0] // shown.shape[1], 0)
    scores = (query.double() @ key.transpose(1, 2) * 0.3).masked_fill(~shown, float("-inf"))
    return scores.softmax(-1) @ value


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 90),
    share=st.floats(0, 1),
    group=st.sampled_from([1, 3]),
    dynamic=st.sampled_from([{0}, {1}, {0, 2}, {0, 1, 2}, set()]),
    partial=st.sampled_from(["ranked", "visible"]),
    pad=st.sampled_from([0, 3]),
    seed=st.integers(0, 10**6),
)
def test_each_step_attends_to_the_chunks_that_its_query_chooses(n, share, group, dynamic, partial, pad, seed):
    entries = int(share * n)
    entries = entries if entries < 8 or entries == n else entries - entries % 8
    key, value, layer = begin(n, 3, dynamic, entries, seed, pad, partial)
    g = torch.Generator().manual_seed(seed + 1)
    appended_key, appended_value = torch.zeros(3, 0, 8), torch.zeros(3, 0, 8)
    for rows in (1, 4, 1, 1):  # a block of several tokens in between
        query = torch.randn(3 * group, rows, 8, generator=g)
        new_key, new_value = (torch.randn(3, rows, 8, generator=g) for _ in range(2))
        got = step(layer, query, new_key, new_value)
        appended_key, appended_value = torch.cat([appended_key, new_key], 1), torch.cat([appended_value, new_value], 1)
        before = appended_key.shape[1] - rows
        positions = layer.slot_positions()[0]
        for h in range(3):
            own = query[h * group : (h + 1) * group]
            read = oracle.chunks(own, key[h], entries, 8, partial) if h in dynamic else list(range(n - entries, n))
            assert len(read) <= entries
            # the device holds these and the appended tokens, at their logical positions, and nothing else
            stored = [p for p in positions[h].tolist() if p >= 0]
            assert stored == [j + pad for j in read] + [n + pad + j for j in range(before + rows)]
            for member in range(group):
                for i in range(rows):
                    k = torch.cat([key[h, read], appended_key[h, : before + i + 1]]).double()
                    v = torch.cat([value[h, read], appended_value[h, : before + i + 1]]).double()
                    want = torch.softmax(own[member, i].double() @ k.T * 0.3, 0) @ v
                    assert (got[h * group + member, i] - want).abs().max() <= 2e-6


@each("n", [1, 7, 8, 9, 64, 65])
@each("partial", ["ranked", "visible"])
def test_all_chunks_are_the_full_cache(n, partial):
    key, value, layer = begin(n, 2, {0, 1}, n, partial=partial)
    g = torch.Generator().manual_seed(9)
    for _ in range(3):
        query, new = torch.randn(4, 1, 8, generator=g), torch.randn(2, 1, 8, generator=g)
        key, value = torch.cat([key, new], 1), torch.cat([value, new], 1)
        got = step(layer, query, new, new)
        k, v = (x.double().repeat_interleave(2, 0) for x in (key, value))
        want = (query.double() @ k.transpose(1, 2) * 0.3).softmax(-1) @ v
        assert (got - want).abs().max() <= 2e-6
        assert torch.equal(layer.keys[0], key) and torch.equal(layer.values[0], value)


def test_equal_chunks_are_taken_from_the_first():
    _, _, layer = begin(64, 1, {0}, 16)
    layer.pages.means.fill_(1.0)
    assert layer.pages.best_chunks(torch.ones(1, 8), False).tolist() == [[0, 1]]


def test_an_incomplete_chunk_counts_by_the_mean_of_what_exists():
    key = torch.zeros(1, 10, 4)
    key[0, 8:, 0], key[0, :8, 0] = 3.0, 2.0  # padded with zeros the last chunk's mean would be 0.75
    index = torch.arange(2, 10)[None]
    context = Context(8, 10, summaries={0: torch.zeros(1, dtype=torch.float64)})
    start = Start(0, 1, key, key, index, key[:, 2:], key[:, 2:], None, context, 0, 10, 10, 1.0, 4)
    layer = ChunkRetrieval().layer(start)
    assert layer.pages.means[0, :, 0].tolist() == [2.0, 3.0]
    query = torch.tensor([[1.0, 0, 0, 0]])
    assert layer.pages.best_chunks(query, False).tolist() == [[1]]
    assert layer.pages.best_chunks(-query, False).tolist() == [[0]]
    assert layer.pages.best_chunks(-query, True).tolist() == [[1]]  # partial=visible
    pages = layer.pages.keys.view(1, 2, 8, 4)
    assert torch.equal(pages[0, 1, :, 0], torch.full((8,), 3.0))


def test_bytes_and_entries_are_those_of_the_tensors():
    _, _, layer = begin(100, 3, {0, 2}, 16, dim=8)
    assert layer.entries().tolist() == [[16, 16, 16]] and layer.reachable().tolist() == [[100, 16, 100]]
    slot = 2 * 8 * 4
    # 13 chunks of 8 for two heads, and a buffer of two chunks per head; 13 mean keys per head and int32 positions
    assert layer.host_nbytes() == 2 * 13 * 8 * slot + 2 * 16 * slot
    assert layer.nbytes() == (3 * 16 * slot, 3 * 16 * 4 + 2 * 13 * 8 * 4)
    step(layer, torch.randn(3, 1, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8))
    assert layer.reachable().tolist() == [[101, 17, 101]] and int(layer.entries().max()) <= 17
    assert layer.nbytes() == (3 * 17 * slot, 3 * 17 * 4 + 2 * 13 * 8 * 4)
    _, _, still = begin(100, 3, set(), 16)
    assert still.host_nbytes() == 0 and torch.equal(still.reachable(), still.entries())


def test_nothing_of_the_full_cache_stays_on_the_device():
    """Tensors that the layer holds, found by walking its attributes, are those that it counts (slack aside)."""
    key, value, layer = begin(200, 2, {0}, 16, reserve=0)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(layer)}
    assert key.data_ptr() not in held and value.data_ptr() not in held
    assert sum(held.values()) == sum(layer.nbytes()) + layer.host_nbytes() + layer.heads.nbytes


def tensors(thing):
    for value in list(vars(thing).values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list):
            yield from (v for v in value if isinstance(v, torch.Tensor))
        elif hasattr(value, "__dict__") and type(value).__module__.startswith("mmkv_bench"):
            yield from tensors(value)


def test_half_precision_chooses_the_chunks_of_its_rounded_keys():
    key, _, layer = begin(61, 2, {0, 1}, 16, dtype=torch.bfloat16)
    query = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    step(layer, query, *(torch.zeros(2, 1, 8, dtype=torch.bfloat16) for _ in range(2)))
    rounded = [torch.stack([page.float().mean(0).bfloat16() for page in key[h].split(8)]) for h in range(2)]
    for h in range(2):
        scores = (rounded[h].double() @ query[h, 0].double()).tolist()
        best = sorted(sorted(range(8), key=lambda c: (-scores[c], c))[:2])
        want = [j for c in best for j in range(8 * c, min(8 * c + 8, 61))]
        assert [p for p in layer.slot_positions()[0, h].tolist() if 0 <= p < 61] == want


def test_one_sequence_only():
    _, _, layer = begin(30, 2, {0}, 8)
    with pytest.raises(UnsupportedError, match="one sequence"):
        layer.batch_repeat_interleave(2)
