"""The measuring tools themselves: the zoo reads its visual tokens, and the masked reference masks."""

from __future__ import annotations

import torch

from tests import cover, reference, zoo


@cover.few("name", zoo.ALL, keep=4)
def test_all_visible_reference_is_the_untouched_model(name):
    stock, model, inputs = reference.stock(name, "eager"), zoo.model(name, "eager"), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    everything = reference.random_keep(model, 1, length, [length] * zoo.LAYERS)
    masked = reference.masked_generate(model, inputs, everything, length, 6)
    assert torch.equal(stock.logits, masked.logits)
    assert torch.equal(stock.tokens, masked.tokens)


@cover.few("name", zoo.ALL, keep=4)
def test_evictions_matter_in_every_zoo_model(name):
    """A third of the entries of one layer moves logits by far more than the 2e-6 that the promises allow."""
    stock, model, inputs = reference.stock(name), zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    for touched in range(zoo.LAYERS):
        counts = [length // 3 if layer == touched else length for layer in range(zoo.LAYERS)]
        keep = reference.random_keep(model, 1, length, counts)
        masked = reference.masked_generate(model, inputs, keep, length, 2)
        assert (stock.logits[0] - masked.logits[0]).abs().max() < 1e-5, "the first token comes from the full prefill"
        assert (stock.logits[1] - masked.logits[1]).abs().max() > 0.02


@cover.few("name", zoo.MULTIMODAL, keep=4)
def test_zoo_models_read_their_visual_tokens(name):
    """Other pixels give other logits, so positions and features of the visual tokens are really in use."""
    model, inputs = zoo.model(name), zoo.prompt(name)
    other = {key: -value if key.startswith("pixel") else value for key, value in inputs.items()}
    changed = reference.generate(model, other, 1)
    assert (reference.stock(name).logits[0] - changed.logits[0]).abs().max() > 0.02


def test_step_dependent_masks_are_possible():
    """A mask that changes with the query position (decode-time eviction) equals the constant one where they agree."""
    model, inputs = zoo.model("llama"), zoo.prompt("llama")
    length = inputs["input_ids"].shape[1]
    keep = reference.random_keep(model, 1, length, [length // 3] * zoo.LAYERS)
    constant, everything = (reference.visible(keep, length), [torch.ones_like(k) for k in keep])
    late = reference.visible(everything, length)

    def rule(layer, queries, columns):
        switched = (queries >= length + 2)[None, None, :, None]
        return torch.where(switched, late(layer, queries, columns), constant(layer, queries, columns))

    with reference.masked(model, rule) as cache:
        mixed = reference.generate(model, inputs, 6, past_key_values=cache)
    fixed = reference.masked_generate(model, inputs, keep, length, 6)
    assert torch.equal(mixed.logits[:3], fixed.logits[:3])
    assert (mixed.logits[3] - fixed.logits[3]).abs().max() > 0.02


def test_reference_leaves_the_model_as_it_was():
    model, inputs = zoo.model("qwen2_5_vl"), zoo.prompt("qwen2_5_vl")
    before = reference.generate(model, inputs, 3)
    keep = reference.random_keep(model, 1, 10, [5] * zoo.LAYERS)
    reference.masked_generate(model, inputs, keep, 10, 3)
    after = reference.generate(model, inputs, 3)
    assert model.get_decoder().config._attn_implementation == "sdpa"
    assert torch.equal(before.logits, after.logits)
