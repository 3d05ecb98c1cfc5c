"""Chats of the training in tokens: what the stock processor makes of a document and its questions, the answers in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmkv_bench.reader.documents import FORMS, PATCH, Document, as_text
from mmkv_bench.reader.tokenizer_and_processor import IMAGE_ID, SYSTEM

PICTURE = "<fake_token_around_image><global-img><image><fake_token_around_image>"


@dataclass(frozen=True)
class Chat:
    """A prompt with its answers, in tokens.

    ids: all tokens; places: for each answer the positions whose hidden states predict it; targets: for each answer the tokens to
    be predicted there, `<|im_end|>` last. In the video's template the token that follows an answer in `ids` is another.
    """

    ids: list[int]
    places: list[list[int]]
    targets: list[list[int]]


def chat(words: Any, paper: Document, turns: list[tuple[str, str]], text: bool = False) -> Chat:
    """Return the tokens of a chat, every answer in it: what the stock processor makes of the messages, and the last answer."""
    video = paper.form == "video" and not text
    ids: list[int] = []
    places: list[list[int]] = []
    targets: list[list[int]] = []
    encode = lambda part: words(part, add_special_tokens=False).input_ids  # noqa: E731
    for turn, (question, answer) in enumerate(turns):
        if video:
            start = "<|im_start|>User: " + video_text(len(paper.pages)) if turn == 0 else "User: "
            before, after, reply = (
                f"{start}{question}<end_of_utterance>\nAssistant:",
                "<end_of_utterance>\n",
                " " + answer,
            )
        else:
            shown = "" if turn else as_text(paper) + "\n\n" if text else PICTURE * len(paper.pages)
            head = "" if turn else f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
            before = f"{head}<|im_start|>user\n{shown}{question}<|im_end|>\n<|im_start|>assistant\n"
            after, reply = "<|im_end|>\n", answer
        ids += encode(before)
        said = encode(reply)
        first = len(ids) - 1
        ids += said
        places.append(list(range(first, len(ids))))
        targets.append([*said, words.eos_token_id])
        if turn + 1 < len(turns):
            ids += encode(after)
    return _expanded(Chat(ids, places, targets), (FORMS[paper.form][0] // PATCH) ** 2)


def video_text(frames: int) -> str:
    """Return what the processor writes for a video of one frame a second, with one `<image>` a frame."""
    number = {1: "one", 2: "two", 4: "four", 8: "eight"}[frames]
    shown = "".join(f"\nFrame from 00:{place:02d}:{PICTURE}" for place in range(frames))
    return f"You are provided the following series of {number} frames from a 0:00:{frames:02d} [H:MM:SS] video.\n{shown}\n\n"


def _expanded(short: Chat, tokens: int) -> Chat:
    """Repeat each `<image>` as often as a picture has visual tokens."""
    ids: list[int] = []
    moved: list[int] = []
    for token in short.ids:
        moved.append(len(ids) + (tokens - 1 if token == IMAGE_ID else 0))
        ids += [token] * (tokens if token == IMAGE_ID else 1)
    return Chat(ids, [[moved[place] for place in group] for group in short.places], short.targets)
