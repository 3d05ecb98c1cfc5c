"""Promise: what a scorer is shown is what the model computes: post-RoPE queries, keys, hidden states' projections, the
rotations of future positions (mrope too), token types; the same for padded rows and for chunked prefill."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from mmkv_bench.compression.numerics.moments import rotate
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.session import attach
from tests import cover, reference, zoo
from tests.core import parts

WINDOW = 6


@dataclass(frozen=True)
class Spy(parts.RandomScores):
    """Notes everything it may look at, in the order (layer, row)."""

    seen: list = field(default_factory=list, compare=False)
    needs = Needs(tail_queries=WINDOW)

    def score(self, obs, budget, seed):
        probe = torch.linspace(-1, 1, 2 * zoo.HEADS * zoo.HEAD_DIM).view(2, -1)
        offsets = torch.tensor([1, 2, 3])
        self.seen.append(
            (
                obs.layer,
                obs.tail(WINDOW),
                obs.key,
                obs.value,
                obs.token_types,
                obs.rope(offsets),
                probe,
                obs.project(probe),
            )
        )
        return super().score(obs, budget, seed)


@torch.no_grad()
def test_places_behind_the_prompt_are_rotated_once_for_all_layers():
    """Two prompts, each with places of its own; what the model itself rotates is one call of each."""
    model, calls, spy = zoo.model("qwen2_5_vl"), [], Spy()
    hook = model.get_decoder().rotary_emb.register_forward_hook(lambda *_: calls.append(1))
    with attach(model, parts.compressor(scorer=spy), parts.budget(5)):
        for sample in range(2):
            model(**zoo.prompt("qwen2_5_vl", sample, before=2 * sample), use_cache=True)
    hook.remove()
    assert len(calls) == 4 and len(spy.seen) == 2 * zoo.LAYERS > 2
    first, second = spy.seen[0][5][0], spy.seen[zoo.LAYERS][5][0]
    assert not torch.equal(first, second) and torch.equal(second, spy.seen[-1][5][0])


def _calls(model, run):
    """Per layer, the (hidden, cos, sin) of every attention call while `run()` ran."""
    calls = {layer: [] for layer in range(zoo.LAYERS)}

    def note(module, args, kwargs):
        calls[module.layer_idx].append((kwargs["hidden_states"], *kwargs["position_embeddings"]))

    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in model.get_decoder().layers]
    run()
    for hook in hooks:
        hook.remove()
    return {layer: [torch.cat(part, dim=1) for part in zip(*steps, strict=True)] for layer, steps in calls.items()}


def _queries(module, hidden):
    """Pre-RoPE queries [m,Hq,D] -> [Hq,m,D] as the module's own forward makes them."""
    query = module.q_proj(hidden).view(*hidden.shape[:-1], -1, module.head_dim)
    return (module.q_norm(query) if hasattr(module, "q_norm") else query).transpose(-3, -2)


@cover.few("name", zoo.ALL, keep=4)
@torch.no_grad()
def test_scorers_see_what_the_model_computes(name):
    model = zoo.model(name)
    prompts = [zoo.prompt(name), zoo.prompt(name, 1, before=2), zoo.prompt(name, 2, after=4)]
    inputs = zoo.batch(prompts)
    length = inputs["input_ids"].shape[1]
    pads = [length - prompt["input_ids"].shape[1] for prompt in prompts]
    cache = DynamicCache(config=model.config)
    calls = _calls(model, lambda: reference.generate(model, inputs, 4, past_key_values=cache))
    for options in ({}, {"prefill_chunk_size": 8}):
        spy = Spy()
        with attach(model, parts.compressor(scorer=spy), budget=parts.budget(5), prompt_length=length):
            reference.generate(model, inputs, 1, **options)
        with cover.case(options):
            _compare(spy, model, prompts, pads, length, calls, cache)


def _compare(spy, model, prompts, pads, length, calls, cache) -> None:
    """What was seen of every layer and row against what the stock model computed and cached."""
    assert len(spy.seen) == zoo.LAYERS * len(prompts)
    for number, (layer, tail, key, value, types, future, probe, projected) in enumerate(spy.seen):
        row = number % len(prompts)
        pad, module = pads[row], model.get_decoder().layers[layer].self_attn
        hidden, cos, sin = (part[min(row, part.shape[0] - 1)] for part in calls[layer])
        window = slice(length - WINDOW, length)
        expected = rotate(_queries(module, hidden[window]), cos[window], sin[window])
        torch.testing.assert_close(tail, expected, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(key, cache.layers[layer].keys[row, :, pad:length], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(value, cache.layers[layer].values[row, :, pad:length], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(projected, _queries(module, probe))
        assert torch.equal(future[0], cos[length : length + 3]) and torch.equal(future[1], sin[length : length + 3])
        ids = prompts[row]["input_ids"][0]
        assert torch.equal(types.long(), (ids == zoo.IMAGE).long() + 2 * (ids == zoo.VIDEO).long())


def test_a_cache_that_already_holds_tokens_is_left_alone():
    """A conversation that began outside of attach goes on uncompressed instead of being cut in the middle."""
    model, inputs = zoo.model("llama"), zoo.prompt("llama")
    ids = torch.cat([inputs["input_ids"], torch.tensor([zoo.text(3, 9)])], dim=1)
    runs = []
    for attached in (False, True):
        begun = reference.generate(model, inputs, 1).cache
        if attached:
            with attach(model, parts.compressor(), budget=parts.budget(4)):
                runs.append(
                    reference.generate(model, zoo.inputs_of("llama", ids[0].tolist()), 3, past_key_values=begun)
                )
        else:
            runs.append(reference.generate(model, zoo.inputs_of("llama", ids[0].tolist()), 3, past_key_values=begun))
    assert torch.equal(runs[0].logits, runs[1].logits)
    assert runs[1].cache.get_seq_length() == runs[1].cache.layers[0].keys.shape[2]
