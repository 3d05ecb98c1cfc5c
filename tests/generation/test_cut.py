"""Prompts of text that are too long, cut in the middle as LongBench cuts them."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation.cut import fitted, prompt_limit
from mmkv_bench.generation.encode import encode
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.models.families import family_of
from mmkv_bench.models.processors import build_processor
from tests.each import each
from tests.models.checkpoints import SETTINGS, small_config

MIDDLE = {"cut_prompt": "middle"}


@functools.cache
def built(name: str):
    config = small_config(name)
    processor = build_processor(config, SETTINGS[name])
    return processor, family_of(config, getattr(processor, "tokenizer", processor))


def llama():
    return built("llama")


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def text_of(messages: list[dict]) -> str:
    return messages[0]["content"][0]["text"]


def length(messages: list[dict]) -> int:
    processor, family = llama()
    return encode(processor, family, "x", messages).length


@settings(max_examples=25, deadline=None)
@given(st.text("abcdefgh .", min_size=0, max_size=300), st.integers(40, 400))
def test_both_ends_stay_and_the_prompt_fits(text, limit):
    overhead = length(user(""))
    if limit < overhead + 2:
        return
    cut = fitted(llama()[0], user(text), MIDDLE, limit)
    assert length(cut) <= limit
    kept = text_of(cut)
    if overhead + len(text) <= limit:  # one token a letter
        assert kept == text
    else:
        half = (limit - overhead) // 2
        assert kept == text[:half] + text[-half:]


@pytest.mark.parametrize("name", ["llava", "llava_next_mistral", "qwen2_5_vl", "internvl", "llama"])
def test_what_is_cut_has_the_length_that_encoding_gives_it_with_every_way_to_begin_a_prompt(name):
    processor, family = built(name)
    text = "abc def ghi " * 100
    empty = encode(processor, family, "x", user("")).length
    for limit in (299, 300, 301, 302):
        cut = fitted(processor, user(text), MIDDLE, limit)
        assert encode(processor, family, "x", cut, max_prompt_tokens=limit).length in (limit - 1, limit)
    for size in (empty + 50, empty + 51):  # a prompt that fits to the token stays, one that lacks one is cut
        kept = fitted(processor, user("x" * 50), MIDDLE, size)
        assert encode(processor, family, "x", kept, max_prompt_tokens=size).length == empty + 50
    assert len(text_of(fitted(processor, user("x" * 50), MIDDLE, empty + 49))) == 48


def test_a_text_with_a_media_marker_is_refused_and_not_cut():
    with pytest.raises(UnsupportedError, match="<image>"):
        fitted(built("llava")[0], user("a" * 200 + "<image>" + "b" * 200), MIDDLE, 300)


def test_a_dataset_that_does_not_ask_keeps_its_prompt():
    assert fitted(llama()[0], user("x" * 100), {}, 10) == user("x" * 100)
    assert fitted(llama()[0], user("x" * 100), MIDDLE, None) == user("x" * 100)


def test_nothing_is_left_of_a_template_that_fills_the_limit():
    with pytest.raises(UnsupportedError, match="its template alone has"):
        fitted(llama()[0], user("x" * 100), MIDDLE, length(user("")) + 1)


@each(
    "messages",
    [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}],
        [*user("a"), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}, *user("c")],
        [{"role": "user", "content": []}],
    ],
)
def test_media_and_several_turns_are_not_cut(messages):
    with pytest.raises(UnsupportedError, match="one user message of text"):
        fitted(llama()[0], messages, MIDDLE, 5)


def test_the_limit_leaves_room_for_the_answer():
    assert prompt_limit(None, None, 64) is None
    assert prompt_limit(None, 8192, 64) == 8128
    assert prompt_limit(7950, 8192, 64) == 7950
    assert prompt_limit(7950, 8000, 512) == 7488


def test_another_way_of_cutting_is_refused_before_any_work():
    from transformers import GenerationConfig

    assert DecodeRules.read(GenerationConfig(), {"max_new_tokens": 4, **MIDDLE}).max_new_tokens == 4
    with pytest.raises(UnsupportedError, match="cut_prompt='left' is not known; give middle"):
        DecodeRules.read(GenerationConfig(), {"max_new_tokens": 4, "cut_prompt": "left"})
