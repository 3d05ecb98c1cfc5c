"""Promise: decoding on a compressed cache equals full attention in which the evicted entries are masked, <= 2e-6."""

from __future__ import annotations

import torch

from mmkv_bench.compression.session import attach
from tests import cover, reference, zoo
from tests.core import parts

TOLERANCE = 2e-6


def _compare(run, masked):
    assert (run.logits - masked.logits).abs().max() <= TOLERANCE
    assert torch.equal(run.tokens, masked.tokens)


@cover.cases(zoo.ALL, parts.BUDGETS, ("sdpa", "eager"), keep=4)
def test_eviction_equals_masked_full_attention(name, combinations):
    for kind, attention in combinations:
        with cover.case(kind, attention):
            stock, model, inputs = reference.stock(name, attention), zoo.model(name, attention), zoo.prompt(name)
            length = inputs["input_ids"].shape[1]
            with attach(model, parts.compressor(kind), budget=parts.budget(length // 4)) as session:
                run = reference.generate(model, inputs, 6)
                kept = session.kept()
            masked = reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 6)
            _compare(run, masked)
            assert torch.equal(run.logits[0], stock.logits[0]), "the first token comes from the full prefill"
            assert (run.logits[1] - stock.logits[1]).abs().max() > 0.02, "nothing of weight was evicted"
            counts = torch.stack([(index >= 0).sum(-1) for index in kept])
            assert (counts.unique().numel() == 1) == (kind == "uniform"), "not as ragged as the test means it"


@cover.cases(zoo.FEW, parts.BUDGETS)
def test_eviction_by_attention_scores_equals_masked_full_attention(name, combinations):
    model, inputs = zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    for (kind,) in combinations:
        with cover.case(kind):
            with attach(model, parts.window(4, kind), budget=parts.budget("30%")) as session:
                run = reference.generate(model, inputs, 6)
                kept = session.kept()
            _compare(run, reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 6))


@cover.few("name", zoo.ALL, keep=4)
def test_stored_entries_are_the_full_caches_entries_at_the_kept_positions(name):
    """Nothing is recomputed, rotated again or shuffled: K and V of every kept slot are those of the full cache."""
    model, inputs = zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        whole = model(**inputs, use_cache=True).past_key_values
    with attach(model, parts.compressor("all_ragged"), budget=parts.budget(9)) as session, torch.no_grad():
        model(**inputs, use_cache=True)
        for layer, before, kept in zip(session.cache.layers, whole.layers, session.kept(), strict=True):
            assert torch.equal(layer.slot_positions(), kept)
            real = kept >= 0
            assert int(kept.max()) == length - 1
            assert ((kept[..., 1:] > kept[..., :-1]) | ~real[..., :-1]).all(), "kept indices ascend"
            slot = kept.clamp_min(0)[..., None].expand(-1, -1, -1, zoo.HEAD_DIM)
            for after, source in ((layer.keys, before.keys), (layer.values, before.values)):
                assert torch.equal(after[real], source.gather(2, slot)[real])
                assert not after[~real].any(), "padding slots hold zeros, not leftovers of evicted entries"


def test_long_decoding_beyond_the_slack_stays_right():
    """Storage grows while decoding; the answer does not notice."""
    model, inputs = zoo.model("qwen2_5_vl"), zoo.prompt("qwen2_5_vl")
    length = inputs["input_ids"].shape[1]
    with attach(model, parts.compressor("all_ragged"), budget=parts.budget(8), reserve=4) as session:
        run = reference.generate(model, inputs, 24)
        kept, grown = session.kept(), session.cache.layers[0].growths
    assert grown > 0
    _compare(run, reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 24))


def test_decode_append_writes_in_place_and_never_copies_the_layer():
    model, inputs = zoo.model("llava"), zoo.prompt("llava")
    with attach(model, parts.compressor("head_ragged"), budget=parts.budget(8)) as session, torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        addresses = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
        for _ in range(20):
            model(input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True)
        assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == addresses
        assert cache is session.cache and all(layer.growths == 0 for layer in cache.layers)
