"""Promise: where layers read the keys of an earlier one (Gemma 4), what that one evicts is gone for all of them, nothing else.

The reference is stock transformers over a full `DynamicCache`, with what the storing layer evicted masked out in its readers too.
"""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from transformers import DynamicCache

import mmkv_bench
from mmkv_bench.compression.compressor import full
from mmkv_bench.compression.numerics.moments import rotate
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.session import Session, attach
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.facts import kv_bytes_per_token, model_facts, state_bytes
from mmkv_bench.generation.unshared_generation import generate_alone
from mmkv_bench.protocols import SINGLE, protocol
from tests import reference, zoo
from tests.core import parts
from tests.core.test_hybrid import CUT, document
from tests.core.test_observing import WINDOW, Spy
from tests.each import each
from tests.generation import common

NAME, WIDTH, TOLERANCE = "gemma4", 2 * zoo.HEAD_DIM, 1e-5  # scores are not scaled, so rounding counts for more
PROTOCOLS = tuple(name for name in SINGLE if not (protocol(name).prefills_again or protocol(name).streams))


def methods() -> list:
    """Methods that compress the prompt alone."""
    made = common.for_text(common.registry(model=NAME)).values()
    return [one for one in made if one.decoding is None and not one.needs.replay]


@pytest.mark.slow
@each("base", ["sdpa", "eager"])
def test_full_is_bit_identical_to_the_untouched_model_alone_and_in_a_padded_batch(base):
    model = zoo.model(NAME, base)
    for inputs in (zoo.prompt(NAME), zoo.batch([zoo.prompt(NAME), zoo.prompt(NAME, 1, before=2)])):
        stock = reference.generate(model, inputs, 6)
        for made, budget in ((full(), None), (parts.keep_all(), parts.budget(1))):
            with attach(model, made, budget=budget) as session:
                run = reference.generate(model, inputs, 6)
            assert torch.equal(run.logits, stock.logits) and torch.equal(run.tokens, stock.tokens)
            kinds = [type(layer).__name__ for layer in session.latest_cache.layers]
            assert kinds[::2] == ["DynamicSlidingWindowLayer"] * 2 + ["DummyLayer"] and kinds[5] == "DummyLayer"
            assert len(session.latest_cache.compressed) == 2


@pytest.mark.slow
@each("rule", PROTOCOLS, keep=2)
def test_every_scorer_answers_as_stock_attention_masked_in_readers_too(rule):
    model, inputs = zoo.model(NAME), zoo.prompt(NAME)
    context = CUT if protocol(rule).cuts else None
    end = protocol(rule).lengths(inputs["input_ids"].shape[1], context).candidates
    moved = []
    for made in methods():
        if type(made.reducer) is not Evict:
            continue
        out = generate_alone(model, inputs, made, parts.budget(12), rule, context=context, max_new_tokens=4)
        keep = reference.keep_of(out.session.kept(), end)
        stock = reference.masked_generate(model, inputs, keep, end, 4)
        assert float((torch.stack(out.logits) - stock.logits).abs().max()) <= TOLERANCE
        moved.append(float((stock.logits[-1] - reference.stock(NAME).logits[3]).abs().max()))
    assert len(moved) > 8 and max(moved) > 0.02, "evictions must matter"


def test_readers_see_what_their_own_layer_kept_and_not_what_another_kept():
    """A question of several tokens, read behind a context of which layers keep unequal numbers; the reference with its readers
    unmasked, or masked as the first layer, gives other logits."""
    model, inputs = zoo.model(NAME), zoo.prompt(NAME)
    made = common.registry(model=NAME)["pyramidkv"]
    out = generate_alone(model, inputs, made, parts.budget(9), "query_agnostic", context=CUT, max_new_tokens=4)
    assert len({index.shape[2] for index in out.session.kept()}) == 2
    keep = reference.keep_of(out.session.kept(), CUT)
    for made, same in ((keep, True), ([keep[0], torch.ones_like(keep[1])], False), ([keep[0], keep[0]], False)):
        stock = reference.masked_generate(model, inputs, made, CUT, 4).logits
        difference = float((torch.stack(out.logits) - stock).abs().max())
        assert difference <= TOLERANCE if same else difference > 1e-2


@torch.no_grad()
def test_readers_of_a_prompt_see_all_of_it_whatever_was_evicted_meanwhile():
    """All rows of a prefill, not the last alone: the storing layer is reduced before its reader runs."""
    model = zoo.model(NAME)
    for inputs in (zoo.prompt(NAME), zoo.batch([zoo.prompt(NAME), zoo.prompt(NAME, 1, before=2)])):
        stock = model(**inputs, use_cache=True).logits
        with attach(model, parts.window(), parts.budget(9)) as session:
            made = model(**inputs, use_cache=True).logits
        assert torch.equal(made, stock) and session.latest_cache.compressed[1].stored == 9


@pytest.mark.slow
def test_every_method_forks_as_it_runs_alone():
    model, prompt = zoo.model(NAME), document(NAME)
    cells = [
        common.cell(made, None if made.unbudgeted else (5, "40%")[number % 2], rule)
        for number, made in enumerate([full(), *methods()])
        for rule in {"paper", "paper" if made.needs.answer else PROTOCOLS[number % len(PROTOCOLS)]}
    ]
    forks = common.assert_forks_equal_alone(model, NAME, prompt, cells)
    assert len({tuple(fork.token_ids) for fork in forks}) > 3 and {len(fork.kept) for fork in forks} == {2}


def test_scorers_see_the_storing_layers_wider_queries_and_its_own_rotation():
    model, inputs, spy, called = zoo.model(NAME), zoo.prompt(NAME), Spy(), {}
    modules, length = zoo.full_attention(model), inputs["input_ids"].shape[1]

    def note(module, args, kwargs):
        called[module.layer_idx] = (kwargs["hidden_states"][0], *kwargs["position_embeddings"])

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**zoo.inputs_of(NAME, inputs["input_ids"][0].tolist() + [5, 6, 7]), past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    with attach(model, parts.compressor(scorer=spy), parts.budget(5)), torch.no_grad():
        model(**inputs, use_cache=True)
    assert [seen[0] for seen in spy.seen] == [0, 1], "readers are not observed"
    for (_, tail, key, value, _, future, probe, projected), module in zip(spy.seen, modules, strict=True):
        hidden, cos, sin = called[module.layer_idx]

        def queries(of, module=module):
            return module.q_norm(module.q_proj(of).view(len(of), zoo.HEADS, WIDTH)).transpose(0, 1)

        window = slice(length - WINDOW, length)
        torch.testing.assert_close(projected, queries(probe))
        torch.testing.assert_close(tail, rotate(queries(hidden[window]), cos[0, window], sin[0, window]))
        stored = cache.layers[module.layer_idx]
        torch.testing.assert_close(key, stored.keys[0, :, :length], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(value, stored.values[0, :, :length], atol=1e-5, rtol=1e-5)
        assert torch.equal(future[0], cos[0, length:]) and future[0].shape[-1] == WIDTH


@each("length", [3, 40, 90])
def test_bytes_of_windows_are_those_of_the_stock_cache_and_readers_hold_none(length):
    """Windows have narrower heads than compressed layers, and more of them."""
    model, inputs = zoo.model(NAME), zoo.without_visual(NAME, length)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    held = sum(one.numel() * one.element_size() for layer in cache.layers[0:4:2] for one in (layer.keys, layer.values))
    prompt = common.encoded(NAME, inputs)
    rows = common.together(model, NAME, prompt, [common.cell(full(), None), common.cell(parts.window(), 2)])
    assert {row.bytes_state for row in rows} == {held} == {state_bytes(common.family(NAME), length, "float32")}
    facts, entry = common.family(NAME), 2 * 1 * WIDTH * 2 * 4
    assert (
        rows[0].bytes_full == length * entry == length * kv_bytes_per_token(facts, "float32") and facts.all_layers == 6
    )


def test_what_readers_cannot_follow_is_refused_and_the_model_left_as_it_was():
    model, prompt, registry = zoo.model(NAME), common.encoded(NAME), common.registry(model=NAME)
    for name in ("h2o_decode", "kivi", "prefixkv"):
        with pytest.raises(UnsupportedError, match="later layers of .* read these entries"):
            attach(model, registry[name], None if registry[name].unbudgeted else parts.budget(9))
    (row,) = common.together(model, NAME, prompt, [common.cell(registry["h2o_decode"], 9)])
    assert row.status == "error" and "read these entries" in row.error
    with pytest.raises(UnsupportedError, match="protocol=masked hides evicted"):
        attach(model, parts.window(), parts.budget(9), "masked")
    with pytest.raises(UnsupportedError, match="read these entries"):
        mmkv_bench.attach(model, "kivi")
    with pytest.raises(UnsupportedError, match="decode=eager"):
        Session(model, fixed=True)
    for option, words in (
        ({"enable_moe_block": True}, "experts are not tested"),
        (
            {"use_bidirectional_attention": "all"},
            "every token then sees every other",
        ),
    ):
        config = zoo.config(NAME)
        for key, value in option.items():
            setattr(config, key, value)
        with pytest.raises(UnsupportedError, match=words):
            model_facts(config)
    with pytest.raises(UnsupportedError, match="its text model alone, gemma4_text, is supported"):
        model_facts(tf.Gemma4Config())
    assert model.config._attn_implementation == "sdpa" and not zoo.readers(model).keys() - set(model.modules())
