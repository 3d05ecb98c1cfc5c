"""Media of a prompt: identity by content, errors without a machine's paths."""

from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image

from mmkv_bench.datasets.messages import prompt_hash, to_prompt, with_placeholders, with_question
from mmkv_bench.errors import DataError, UnsupportedError
from tests.clips import write_clip
from tests.each import each


def asked(**part):
    return to_prompt([{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}], "task")


def test_a_video_counts_by_the_content_of_its_file(tmp_path):
    clip = write_clip(tmp_path / "a.mp4")
    original = prompt_hash(asked(type="video", url=str(clip)))
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "b.mp4"
    moved.write_bytes(clip.read_bytes())
    assert prompt_hash(asked(type="video", url=str(moved))) == original
    content = bytearray(clip.read_bytes())
    content[-1] ^= 1  # same name, same size
    clip.write_bytes(content)
    os.utime(clip, (1, 1))
    assert prompt_hash(asked(type="video", url=str(clip))) != original


def test_a_span_of_a_video_is_another_prompt(tmp_path):
    clip = str(write_clip(tmp_path / "a.mp4"))
    hashes = {
        prompt_hash(asked(type="video", url=clip, **span)) for span in ({}, {"start_time": 1.0}, {"start_time": 2.0})
    }
    assert len(hashes) == 3


@each(
    "part",
    [
        {"start_time": 1.0, "end_time": 2.0},
        {"video_start": 1, "video_end": 2},
        {"url": {"path": "a.mp4", "video_start": 1, "video_end": 2}},
        {"url": {"url": "a.mp4", "start_time": 1, "end_time": 2}},
    ],
)
def test_a_span_arrives_however_the_task_writes_it(tmp_path, monkeypatch, part):
    monkeypatch.chdir(tmp_path)
    write_clip(tmp_path / "a.mp4", frames=2)
    prompt = asked(type="video", **({"url": "a.mp4"} | part))
    assert prompt.videos == [{"video": "a.mp4", "start_time": 1.0, "end_time": 2.0}]
    assert prompt.messages[0]["content"][0] == {"type": "video"}


def test_a_webm_file_is_a_video_although_lmms_eval_takes_it_for_sound(tmp_path):
    clip = str(write_clip(tmp_path / "a.webm", frames=2))
    assert asked(type="audio", url=clip).videos == [clip]
    with pytest.raises(UnsupportedError, match="'audio'"):
        asked(type="audio", url=str(tmp_path / "a.wav"))


def test_ready_frames_count_by_their_pixels():
    frames = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(3)]
    one = prompt_hash(asked(type="video", video=frames))
    assert prompt_hash(asked(type="video", video=[frame.copy() for frame in frames])) == one
    assert prompt_hash(asked(type="video", video=frames[::-1])) != one
    assert prompt_hash(asked(type="video", video=np.zeros((3, 8, 8, 3), np.uint8))) != one


@each("content", [None, b"no picture", "cut"])
def test_an_image_file_that_does_not_decode_is_named_without_its_folder(tmp_path, content):
    path = tmp_path / "page.png"
    if content == "cut":
        Image.effect_noise((64, 64), 80).convert("RGB").save(path)
        path.write_bytes(path.read_bytes()[:500])
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"^task task: image page\.png cannot be read \(.+\); restore the file$"
    ) as refused:
        asked(type="image", url=str(path))
    assert str(tmp_path) not in str(refused.value)


def test_a_video_that_is_not_there_is_named_without_its_folder(tmp_path):
    with pytest.raises(DataError, match=r"^task task: video gone\.mp4 is missing") as refused:
        asked(type="video", url=str(tmp_path / "gone.mp4"))
    assert str(tmp_path) not in str(refused.value)


def pictured(*texts: str, images: int = 2):
    """A message of `images` pictures, each of its own size, before its texts, as lmms-eval builds it."""
    pictures = [{"type": "image", "url": Image.new("RGB", (8 + i, 8))} for i in range(images)]
    words = [{"type": "text", "text": text} for text in texts]
    return to_prompt([{"role": "user", "content": [*pictures, *words]}], "task")


def shown(prompt) -> list[str]:
    return [part.get("text", f"[{part['type']}]") for message in prompt.messages for part in message["content"]]


def test_interleaved_images_stand_in_order_where_the_text_says_so():
    prompt = pictured("Is <image> like", " this?\nA. <image>\nB. no")
    placed = with_placeholders(prompt, "interleave", "data")
    assert shown(placed) == ["Is ", "[image]", " like", " this?\nA. ", "[image]", "\nB. no"]
    assert [image.width for image in placed.images] == [8, 9]
    assert prompt_hash(placed) != prompt_hash(prompt)


def test_images_side_by_side_leave_no_empty_text_between():
    assert shown(with_placeholders(pictured("<image><image>?"), "interleave", "data")) == ["[image]", "[image]", "?"]


def test_a_text_without_the_word_keeps_its_images_before_it():
    prompt = pictured("What is it?")
    assert with_placeholders(prompt, "interleave", "data") == prompt


@each("text", ["<image>?", "<image> <image> <image>"])
def test_interleaving_another_number_of_images_is_an_error_that_names_the_other_way(text):
    with pytest.raises(DataError, match=r"comes with 2 images.*datasets\.data\.placeholders=remove"):
        with_placeholders(pictured(text), "interleave", "data")


def test_removed_words_leave_images_first_and_the_rest_of_the_text():
    assert shown(with_placeholders(pictured("Is <image> like <image>?"), "remove", "data")) == [
        "[image]",
        "[image]",
        "Is  like ?",
    ]


def test_without_a_use_the_word_is_text_like_any_other():
    prompt = pictured("Is <image> like <image>?")
    assert with_placeholders(prompt, None, "data") is prompt


def test_each_message_places_its_own_images():
    picture = {"type": "image", "url": Image.new("RGB", (8, 8))}
    turns = [
        {"role": "user", "content": [picture, {"type": "text", "text": "See <image>."}]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [picture, {"type": "text", "text": "And now?"}]},
    ]
    placed = with_placeholders(to_prompt(turns, "task"), "interleave", "data")
    assert shown(placed) == ["See ", "[image]", ".", "I see.", "[image]", "And now?"]


def test_another_question_stands_behind_the_document_or_the_last_picture():
    text = [{"role": "user", "content": [{"type": "text", "text": "A page. What?"}]}]
    picture = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "See"}, {"type": "image"}, {"type": "text", "text": "What?"}],
        }
    ]
    for messages, context, first in ((text, "A page.", text), (picture, "", picture)):
        own = " What?" if context else "What?"
        assert with_question(messages, context, own) == first, "its own question changes nothing"
        (turn,) = with_question(messages, context, "-Who?")
        assert [part.get("text") for part in turn["content"]] == (
            ["A page.-Who?"] if context else ["See", None, "-Who?"]
        )
    for messages, context in (
        (text, ""),
        (text, "Another page."),
        ([*picture, {"role": "user", "content": text[0]["content"]}], ""),
    ):
        with pytest.raises(DataError, match="neither the document's text nor an image"):
            with_question(messages, context, "Who?")
