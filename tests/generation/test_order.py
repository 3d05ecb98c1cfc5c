"""Promise: the order of cells, the order of samples and whatever ran before in the process change no result; the edges:
one prompt token, one entry, only visual tokens, no visual token."""

from __future__ import annotations

import random

import pytest
import torch

from mmkv_bench.compression.session import attach
from mmkv_bench.generation.engine import Engine
from tests import cover, zoo
from tests.core import parts
from tests.generation import common


def cells_of(name: str, budgets=(1, 6, "50%")) -> list:
    protocols = common.PROTOCOLS if name in zoo.MULTIMODAL else common.PROTOCOLS[:2]
    methods = [common.registry()[key] for key in ("snapkv", "mmshift", "random")] + [parts.compressor("all_ragged")]
    some = [common.cell(method, budget, protocol) for method in methods for budget in budgets for protocol in protocols]
    return common.full_cells(protocols) + some


def count_hooks(model) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def by_cell(results) -> dict:
    return {result.cell: common.content(result) for result in results}


@pytest.mark.full
@cover.few("name", ("qwen2_5_vl", "llava_next", "llama"), keep=2, first=1)
def test_order_and_choice_of_cells_change_no_result(name):
    model, prompt, cells = zoo.model(name), common.encoded(name), cells_of(name)
    expected = by_cell(common.together(model, name, prompt, cells))
    for seed in range(2):
        shuffled = random.Random(seed).sample(cells, len(cells))
        results = common.together(model, name, prompt, shuffled)
        assert [result.cell for result in results] == [one.cell for one in shuffled], "results come as cells were given"
        assert by_cell(results) == expected
    for start in range(3):  # fewer cells, so other batches and other needs of the prefill
        part = cells[start::3]
        assert by_cell(common.together(model, name, prompt, part)) == {one.cell: expected[one.cell] for one in part}


@pytest.mark.full
@cover.few("name", ("qwen2_5_vl", "qwen3_vl_video", "internvl"), first=1)
def test_order_of_samples_changes_no_result(name):
    """Long, short, visual and text-only prompts through one engine, in several orders, against a fresh model each."""
    inputs = [
        zoo.prompt(name, 0),
        zoo.without_visual(name),
        zoo.prompt(name, 1, before=1),
        zoo.without_visual(name, 25),
    ]
    prompts = [common.encoded(name, one, f"zoo/{number}") for number, one in enumerate(inputs)]
    cells = common.some(cells_of(name, (4, "50%")))
    expected = [
        by_cell(common.together(zoo.build(name), name, prompt, cells)) for prompt in prompts
    ]  # fmt: skip
    model = zoo.model(name)
    with Engine(model, common.family(name), common.rules(model), common.tokenizer()) as engine:
        for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 1, 3, 2, 2)):
            for number in order:
                assert by_cell(engine.answer(prompts[number], cells)) == expected[number]


def test_what_ran_before_in_the_process_changes_no_result():
    name = "qwen2_5_vl"
    prompt, cells = common.encoded(name), cells_of(name)
    expected = by_cell(common.together(zoo.build(name), name, prompt, cells))
    model = zoo.model(name)
    torch.manual_seed(99)
    torch.rand(17)
    model.generate(**zoo.prompt(name, 2), max_new_tokens=3)
    with attach(model, parts.window(4), budget=parts.budget(5)):
        model.generate(**zoo.batch([zoo.prompt(name, 0), zoo.prompt(name, 1, before=2)]), max_new_tokens=3)
    common.together(zoo.model("llava"), "llava", common.encoded("llava"), cells_of("llava"))
    state = torch.get_rng_state()
    assert by_cell(common.together(model, name, prompt, cells)) == expected
    assert torch.equal(torch.get_rng_state(), state), "the global generator is nobody's"


def test_the_model_is_what_it_was_after_the_engine_is_closed():
    name = "internvl"
    model = zoo.build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    settings, free = model.generation_config.to_dict(), model.generate(**zoo.prompt(name), max_new_tokens=5)
    hooks = count_hooks(model)  # transformers itself installs some at the first forward
    common.together(model, name, common.encoded(name), cells_of(name))
    assert count_hooks(model) == hooks
    assert model.generation_config.to_dict() == settings
    assert model.get_decoder().config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.generate(**zoo.prompt(name), max_new_tokens=5), free)


@pytest.mark.slow
@cover.few("name", zoo.ALL, keep=3)
def test_prompt_of_one_token(name):
    model, inputs = zoo.model(name), zoo.without_visual(name, 1)
    prompt = common.encoded(name, inputs)
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, 1:].tolist()
    cells = [one for one in cells_of(name, (1, 5, "10%", 1.0)) if one.protocol != "query_agnostic"]
    cells = common.some(cells)
    for fork in common.assert_forks_equal_alone(model, name, prompt, cells):
        assert fork.token_ids == expected
        assert fork.kept == [[1] * len(fork.kept[0])] * zoo.LAYERS


@cover.few("name", zoo.FEW, keep=2)
def test_budget_of_one_entry_keeps_the_last_token(name):
    model, prompt = zoo.model(name), common.encoded(name)
    cells = [common.cell(common.registry()[key], 1, protocol) for key in ("snapkv", "streamingllm", "keydiff", "mmshift")
             for protocol in ("paper", "strict")]  # fmt: skip
    forks = common.assert_forks_equal_alone(model, name, prompt, cells)
    assert all(fork.entries_resident == len(fork.kept) * len(fork.kept[0]) for fork in forks)
    assert len({fork.kept_digest for fork in forks}) == 2, "paper keeps the last token, strict keeps nothing beside it"


@cover.few("name", zoo.MULTIMODAL, keep=3)
def test_prompt_of_only_visual_tokens(name):
    """query_agnostic has no question left, and strict no text token to feed again; both say so, paper is answered."""
    model, inputs = zoo.model(name), zoo.visual_only(name)
    prompt = common.encoded(name, inputs)
    cells = common.some(cells_of(name, (1, 5)))
    ends_with_text = int(prompt.types[0, -1]) == 0
    results = common.together(model, name, prompt, cells)
    for one, result, own in zip(cells, results, common.alone(model, name, prompt, cells), strict=True):
        if one.protocol == "query_agnostic":
            assert result.status == "error" and "needs a question after it" in result.error
        elif one.protocol == "strict" and not ends_with_text:
            assert result.status == "error" and "protocol=strict cannot feed again" in result.error
        else:
            assert result.status == "ok"
        assert common.content(result, common.PATH) == common.content(own, common.PATH)
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, prompt.length :].tolist()
    assert results[0].token_ids == expected


@cover.few("name", zoo.ALL, keep=3)
def test_prompt_without_visual_tokens_is_refused_by_query_agnostic_alone(name):
    model, prompt = zoo.model(name), common.encoded(name, zoo.without_visual(name))
    cells = common.full_cells() + [common.cell(parts.compressor(), 4, protocol) for protocol in common.PROTOCOLS]
    results = common.together(model, name, prompt, cells)
    for one, result, own in zip(cells, results, common.alone(model, name, prompt, cells), strict=True):
        assert result.status == ("error" if one.protocol == "query_agnostic" else "ok")
        if result.status == "error":
            assert "query_agnostic" in result.error and "visual" in result.error
        assert common.content(result, common.PATH) == common.content(own, common.PATH)
