"""Prompts that are too long: text cut in the middle as LongBench cuts it, text and images from the left as MileBench does."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.facts import model_facts
from mmkv_bench.generation.encode import encode
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.generation.smaller_prompts import fitted, middle, prompt_limit
from tests import cover
from tests.each import each
from tests.models.checkpoints import processor as processor_of
from tests.models.checkpoints import small_config

MIDDLE, LEFT = {"cut_prompt": "middle"}, {"cut_prompt": "left"}


@functools.cache
def built(name: str):
    config, processor = small_config(name), processor_of(name)
    return processor, model_facts(config, getattr(processor, "tokenizer", processor))


def llama():
    return built("llama")


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def text_of(messages: list[dict]) -> str:
    return messages[0]["content"][0]["text"]


def length(messages: list[dict]) -> int:
    processor, family = llama()
    return encode(processor, family, "x", messages).length


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.text("abcdefgh .", min_size=0, max_size=300).map(str.strip), st.integers(40, 400))
def test_both_ends_stay_and_the_prompt_fits(text, limit):
    overhead = length(user(""))
    if limit < overhead + 2:
        return
    cut = middle(llama()[0], user(text), limit)
    assert length(cut) <= limit
    kept = text_of(cut)
    if overhead + len(text) <= limit:  # one token a letter; the template drops spaces at both ends
        assert kept == text
    else:
        half = (limit - overhead) // 2
        assert kept == text[:half] + text[-half:]


@pytest.mark.slow
@cover.few("name", ["llava", "llava_next_mistral", "qwen2_5_vl", "internvl", "llama"], keep=2)
def test_what_is_cut_has_the_length_that_encoding_gives_it_with_every_way_to_begin_a_prompt(name):
    processor, family = built(name)
    text = "abc def ghi " * 100
    empty = encode(processor, family, "x", user("")).length
    for limit in (299, 300, 301, 302):
        cut = middle(processor, user(text), limit)
        assert encode(processor, family, "x", cut, max_prompt_tokens=limit).length in (limit - 1, limit)
    for size in (empty + 50, empty + 51):  # a prompt that fits to the token stays, one that lacks one is cut
        kept = middle(processor, user("x" * 50), size)
        assert encode(processor, family, "x", kept, max_prompt_tokens=size).length == empty + 50
    assert len(text_of(middle(processor, user("x" * 50), empty + 49))) == 48


def test_a_text_with_a_media_marker_is_refused_and_not_cut():
    with pytest.raises(UnsupportedError, match="<image>"):
        middle(built("llava")[0], user("a" * 200 + "<image>" + "b" * 200), 300)


def test_a_dataset_that_does_not_ask_keeps_its_prompt():
    for way, limit in (({}, 10), (MIDDLE, None), (LEFT, None)):
        assert fitted(llama()[0], user("x" * 100), [], way, limit) == (user("x" * 100), [])


def test_nothing_is_left_of_a_template_that_fills_the_limit():
    with pytest.raises(UnsupportedError, match="its template alone has"):
        fitted(llama()[0], user("x" * 100), [], MIDDLE, length(user("")) + 1)


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
        fitted(llama()[0], messages, [], MIDDLE, 5)


def test_the_limit_leaves_room_for_the_answer():
    assert prompt_limit(None, None, 64) is None
    assert prompt_limit(None, 8192, 64) == 8128
    assert prompt_limit(7950, 8192, 64) == 7950
    assert prompt_limit(7950, 8000, 512) == 7488


def test_another_way_of_cutting_is_refused_before_any_work():
    from transformers import GenerationConfig

    for way in (MIDDLE, LEFT):
        assert DecodeRules.read(GenerationConfig(), {"max_new_tokens": 4, **way}).max_new_tokens == 4
    with pytest.raises(UnsupportedError, match="cut_prompt='right'; allowed: middle"):
        DecodeRules.read(GenerationConfig(), {"max_new_tokens": 4, "cut_prompt": "right"})


# ---------------------------------------------------------------- from the left


def picture(number: int) -> Image.Image:
    return Image.new("RGB", (56, 56), (40 * number % 256, 90, 10))


def interleaved(pieces: list[str | None]) -> tuple[list[dict], list[Image.Image]]:
    """None is an image; images differ, so that it shows which are left."""
    parts = [{"type": "image"} if piece is None else {"type": "text", "text": piece} for piece in pieces]
    images = [picture(number) for number in range(pieces.count(None))]
    return [{"role": "user", "content": parts}], images


def size(name: str, messages: list[dict], images: list) -> int:
    processor, family = built(name)
    return encode(processor, family, "x", messages, images).length


def slowly_cut(name: str, head: str, pieces: list[str | None], limit: int) -> tuple[list[dict], list[Image.Image]]:
    """MileBench's way, piece by piece from the end: the last text whole or its end, then what still fits."""
    images = [picture(number) for number in range(pieces.count(None))]
    first = [{"type": "text", "text": head}] if head else []
    kept: list[dict] = []
    for piece in reversed(pieces):
        more = [{"type": "image"} if piece is None else {"type": "text", "text": piece}, *kept]
        own = sum(part["type"] == "image" for part in more)
        turn = [{"role": "user", "content": [*first, *more]}]
        if size(name, turn, images[len(images) - own :]) > limit:
            break
        kept = more
    if not kept:
        text = pieces[-1]
        while size(name, [{"role": "user", "content": [*first, {"type": "text", "text": text}]}], []) > limit:
            text = text[1:]
        kept = [{"type": "text", "text": text}]
    own = sum(part["type"] == "image" for part in kept)
    return [{"role": "user", "content": [*first, *kept]}], images[len(images) - own :]


@cover.few("name", ["qwen2_5_vl", "llava", "internvl"])
def test_from_the_left_whole_pieces_go_until_the_rest_fits_and_the_instruction_stays(name):
    head = "Compare. "
    pieces = ["first ", None, "second one ", None, None, "third ", None, "and the question?"]
    messages, images = interleaved([head + pieces[0], *pieces[1:]])
    whole = size(name, messages, images)
    least = size(name, user(head), [])
    seen = set()
    for limit in sorted({whole, *range(least + 3, whole, max(1, (whole - least) // 6))}, reverse=True):
        got, left = fitted(built(name)[0], messages, images, LEFT, limit, head)
        assert size(name, got, left) <= limit
        want, theirs = (messages, images) if limit == whole else slowly_cut(name, head, pieces, limit)
        assert got == want and [image.getpixel((0, 0)) for image in left] == [i.getpixel((0, 0)) for i in theirs]
        seen.add(len(left))
    assert 4 in seen and len(seen) > 2


def test_a_prompt_without_an_instruction_and_one_that_leaves_no_room():
    messages, images = interleaved(["before ", None, "after?"])
    got, left = fitted(built("qwen2_5_vl")[0], messages, images, LEFT, size("qwen2_5_vl", user("after?"), []))
    assert got == user("after?") and left == []
    with pytest.raises(UnsupportedError, match="from the left: its template, its instruction and its last piece"):
        fitted(built("qwen2_5_vl")[0], messages, images, LEFT, 3, "before ")
    with pytest.raises(UnsupportedError, match="does not begin with it"):
        fitted(built("qwen2_5_vl")[0], messages, images, LEFT, 3, "another")


def test_several_turns_are_not_cut_from_the_left():
    turns = [*user("a"), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}, *user("c")]
    with pytest.raises(UnsupportedError, match="one user message of text and images"):
        fitted(llama()[0], turns, [], LEFT, 5)
