"""Prompts that begin with one context: the context is prefilled once, and every score is that of the whole prompt."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.prefill import prefill, prefill_together
from mmkv_bench.protocols import protocol
from tests import zoo
from tests.each import each
from tests.generation import common
from tests.generation.test_questions import document


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.slow
@each("name", ("llama", "qwen2_5_vl", "gemma3", "qwen3_5"))
def test_prompts_with_one_context_have_the_scores_of_prefills_of_their_own(name):
    prompts, model, rule = document(name, tails=(9, 12)), zoo.model(name), "query_joint"
    methods = {key: one for key, one in common.for_text(common.registry(model=name)).items() if not one.needs.answer}
    if name in zoo.HYBRID:  # a recurrent state cannot be fed again
        del methods["kvzip"]
    cells = [common.cell(one, 12, rule, name=key) for key, one in methods.items()]
    cut = prompts[0].context_tokens or common.context_cut(prompts[0], common.family(name))
    lengths = [
        {rule: dataclasses.replace(protocol(rule).lengths(one.length, cut), prefilled=one.length)} for one in prompts
    ]
    fed = []
    handle = model.get_decoder().layers[0].register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    with Engine(model, common.family(name), common.rules(model), common.tokenizer()) as engine:
        session, meter = engine.session, Meter(engine.device)
        together = prefill_together(session, prompts, cells, lengths, meter, 8)
        passes, rests = [*fed], [one.length - cut for one in reversed(prompts)]
        alone = [prefill(session, one, cells, of, meter, 8) for one, of in zip(prompts, lengths, strict=True)]
    handle.remove()
    assert passes[: len(prompts) + 1] == [cut, *rests], "the context passes the model once"
    compared = 0
    for number, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert one.failures.keys() == other.failures.keys() and close(one.logits, other.logits)
        assert torch.equal(one.last_positions, other.last_positions)
        for key, scores in one.scores.items():
            replayed = key[0].__name__ == "KVzipScorer"
            if scores and (number == 0 or not replayed):
                compared += 1
                for layer, expected in zip(scores, other.scores[key], strict=True):
                    assert close(layer, expected), key
        for key, summaries in one.summaries.items():
            assert all(close(made, other.summaries[key][layer]) for layer, made in summaries.items()), key
    assert compared > 2 * 10
    first, other = together[0], alone[0]
    for mine, theirs in zip(first.cache.layers, other.cache.layers, strict=True):
        if isinstance(mine, CompressedLayer):
            assert (mine.stored, mine.seen, mine.capacity) == (theirs.stored, theirs.seen, theirs.capacity)
            assert close(mine.keys, theirs.keys) and close(mine.values, theirs.values)
    for index, state in first.states.items():
        for mine, theirs in zip(tensors(state), tensors(other.states[index]), strict=True):
            assert close(mine, theirs), "the context's state, not that of a question"


def tensors(layer: object) -> list[torch.Tensor]:
    made = []
    for value in vars(layer).values():
        values = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
        made += [one for one in values if isinstance(one, torch.Tensor)]
    return made
