"""Promises of the compressed cache: storage that stays in place, and every operation equal to an obvious version."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmkv_bench.compression.cache import CompressedCache, CompressedLayer
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.errors import UnsupportedError
from tests.each import each

B, H, D = 2, 3, 4
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 10**6)


def entries(tokens: int, seed: int = 0, batch: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, H, tokens, D, generator=generator) for _ in range(2))


def ragged_index(length: int, seed: int, batch: int = B, most: int | None = None) -> Tensor:
    """Random ascending slots per head, of different counts, left-padded with -1: `[B, H, widest]`."""
    generator = torch.Generator().manual_seed(seed)
    most = length if most is None else most
    chosen = [
        torch.randperm(length, generator=generator)[: int(torch.randint(0, most + 1, (1,), generator=generator))]
        .sort()
        .values
        for _ in range(batch * H)
    ]
    width = max(len(one) for one in chosen)
    padded = [torch.nn.functional.pad(one, (width - len(one), 0), value=-1) for one in chosen]
    return torch.stack(padded).view(batch, H, width)


class Naive:
    """Per row and head a list of (position, key, value); nothing is clever."""

    def __init__(self, key: Tensor, value: Tensor):
        rows, heads, tokens = key.shape[:3]
        self.seen = tokens
        self.slots = [
            [[(t, key[b, h, t], value[b, h, t]) for t in range(tokens)] for h in range(heads)] for b in range(rows)
        ]

    def retain(self, index: Tensor, forget: int = 0) -> None:
        self.slots = [
            [[head[i] for i in index[b, h].tolist() if i >= 0] for h, head in enumerate(row)]
            for b, row in enumerate(self.slots)
        ]
        self.seen -= forget

    def append(self, key: Tensor, value: Tensor) -> None:
        for b, row in enumerate(self.slots):
            for h, head in enumerate(row):
                head += [(self.seen + t, key[b, h, t], value[b, h, t]) for t in range(key.shape[2])]
        self.seen += key.shape[2]

    def attend(self, query: Tensor) -> Tensor:
        """`[B, Hq, 1, D]` -> `[B, Hq, 1, D]`: softmax attention of one query to every entry of its head."""
        groups = query.shape[1] // len(self.slots[0])
        out = torch.zeros_like(query)
        for b, row in enumerate(self.slots):
            for h in range(query.shape[1]):
                head = row[h // groups]
                keys, values = (torch.stack([slot[i] for slot in head]) for i in (1, 2))
                weights = torch.softmax(query[b, h] @ keys.T * D**-0.5, -1)
                out[b, h] = weights @ values
        return out


def assert_holds(layer: CompressedLayer, naive: Naive) -> None:
    """The layer stores exactly the naive version's entries, right-aligned."""
    assert layer.seen == naive.seen
    positions = layer.slot_positions()
    counts = layer.entries()
    for b, row in enumerate(naive.slots):
        for h, head in enumerate(row):
            assert int(counts[b, h]) == len(head)
            padding = layer.stored - len(head)
            assert positions[b, h, :padding].eq(-1).all()
            assert positions[b, h, padding:].tolist() == [slot[0] for slot in head]
            for i, (_, key, value) in enumerate(head):
                assert torch.equal(layer.keys[b, h, padding + i], key)
                assert torch.equal(layer.values[b, h, padding + i], value)


def attend(layer: CompressedLayer, query: Tensor, mask: Tensor | None = None) -> Tensor:
    """What the registered attention function does: stock attention over the stored slots under the mapped mask."""
    groups = query.shape[1] // H
    key, value = (t.repeat_interleave(groups, 1) for t in (layer.keys, layer.values))
    mask = layer.visible(query, mask)
    mask = mask.repeat_interleave(groups, 1) if mask is not None and mask.shape[1] == H else mask
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)


# ------------------------------------------------------------------ storage
def storage(layer: CompressedLayer) -> tuple[int, ...]:
    tensors = (layer._key_storage, layer._value_storage, layer._position_storage)
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def test_append_within_the_reserve_never_moves_storage():
    made = []
    plain = CompressedLayer(reserve=20)
    plain.update(*entries(7))
    retained = CompressedLayer(reserve=3)
    retained.update(*entries(7))
    retained.retain(torch.arange(5).expand(B, H, -1), Evict().reduce, reserve=20)
    rows = [(key, value, torch.arange(6).expand(H, -1)) for key, value in zip(*entries(6), strict=True)]
    made += [plain, retained, CompressedLayer.from_rows(rows, 6, 20)]
    for layer in made:
        before, growths = storage(layer), layer.growths
        for step in range(20):
            keys, values = layer.update(*entries(1, step))
            assert keys.data_ptr() == before[0] and values.data_ptr() == before[1], "what is returned is a view"
        assert storage(layer) == before and layer.growths == growths == 0
        layer.update(*entries(1))
        assert storage(layer) != before and layer.growths == 1


@PROPERTY
@given(st.integers(1, 40), st.integers(0, 3), st.integers(50, 300))
def test_growth_is_amortised(prompt, reserve, steps):
    """Slots copied by all growths together stay below a small multiple of the slots that are stored in the end."""
    layer = CompressedLayer(reserve=reserve)
    layer.update(*entries(prompt, batch=1))
    copied = growths = 0
    for step in range(steps):
        before = layer.growths
        stored = layer.stored
        layer.update(*entries(1, step, batch=1))
        copied += stored * (layer.growths - before)
        growths += layer.growths - before
    assert copied <= 6 * layer.stored + 40
    assert growths <= 20 + steps // 8


def test_append_writes_only_new_slots():
    layer = CompressedLayer(reserve=30)
    layer.update(*entries(9))
    kept = layer.keys.clone(), layer.values.clone()
    layer.update(*entries(4, 1))
    assert torch.equal(layer.keys[:, :, :9], kept[0]) and torch.equal(layer.values[:, :, :9], kept[1])
    assert torch.equal(layer.keys[:, :, 9:], entries(4, 1)[0])


def test_storage_cannot_be_assigned_from_outside():
    layer = CompressedLayer()
    layer.update(*entries(2))
    for name in ("keys", "values"):
        with pytest.raises(AttributeError, match="update"):
            setattr(layer, name, entries(2)[0])


def test_cropping_is_refused():
    layer = CompressedLayer()
    layer.update(*entries(3))
    with pytest.raises(UnsupportedError, match="cropped"):
        layer.crop(1)


# ------------------------------------------------------------------ operations against the naive version
@PROPERTY
@given(seeds, st.integers(1, 12), st.lists(st.integers(1, 4), max_size=4), st.booleans(), st.integers(0, 6))
def test_retain_and_append_equal_the_naive_version(seed, prompt, appended, strict, reserve):
    key, value = entries(prompt, seed)
    layer, naive = CompressedLayer(reserve), Naive(key, value)
    layer.update(key, value)
    candidates = prompt - int(strict)
    index = ragged_index(candidates, seed) if candidates else torch.empty(B, H, 0, dtype=torch.int64)
    layer.retain(index, Evict().reduce, forget=int(strict))
    naive.retain(index, int(strict))
    assert_holds(layer, naive)
    for step, tokens in enumerate(appended):
        fresh = entries(tokens, seed + step)
        layer.update(*fresh)
        naive.append(*fresh)
        assert_holds(layer, naive)
    if appended:
        query = torch.randn(B, 2 * H, 1, D, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(attend(layer, query), naive.attend(query), atol=1e-6)
        again = ragged_index(layer.stored, seed + 7)  # names padding slots too, which are no entries
        padding = layer.stored - layer.entries()
        layer.retain(again, Evict().reduce)
        slots = torch.where(again >= padding[..., None], again - padding[..., None], -1)
        naive.retain(slots)
        assert torch.equal(layer.entries(), (slots >= 0).sum(-1))
        assert layer.ragged == bool((layer.positions < 0).any())
        fresh = entries(1, seed + 9)
        layer.update(*fresh)
        naive.append(*fresh)
        assert torch.allclose(attend(layer, query), naive.attend(query), atol=1e-6)


@PROPERTY
@given(seeds, st.integers(1, 9), st.integers(1, 4))
def test_forgetting_the_last_equals_the_naive_version_and_the_slot_is_written_again(seed, prompt, tokens):
    key, value = entries(prompt, seed)
    layer, naive = CompressedLayer(8), Naive(key, value)
    layer.update(key, value)
    layer.forget(1)
    naive.retain(torch.arange(prompt - 1).expand(B, H, -1), forget=1)
    assert_holds(layer, naive)
    fresh = entries(tokens, seed + 1)
    layer.update(*fresh)
    naive.append(*fresh)
    assert_holds(layer, naive)


@PROPERTY
@given(seeds, st.integers(1, 12), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 5))
def test_rows_of_several_forks_equal_each_fork_alone(seed, prompt, widths, tokens):
    key, value = entries(prompt, seed, batch=1)
    rows, alone = [], []
    for number, width in enumerate(widths):
        index = ragged_index(prompt, seed + number, batch=1, most=min(width, prompt))
        reduced = Evict().reduce(key[0], value[0], index[0])
        rows.append((*reduced, index[0]))
        naive = Naive(key, value)
        naive.retain(index)
        alone.append(naive)
    together = CompressedLayer.from_rows(rows, prompt, tokens)
    assert together.capacity == together.stored + tokens
    joined = Naive(key, value)
    joined.slots = [naive.slots[0] for naive in alone]
    assert_holds(together, joined)
    for step in range(tokens):
        fresh = entries(1, seed + step, batch=len(widths))
        together.update(*fresh)
        joined.append(*fresh)
    assert_holds(together, joined)
    assert together.growths == 0
    query = torch.randn(len(widths), 2 * H, 1, D, generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(attend(together, query), joined.attend(query), atol=1e-6)


@PROPERTY
@given(seeds, st.integers(2, 10), st.integers(1, 4), st.booleans())
def test_visible_maps_the_logical_mask_of_every_query_and_kv_head(seed, prompt, queries, additive):
    layer = CompressedLayer(8)
    layer.update(*entries(prompt, seed))
    index = ragged_index(prompt, seed)
    layer.retain(index, Evict().reduce)
    layer.update(*entries(queries, seed + 1))
    total = prompt + queries
    logical = torch.rand(B, 1, queries, total, generator=torch.Generator().manual_seed(seed)) < 0.6
    given_mask = (
        torch.zeros(logical.shape).masked_fill(~logical, torch.finfo(torch.float32).min) if additive else logical
    )
    query = torch.zeros(B, 2 * H, queries, D)
    mapped = layer.visible(query, given_mask)
    assert mapped.shape == (B, H, queries, layer.stored) and mapped.dtype == given_mask.dtype
    seen = mapped if mapped.dtype == torch.bool else mapped > torch.finfo(torch.float32).min / 2
    positions = layer.slot_positions()
    for b in range(B):
        for h in range(H):
            for slot, position in enumerate(positions[b, h].tolist()):
                expected = logical[b, 0, :, position] if position >= 0 else torch.zeros(queries, dtype=torch.bool)
                assert torch.equal(seen[b, h, :, slot], expected)


def test_a_mask_for_all_rows_serves_every_row():
    layer = CompressedLayer(8)
    layer.update(*entries(6))
    layer.retain(ragged_index(6, 1), Evict().reduce)
    layer.update(*entries(2, 1))
    one = torch.ones(1, 1, 2, 8, dtype=torch.bool).tril(6)
    query = torch.zeros(B, H, 2, D)
    assert torch.equal(layer.visible(query, one), layer.visible(query, one.expand(B, -1, -1, -1)))


def test_no_mask_stays_no_mask_where_every_slot_is_visible():
    """So that the stock kernel runs exactly as without compression."""
    layer, query = CompressedLayer(4), torch.zeros(B, H, 1, D)
    layer.update(*entries(5))
    assert layer.visible(query, None) is None
    mask = torch.ones(B, 1, 1, 5, dtype=torch.bool)
    assert layer.visible(query, mask) is mask
    layer.retain(torch.arange(1, 4).expand(B, H, -1), Evict().reduce)
    assert layer.visible(query, None) is None and not layer.ragged
    with pytest.raises(UnsupportedError, match="several query tokens"):
        ragged = CompressedLayer(4)
        ragged.update(*entries(5))
        ragged.retain(ragged_index(5, 3), Evict().reduce)
        ragged.visible(torch.zeros(B, H, 2, D), None)


@each("make", ("retain", "from_rows"))
def test_nan_never_leaks_from_padding_or_slack(make):
    """NaN in every slot that holds no entry (and in the memory that storage is cut from) reaches no output."""
    poison = [torch.full((1 << 14,), float("nan")) for _ in range(8)]
    del poison  # fresh allocations may now find NaN in them
    key, value = entries(9, 3)
    index = ragged_index(9, 4)
    assert (index < 0).any() and (index[..., -1] >= 0).all()
    if make == "retain":
        layer = CompressedLayer(5)
        layer.update(key, value)
        layer.retain(index, Evict().reduce)
    else:
        rows = [(*Evict().reduce(key[b], value[b], index[b]), index[b]) for b in range(B)]
        layer = CompressedLayer.from_rows(rows, 9, 5)
    assert layer.keys[layer.positions < 0].eq(0).all() and layer.values[layer.positions < 0].eq(0).all()
    layer._key_storage[:, :, layer.stored :] = float("nan")
    layer._value_storage[:, :, layer.stored :] = float("nan")
    naive = Naive(key, value)
    naive.retain(index)
    for step in range(5):
        fresh = entries(1, step)
        layer.update(*fresh)
        naive.append(*fresh)
        query = torch.randn(B, 2 * H, 1, D, generator=torch.Generator().manual_seed(step))
        assert torch.allclose(attend(layer, query), naive.attend(query), atol=1e-6)


# ------------------------------------------------------------------ rows, sizes, the whole cache
def test_rows_can_be_repeated_selected_and_reordered():
    def made():
        layer = CompressedLayer(3)
        layer.update(*entries(6))
        layer.retain(ragged_index(6, 2), Evict().reduce)
        return layer

    reference, repeated, selected, reordered = made(), made(), made(), made()
    repeated.batch_repeat_interleave(2)
    selected.batch_select_indices(torch.tensor([1]))
    reordered.reorder_cache(torch.tensor([1, 0]))
    for layer, rows in ((repeated, [0, 0, 1, 1]), (selected, [1]), (reordered, [1, 0])):
        assert torch.equal(layer.keys, reference.keys[rows]) and torch.equal(layer.values, reference.values[rows])
        assert torch.equal(layer.positions, reference.positions[rows])


def test_bytes_and_entries_are_those_of_the_stored_tensors():
    layer = CompressedLayer(50)
    assert layer.nbytes() == (0, 0)
    layer.update(*entries(6))
    assert layer.nbytes() == (2 * B * H * 6 * D * 4, 0)
    assert layer.entries().tolist() == [[6] * H] * B
    layer.retain(index := ragged_index(6, 2), Evict().reduce)
    width = index.shape[2]
    assert layer.nbytes() == (2 * B * H * width * D * 4, B * H * width * 4)
    assert torch.equal(layer.entries(), (index >= 0).sum(-1))
    layer.reset()
    assert layer.nbytes() == (0, 0) and layer.seen == 0 and layer.capacity == 0


def test_a_cache_reports_logical_lengths_and_sizes_to_masks():
    cache = CompressedCache(2)
    for layer in range(2):
        cache.update(*entries(8), layer)
    cache.layers[0].retain(ragged_index(8, 1), Evict().reduce)
    assert cache.get_seq_length() == 8 and cache.get_mask_sizes(3, 0) == (11, 0)
    assert not cache.is_compileable
