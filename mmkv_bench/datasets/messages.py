"""Convert lmms-eval's chat messages to the Hugging Face chat format, with media in separate lists, and hash the prompt."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mmkv_bench.errors import DataError, UnsupportedError
from mmkv_bench.file_state import State, state_of

if TYPE_CHECKING:
    from PIL import Image


WORD = "<image>"  # a dataset's placeholder for an image in a text


class Conversation(NamedTuple):
    """A prompt: chat messages with placeholders for media, and the images and videos in the order of the placeholders."""

    messages: list[dict[str, Any]]
    images: list[Image.Image]
    videos: list[Any]


def to_prompt(messages: Sequence[dict[str, Any]], task: str) -> Conversation:
    """Convert chat messages of an lmms-eval task to a `Conversation` with RGB images.

    messages: {"role", "content": text or parts}; the path of an image or video is a local file. task: its name, for
    error messages.

    Raises:
        DataError: missing or broken media.
        UnsupportedError: audio and unknown types of parts.
    """
    images: list[Image.Image] = []
    videos: list[Any] = []
    turns = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        turns.append({"role": message["role"], "content": [_part(part, images, videos, task) for part in parts]})
    return Conversation(turns, images, videos)


def _part(part: dict[str, Any], images: list, videos: list, task: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    medium = part.get("url", part.get(str(kind)))
    if kind == "audio" and str(medium).lower().endswith(".webm"):  # lmms-eval takes every .webm for sound
        kind = "video"
    if kind == "image":
        images.append(_image(medium, task))
    elif kind == "video":
        videos.append(_video(medium, part, task))
    else:
        raise UnsupportedError(f"task {task} sends a message part of type {kind!r}; allowed: text, image, video")
    return {"type": kind}


def _image(medium: Any, task: str) -> Image.Image:
    from PIL import Image

    try:
        image = Image.open(medium) if isinstance(medium, str | os.PathLike) else medium
        image.load()  # decode a file now, not when its pixels are first needed
        return image if image.mode == "RGB" else image.convert("RGB")
    except (OSError, AttributeError) as error:
        displayed_name = os.path.basename(medium) if isinstance(medium, str) else type(medium).__name__
        # without the path, which differs between machines
        reason = getattr(error, "strerror", None) or str(error).partition(" '")[0] or type(error).__name__
        raise DataError(f"task {task}: image {displayed_name} cannot be read ({reason}); restore the file") from error


def stated(error: BaseException) -> str:
    """Return an exception's text without memory addresses, so that the text is the same in every run."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "an image does not decode (UnidentifiedImageError)"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(error))


def _video(medium: Any, part: dict[str, Any], task: str) -> Any:
    """Return the video of a message part: a path, frames, or {"video": path, "start_time", "end_time"} for a time span.

    lmms-eval states the span either beside the path (`start_time`) or in a dict with the path (`video_start`).
    """
    fields = dict(part)
    if isinstance(medium, dict):
        fields |= medium
        medium = medium.get("url") or medium.get("path") or medium.get("video")
    if medium is None:
        raise UnsupportedError(f"task {task} sends a video without a path (keys: {', '.join(sorted(fields))})")
    if isinstance(medium, str) and not os.path.isfile(medium):
        raise DataError(
            f"task {task}: video {os.path.basename(medium)} is missing; put the videos into the folder that the task's YAML names"
        )
    times = {"start_time": ("start_time", "video_start"), "end_time": ("end_time", "video_end")}
    values = {key: [fields[name] for name in names if fields.get(name) is not None] for key, names in times.items()}
    span = {key: float(numbers[0]) for key, numbers in values.items() if numbers}
    return {"video": medium, **span} if span else medium


def with_placeholders(prompt: Conversation, use: str | None, dataset: str) -> Conversation:
    """Return the prompt with the text `<image>` in its messages replaced or removed.

    Args:
        use: `interleave` replaces each `<image>` by the message's next image, in messages with any `<image>`. `remove`
            deletes each `<image>`, and images keep their positions. None changes nothing.
        dataset: the dataset's name, for messages.

    Raises:
        DataError: `use` is `interleave`, and a message has a different number of `<image>` than of images.
    """
    if use is None:
        return prompt
    turns = [turn | {"content": _placed(turn["content"], use, dataset)} for turn in prompt.messages]
    return prompt._replace(messages=turns)


def _placed(parts: Sequence[dict[str, Any]], use: str, dataset: str) -> list[dict[str, Any]]:
    markers = sum(part["text"].count(WORD) for part in parts if part["type"] == "text")
    images = sum(part["type"] == "image" for part in parts)
    if markers == 0:
        return list(parts)
    if use == "remove":
        return [part | {"text": part["text"].replace(WORD, "")} if part["type"] == "text" else part for part in parts]
    if markers != images:
        raise DataError(
            f"the text has {WORD} {markers} times but comes with {images} images, so their positions are unknown; set "
            f"datasets.{dataset}.placeholders=remove to put the images before the text"
        )
    interleaved = []
    for part in parts:
        if part["type"] == "text":
            for place, text in enumerate(part["text"].split(WORD)):
                interleaved += [{"type": "image"}] * (place > 0) + [{"type": "text", "text": text}] * bool(text)
        elif part["type"] != "image":
            interleaved.append(part)
    return interleaved


def with_question(messages: Sequence[dict[str, Any]], context: str, question: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt with `question` in place of the text after the document.

    The document ends with the text `context` in the last message, or with that message's last image or video.

    Raises:
        DataError: the last message has neither.
    """
    turns = [dict(turn, content=list(turn["content"])) for turn in messages]
    parts = turns[-1]["content"]
    for place in reversed(range(len(parts))):
        part = parts[place]
        if part["type"] != "text":
            turns[-1]["content"] = [*parts[: place + 1], {"type": "text", "text": question}]
            return turns
        if context and context in part["text"]:
            context_end = part["text"].index(context) + len(context)
            turns[-1]["content"] = [*parts[:place], {"type": "text", "text": part["text"][:context_end] + question}]
            return turns
    raise DataError(
        "the last message has neither the document's text nor an image or video, so its question cannot be replaced"
    )


def question_text(messages: Sequence[dict[str, Any]], context: str) -> str:
    """Return the text that `with_question` would replace.

    Raises:
        DataError: the last message does not end with one text after the document.
    """
    parts = messages[-1]["content"]
    if parts and parts[-1]["type"] == "text":
        text = parts[-1]["text"]
        if context and context in text:
            return text[text.index(context) + len(context) :]
        if len(parts) > 1 and parts[-2]["type"] != "text":
            return text
    raise DataError(
        "the last message does not end with one text after the document's text or after an image or video, so its question "
        "cannot be separated from its document"
    )


def prompt_hash(prompt: Conversation) -> str:
    """Return a sha256 (hex) over a prompt's text, the positions of its media, and the size and pixels of every image.

    Of a video, the file's content or the pixels of decoded frames are hashed, without name and folder.
    """
    digest = hashlib.sha256(json.dumps(prompt.messages, sort_keys=True).encode())
    for image in prompt.images:
        digest.update(f"image {image.width}x{image.height}".encode())
        digest.update(image.tobytes())
    for video in prompt.videos:
        digest.update(b"video" + _video_bytes(video))
    return digest.hexdigest()


def _video_bytes(video: Any) -> bytes:
    if isinstance(video, str | os.PathLike):
        path = os.fspath(video)
        state = state_of(path)
        digest = _file_digest if state.settled else _file_digest.__wrapped__
        return digest(path, state)
    if isinstance(video, dict):
        return b"".join(key.encode() + _video_bytes(value) for key, value in sorted(video.items()))
    if isinstance(video, list | tuple):
        return b"".join(_video_bytes(frame) for frame in video)
    if hasattr(video, "tobytes"):  # PIL image or numpy frame
        return f"{getattr(video, 'size', '')}".encode() + video.tobytes()
    return repr(video).encode()


@functools.lru_cache(maxsize=1024)
def _file_digest(path: str, state: State) -> bytes:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
