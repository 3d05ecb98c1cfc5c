"""Promises: kept entries, counted from the stored tensors, never exceed the budget and equal it when T > C; the edges
T = 1, C = 1, window > C, no visual token, only visual tokens."""

from __future__ import annotations

import pytest
import torch

import mmkv_bench
from mmkv_bench.compression.compressor import OverBudgetError, full
from mmkv_bench.compression.session import attach
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.generation.unshared_generation import generate_alone
from tests import cover, reference, zoo
from tests.core import parts
from tests.each import each
from tests.generation import common


def _prefill(model, inputs, made, budget, **options):
    """Prefill alone under attach: the session as it stands before any token is decoded."""
    session = attach(model, made, budget=parts.budget(budget), **options)
    with session, torch.no_grad():
        model(**inputs, use_cache=True)
    return session


@cover.cases(zoo.ALL, (1, 7, "50%", 0.1, "all but one"), parts.BUDGETS, each=3, keep=4)
def test_counted_entries_equal_the_budget_when_the_prompt_is_longer(name, combinations):
    model, inputs = zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    heads = model.config.get_text_config(decoder=True).num_key_value_heads
    asked = {1: 1, 7: 7, "50%": length // 2, 0.1: max(1, length // 10), "all but one": length - 1}
    for budget, kind in combinations:
        with cover.case(budget, kind):
            entries = asked[budget]
            session = _prefill(model, inputs, parts.compressor(kind), entries if budget == "all but one" else budget)
            counts = parts.stored(session)
            assert sum(int(count.sum()) for count in counts) == entries * heads * zoo.LAYERS
            if parts.BUDGETS[kind].scope == "layer":
                assert all(int(count.sum()) == entries * heads for count in counts)
            for count, kept in zip(counts, session.kept(), strict=True):
                assert torch.equal(count, (kept >= 0).sum(-1)), "what is reported is what is stored"


@pytest.mark.parametrize("name", zoo.FEW)
def test_counted_entries_grow_by_one_per_head_and_decoded_token(name):
    model, inputs = zoo.model(name), zoo.prompt(name)
    with attach(model, parts.compressor("all_ragged"), budget=parts.budget(7)) as session:
        reference.generate(model, inputs, 6)  # 5 of the 6 tokens are fed back
        for count, kept in zip(parts.stored(session), session.kept(), strict=True):
            assert torch.equal(count, (kept >= 0).sum(-1) + 5)


@each("kind", parts.BUDGETS)
def test_every_sequence_of_a_batch_has_its_own_budget(kind):
    model = zoo.model("internvl")
    prompts = [zoo.prompt("internvl"), zoo.prompt("internvl", 1, before=0, after=3)]
    session = _prefill(model, zoo.batch(prompts), parts.compressor(kind), "25%")
    counts = torch.stack(parts.stored(session))  # [layers, B, Hkv]
    for row, prompt in enumerate(prompts):
        entries = prompt["input_ids"].shape[1] // 4
        assert int(counts[:, row].sum()) == entries * counts.shape[2] * zoo.LAYERS


def test_memory_of_evicted_entries_is_released():
    """The storage that a layer still holds has the size of what it keeps plus the asked slack."""
    model, inputs = zoo.model("llava_next"), zoo.prompt("llava_next")
    session = _prefill(model, inputs, parts.compressor(), 10, reserve=3)
    for layer in session.cache.layers:
        for entries in (layer.keys, layer.values):
            assert entries.untyped_storage().nbytes() == zoo.HEADS * (10 + 3) * zoo.HEAD_DIM * 4


def storages(value, seen: dict[int, int]) -> dict[int, int]:
    """Address -> bytes of every tensor storage that an object of this package reaches."""
    if isinstance(value, torch.Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            storages(item, seen)
    elif type(value).__module__.startswith("mmkv_bench") and hasattr(value, "__dict__"):
        storages(vars(value), seen)
    return seen


@pytest.mark.slow
def test_a_single_run_reserves_what_its_answer_can_need_and_no_block():
    """One method per class of storage. What it holds is compared with what it keeps when the answer is over."""
    model, prompt, methods = zoo.model("qwen2_5_vl"), common.encoded("qwen2_5_vl"), common.registry()
    for name in ("snapkv", "adakv", "local", "prefixkv", "h2o_decode", "kivi_prefixkv", "hybridkv", "full"):
        for protocol in common.PROTOCOLS:
            budget = None if methods[name].unbudgeted else parts.budget(8)
            cut = prompt.length - 6 if protocol == "query_agnostic" else None
            run = generate_alone(model, prompt.inputs, methods[name], budget, protocol, context=cut, max_new_tokens=6)
            layers = run.session.cache.layers
            held = sum(sum(storages(layer, {}).values()) - layer.host_nbytes() for layer in layers)
            assert held <= 1.5 * sum(sum(layer.nbytes()) for layer in layers), (name, protocol)
            assert not any(layer.growths for layer in layers), (name, protocol)


class Greedy(parts.Uniform):
    """Grants one entry more than the budget allows."""

    def caps(self, scores, budget, layers, n_layers, context=None):
        return super().caps(scores, budget + 1, layers, n_layers)


def test_exceeding_the_budget_is_an_error_outside_of_the_released_reading():
    from dataclasses import replace

    model, inputs = zoo.model("llama"), zoo.prompt("llama")
    made = replace(parts.compressor(), allocator=Greedy())
    with pytest.raises(OverBudgetError, match="proof_uniform kept 18 entries, but the budget allows 16"):
        _prefill(model, inputs, made, 8)
    session = _prefill(model, inputs, replace(made, reading="released"), 8)
    assert all((count == 9).all() for count in parts.stored(session))


@cover.cases(zoo.ALL, ("uniform", "all_ragged"), ("sdpa", "eager"), keep=4)
def test_one_entry_per_head_equals_masked_full_attention(name, combinations):
    inputs = zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    for kind, attention in combinations:  # ragged: most heads keep nothing of the prompt at all
        with cover.case(kind, attention):
            model = zoo.model(name, attention)
            with attach(model, parts.compressor(kind), budget=parts.budget(1)) as session:
                run, kept = reference.generate(model, inputs, 4), session.kept()
            if kind == "uniform":
                assert all(torch.equal(index, torch.full_like(index, length - 1)) for index in kept)
            masked = reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 4)
            assert (run.logits - masked.logits).abs().max() <= 2e-6


@cover.cases(zoo.ALL, (1, 5, "10%", 1.0), (parts.compressor("all_ragged"), parts.window(4)), keep=4)
def test_prompt_of_one_token_is_answered_as_by_the_untouched_model(name, combinations):
    model, inputs = zoo.model(name), zoo.without_visual(name, 1)
    stock = reference.generate(model, inputs, 4)
    for budget, made in combinations:
        with cover.case(budget, made.name):
            with attach(model, made, budget=parts.budget(budget)):
                run = reference.generate(model, inputs, 4)
            assert torch.equal(run.logits, stock.logits)


@pytest.mark.parametrize("name", zoo.FEW)
def test_window_larger_than_the_budget_stays_within_it_and_is_reported(name):
    model, inputs = zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    for budget in (1, 2, 5, 20):
        session = _prefill(model, inputs, parts.window(1000), budget)
        assert all((count == budget).all() for count in parts.stored(session))
        assert session.listener.fallbacks == [("window_reduced",)]
        recent = torch.arange(length - max(1, budget // 2), length)
        for kept in session.kept():
            assert torch.equal(kept[0, :, -len(recent) :], recent.expand(kept.shape[1], -1)), "the window itself stays"


@cover.few("name", zoo.ALL, keep=4)
def test_prompt_without_visual_tokens_is_compressed_like_any_other(name):
    model, inputs = zoo.model(name), zoo.without_visual(name)
    length = inputs["input_ids"].shape[1]
    with attach(model, parts.window(3, "head_ragged"), budget=parts.budget(5)) as session:
        run, kept = reference.generate(model, inputs, 4), session.kept()
    assert sum(int((index >= 0).sum()) for index in kept) == 5 * kept[0].shape[1] * zoo.LAYERS
    masked = reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 4)
    assert (run.logits - masked.logits).abs().max() <= 2e-6


@cover.few("name", zoo.MULTIMODAL, keep=4)
def test_prompt_of_only_visual_tokens_is_compressed_like_any_other(name):
    model, inputs = zoo.model(name), zoo.visual_only(name)
    length = inputs["input_ids"].shape[1]
    with attach(model, parts.window(3, "all_ragged"), budget=parts.budget(5)) as session:
        run, kept = reference.generate(model, inputs, 4), session.kept()
    assert sum(int((index >= 0).sum()) for index in kept) == 5 * kept[0].shape[1] * zoo.LAYERS
    masked = reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 4)
    assert (run.logits - masked.logits).abs().max() <= 2e-6


def test_what_attach_cannot_do_is_refused():
    model = zoo.model("llama")
    with pytest.raises(ConfigError, match="needs a budget"):
        attach(model, parts.compressor())
    with pytest.raises(ConfigError, match="protocol='strikt' is unknown; did you mean 'strict'"):
        attach(model, full(), protocol="strikt")
    with attach(model, full()), pytest.raises(ConfigError, match="already"), attach(model, full()):
        pass
    inputs = zoo.prompt("llama")
    mask = inputs["attention_mask"].clone()
    mask[0, -2:] = 0
    with (
        attach(model, parts.compressor(), budget=parts.budget(4)),
        pytest.raises(UnsupportedError, match="right padding.*left"),
        torch.no_grad(),
    ):
        model(**dict(inputs, attention_mask=mask), use_cache=True)


def test_sliding_window_models_are_refused_before_anything_runs():
    import transformers as tf

    config = dict(zoo.model("qwen2").config.to_dict(), use_sliding_window=True, sliding_window=8, max_window_layers=1)
    config.pop("layer_types")
    with pytest.raises(UnsupportedError, match="sliding_attention"):
        mmkv_bench.attach(tf.Qwen2ForCausalLM(tf.Qwen2Config(**config)), "full")
    mistral = tf.MistralConfig(**{**zoo.model("llama").config.to_dict(), "model_type": "mistral", "sliding_window": 8})
    with pytest.raises(UnsupportedError, match="sliding"):
        attach(tf.MistralForCausalLM(mistral), full())
