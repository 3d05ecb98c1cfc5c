"""Promise: the engine's `full` is plain `model.generate()` of the untouched model, token for token."""

from __future__ import annotations

import pytest
import torch

from tests import cover, zoo
from tests.generation import common

TOKENS = 8


def stock(model, inputs, tokens=TOKENS, **options) -> list[int]:
    """New tokens of plain greedy generate() on the untouched model."""
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture
def configured():
    """A zoo model whose generation config a test may change; it is put back afterwards."""
    restore = []

    def make(name, attention="sdpa", **settings):
        model = zoo.model(name, attention)
        kept = {key: getattr(model.generation_config, key) for key in settings}
        restore.append((model, kept))
        model.generation_config.update(**settings)
        return model

    yield make
    for model, kept in reversed(restore):
        for key, value in kept.items():
            setattr(model.generation_config, key, value)


def as_generate(model, task: dict) -> dict:
    """A task's settings as arguments of generate(): `until` joins the stop strings that hold anyway; blanks are none."""
    options = {key: value for key, value in task.items() if key not in ("until", "stop_strings")}
    stops = []
    for more in (task.get("stop_strings") or model.generation_config.stop_strings or [], task.get("until", [])):
        stops += [text for text in ([more] if isinstance(more, str) else more) if text.strip()]
    return options | ({"stop_strings": stops, "tokenizer": common.tokenizer()} if stops else {})


def assert_equal(model, name, inputs=None, tokens=TOKENS, **task):
    """`full` under every protocol equals stock; returns stock's tokens and the paper result."""
    inputs = zoo.prompt(name) if inputs is None else inputs
    rules = common.rules(model, tokens, **task)
    cells = common.full_cells(("paper", "strict"))
    if name in zoo.MULTIMODAL and bool((inputs["input_ids"] >= zoo.IMAGE).any()):
        cells += common.full_cells(("query_agnostic",))
    results = common.together(model, name, common.encoded(name, inputs), cells, rules)
    expected = stock(model, inputs, tokens, **as_generate(model, task))
    for result in results:
        assert result.status == "ok", result.error
        assert result.token_ids == expected, result.cell
    return expected, results[0]


@cover.cases(zoo.ALL, ("sdpa", "eager"), (0, 1), keep=6)
def test_full_equals_stock_generate_on_every_family(name, combinations):
    for attention, seed in combinations:
        with cover.case(attention, seed):
            expected, result = assert_equal(zoo.model(name, attention), name, zoo.prompt(name, seed))
            assert len(expected) == TOKENS and result.finish_reason == "length"


@cover.few("name", zoo.ALL, keep=4)
def test_any_member_of_an_eos_set_ends_the_answer_early(name, configured):
    free = stock(zoo.model(name), zoo.prompt(name))
    for place in (0, 3):
        model = configured(name, eos_token_id=[297, free[place], 298])
        expected, result = assert_equal(model, name)
        assert expected == free[: free.index(free[place]) + 1] and result.finish_reason == "eos"
        assert result.answer == common.tokenizer().decode(expected[:-1])


@pytest.mark.parametrize("name", zoo.FEW)
def test_eos_as_the_last_allowed_token_is_an_end_and_not_a_length(name, configured):
    free = stock(zoo.model(name), zoo.prompt(name))
    tokens = free.index(free[4]) + 1
    _, result = assert_equal(configured(name, eos_token_id=free[4]), name, tokens=tokens)
    assert result.finish_reason == "eos" and result.n_tokens == tokens


@pytest.mark.parametrize("name", ("qwen2_5_vl", "internvl"))
@pytest.mark.parametrize("setting", ("min_new_tokens", "min_length"))
def test_minimum_lengths_hold_eos_back(name, setting, configured):
    free = stock(zoo.model(name), zoo.prompt(name))
    length = zoo.prompt(name)["input_ids"].shape[1]
    model = configured(name, eos_token_id=free[1], **{setting: 5 + (length if setting == "min_length" else 0)})
    expected, _ = assert_equal(model, name)
    assert len(expected) >= 6 and free[1] not in expected[:5]


def test_min_new_tokens_replaces_min_length(configured):
    name = "llama"
    free = stock(zoo.model(name), zoo.prompt(name))
    model = configured(name, eos_token_id=free[2], min_length=1000, min_new_tokens=1)
    expected, _ = assert_equal(model, name)
    assert expected == free[:3]


def test_a_task_sets_min_new_tokens_and_repetition_penalty(configured):
    name = "internvl"
    free = stock(zoo.model(name), zoo.prompt(name))
    model = configured(name, eos_token_id=free[0])
    expected, _ = assert_equal(model, name, min_new_tokens=4, repetition_penalty=1.7)
    assert len(expected) >= 5 and expected[: len(free)] != free[: len(expected)]


@pytest.mark.slow
@cover.few("name", ("qwen3_vl", "llava_next", "llama"))
def test_processors_of_the_generation_config_act_as_in_stock(name, configured):
    free = stock(zoo.model(name), zoo.prompt(name))
    seen = zoo.prompt(name)["input_ids"][0].tolist()
    settings = (
        {"repetition_penalty": 5.0},
        {"suppress_tokens": free[:2]},
        {"begin_suppress_tokens": free[:1]},
        {"bad_words_ids": [[free[0]], free[2:4], [299, 298]]},
        {"no_repeat_ngram_size": 1},  # no token of the prompt or answer may come again
        {"renormalize_logits": True},
        {"repetition_penalty": 2.0, "no_repeat_ngram_size": 1, "suppress_tokens": [free[0]], "min_new_tokens": 3,
         "eos_token_id": [free[1], free[2]], "bad_words_ids": [[free[3]]], "renormalize_logits": True},
    )  # fmt: skip
    changed = 0
    for setting in settings:
        with_setting, _ = assert_equal(configured(name, **setting), name)
        changed += with_setting != free
        if setting == {"no_repeat_ngram_size": 1}:
            assert len(set(with_setting)) == len(with_setting) and not set(with_setting) & set(seen)
        for key in setting:
            zoo.model(name).generation_config.update(**{key: None})
    assert changed >= 4, "most settings must have had something to change"


@pytest.mark.slow
@pytest.mark.parametrize("name", ("qwen2_5_vl", "llama"))
def test_no_repeat_ngram_and_repetition_penalty_break_a_loop(name, configured):
    """A long answer of a random model runs into a loop, where these settings act at late steps too."""
    inputs = zoo.prompt(name, 2)
    free = stock(zoo.model(name), inputs, 24)
    for setting in ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 3, "repetition_penalty": 1.3}):
        expected, _ = assert_equal(configured(name, **setting), name, inputs, tokens=24)
        assert expected != free
        zoo.model(name).generation_config.update(no_repeat_ngram_size=None, repetition_penalty=None)


@pytest.mark.full
@pytest.mark.parametrize("name", ("qwen2_5_vl", "llava_next"))
def test_stop_strings_end_answers_inside_and_across_tokens(name, configured):
    model = configured(name)
    text = common.tokenizer().decode(stock(model, zoo.prompt(name)))
    cases = {
        "a whole token": text[4:6],
        "across two tokens": text[5:7],
        "across four tokens": text[3:9],
        "one letter": text[5],
        "the last allowed token": text[2 * TOKENS - 3 : 2 * TOKENS],
    }
    for what, stop in cases.items():
        expected, result = assert_equal(model, name, stop_strings=[stop, "zzzzzz"])
        end = text.index(stop) + len(stop)
        assert len(expected) == (end + 1) // 2, what
        assert result.finish_reason == "stop" and result.answer == text[: text.index(stop)], what
        assert_equal(model, name, until=stop)


def test_stop_strings_of_the_model_folder_hold_beside_the_tasks(configured):
    name = "internvl"
    text = common.tokenizer().decode(stock(zoo.model(name), zoo.prompt(name)))
    model = configured(name, stop_strings=text[7:9])
    for until, letters in (([], 9), (["zzzz"], 9), ([text[3:5]], 5), (["\n\n", "", text[3:5]], 5)):
        expected, result = assert_equal(model, name, until=until)
        assert len(expected) == (letters + 1) // 2 and result.finish_reason == "stop"


def test_a_stop_string_that_begins_in_the_prompt_ends_the_answer_as_in_stock(configured):
    name = "llama"
    model, inputs = configured(name), zoo.prompt(name)
    spelled = common.tokenizer().decode(inputs["input_ids"][0].tolist() + stock(model, inputs))
    cut = 2 * inputs["input_ids"].shape[1]
    expected, result = assert_equal(model, name, stop_strings=[spelled[cut - 3 : cut + 2]])
    assert len(expected) == 1 and result.finish_reason == "stop" and result.answer == spelled[cut : cut + 2]


def test_eos_and_stop_string_in_the_same_token_is_eos(configured):
    name = "qwen2_5_vl"
    free = stock(zoo.model(name), zoo.prompt(name))
    model = configured(name, eos_token_id=free[2])
    _, result = assert_equal(model, name, stop_strings=[common.tokenizer().decode(free[1:3])])
    assert result.finish_reason == "eos"
    [own] = common.alone(model, name, common.encoded(name), common.full_cells(("paper",)), common.rules(
        model, stop_strings=[common.tokenizer().decode(free[1:3])]))  # fmt: skip
    assert own.finish_reason == "eos"


@pytest.mark.parametrize("name", zoo.FEW)
def test_pad_ids_that_a_prompt_means_as_text_are_not_masked(name):
    """Given no mask, generate() would hide them; the engine and its counterpart both let the model read them."""
    model, inputs = zoo.model(name), zoo.prompt(name)
    ids = inputs["input_ids"].clone()
    ids[0, [1, -4, -2]] = model.generation_config.pad_token_id
    inputs = zoo.with_ids(name, inputs, ids)
    expected, _ = assert_equal(model, name, inputs)
    hidden = stock(model, {key: value for key, value in inputs.items() if key != "attention_mask"})
    [own] = common.alone(
        model, name, common.encoded(name, inputs), common.full_cells(("paper",)), common.rules(model, TOKENS)
    )
    assert own.token_ids == expected
    assert hidden != expected, "the case is empty: hiding the pad ids changes nothing here"


@cover.few("name", zoo.MULTIMODAL, keep=4)
def test_text_prompt_after_a_visual_one_is_answered_as_by_a_fresh_model(name):
    """Qwen-VL models remember the last prompt's position offset in a shared attribute; the engine never reads it."""
    text, fresh = zoo.without_visual(name), zoo.build(name)
    expected = stock(fresh, text)
    model, rules = zoo.model(name), common.rules(zoo.model(name), TOKENS)
    cells = common.full_cells(("paper", "strict"))
    with torch.no_grad():
        model(**zoo.prompt(name))
    for result in common.together(model, name, common.encoded(name, text), cells, rules):
        assert result.token_ids == expected
    assert stock(model, zoo.prompt(name)) == common.together(
        model, name, common.encoded(name), cells[:1], rules
    )[0].token_ids  # fmt: skip
