"""Synthetic prompts with an exact number of tokens: only text, or as many visual tokens as fit and then text.

A seed makes them equal for every method. The model's own processor and chat template encode media.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mmkv_bench.efficiency.plan import DATASETS, IMAGE, SCHEMES, TEXT, VIDEO
from mmkv_bench.efficiency.sizing import Rules, Size
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.base import PixelLimits
from mmkv_bench.generation.encode import EncodedPrompt, encode, from_tensors
from mmkv_bench.models.chat_template import rendered
from mmkv_bench.models.load import LoadedModel

LEAST_TEXT = 16
"""Minimum number of text tokens behind a prompt's media, in place of a question."""
_EXTRA_TOKENS = 64  # extra tokens of text: where words meet, the tokenizer may make fewer tokens
_MAX_ATTEMPTS = 4  # media are resized if the processor writes more tokens beside them than expected
_SENTENCES = 64  # sentences added at a time, until there are enough tokens
_RECTANGLES, _STEP_PIXELS = 80, 4  # rectangles of a picture; pixels that a scene moves between two frames
# fmt: off
_SUBJECTS = ["The baker", "A sailor", "Her uncle", "The old clock", "Our neighbour", "The engine", "A small dog", "The council"]
_VERBS = ["found", "carried", "described", "painted", "counted", "lost", "repaired", "sold"]
_OBJECTS = ["a red lamp", "the wooden bridge", "seven letters", "two green doors", "the harbour map", "a silver coin", "the roof"]
_LOCATIONS = ["near the station", "behind the mill", "in the north of the town", "at the river", "under the stairs",
          "in the square"]
# fmt: on


def sentences(count: int, draw: random.Random) -> str:
    """Return `count` English sentences as one text."""
    return "".join(
        f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)} {draw.choice(_LOCATIONS)} in "
        f"{draw.randint(1500, 1999)}. "
        for _ in range(count)
    )


def text_prompt(loaded: LoadedModel, tokens: int, number: int = 0) -> EncodedPrompt:
    """Return a prompt of exactly `tokens` tokens of synthetic sentences. Its `encode_s` is the tokenizer's time.

    number: index of the sequence in its batch, from 0. Each sequence has its own sentences and random streams.

    Raises UnsupportedError: the tokenizer makes no tokens, or visual tokens, from plain English.
    """
    suffix = f"/{number}" if number else ""
    generator, text, previous_length = random.Random(f"{DATASETS[TEXT]}/{SCHEMES[TEXT]}/{tokens}{suffix}"), "", -1
    while True:
        text += sentences(_SENTENCES, generator)
        start_time = time.perf_counter()
        ids = list(loaded.tokenizer(text)["input_ids"])
        seconds = time.perf_counter() - start_time
        if len(ids) >= tokens:
            break
        if len(ids) <= previous_length:
            raise UnsupportedError(
                f"the tokenizer of {loaded.name} makes no tokens from plain English; choose another model"
            )
        previous_length = len(ids)
        text += sentences(_SENTENCES * (tokens // max(len(ids), 1)), generator)
    inputs = {"input_ids": torch.tensor([ids[:tokens]])}
    prompt = from_tensors(f"{DATASETS[TEXT]}/{tokens}{suffix}", inputs, loaded.family, seconds)
    if prompt.visual_tokens:
        raise UnsupportedError(
            f"the tokenizer of {loaded.name} makes visual tokens from plain English; choose another model"
        )
    return prompt


def visual_prompt(
    loaded: LoadedModel,
    kind: str,
    tokens: int,
    frames: int | None = None,
    video_max_pixels: int | None = None,
    number: int = 0,
) -> EncodedPrompt:
    """Return a prompt of exactly `tokens` tokens: as many visual tokens as fit, then text.

    Its `encode_s` is the time of processor and tokenizer.

    Args:
        kind: `image` or `video`.
        frames, video_max_pixels: the settings of the run's `model`.
        number: index of the sequence in its batch, from 0. Sequences have pictures of equal sizes and different text.

    Raises:
        ConfigError: the length is too short for the smallest picture.
        UnsupportedError: the processor does not take such media.
    """
    limits = PixelLimits(video_max_pixels=video_max_pixels if kind == VIDEO else None)
    suffix = f"/{number}" if number else ""
    name, identity = f"{DATASETS[kind]}/{SCHEMES[kind]}/{tokens}{suffix}", f"{DATASETS[kind]}/{tokens}{suffix}"
    rules = Rules.of(loaded.family.model_type, loaded.processor, limits, frames)
    tokens_without_media, tokens_with_one, tokens_with_two = (
        len(_ids(loaded, [{"type": kind}] * text_tokens, "")) for text_tokens in range(3)
    )
    markers_per_medium = tokens_with_two - tokens_with_one - 1  # visual tokens replace one marker of a medium
    extra_tokens = _EXTRA_TOKENS
    for _ in range(_MAX_ATTEMPTS):
        media, visual_tokens = _media(
            rules, kind, random.Random(name), tokens - LEAST_TEXT - tokens_without_media, markers_per_medium
        )
        if not media:
            raise ConfigError(
                f"lengths={tokens} is too short for any {kind} of {loaded.name} beside {tokens_without_media} tokens "
                "of its template "
                f"and {LEAST_TEXT} of a question; give longer lengths, or prompts=text"
            )
        text, text_tokens = _text(
            loaded, random.Random(f"{name}/text"), tokens - visual_tokens - tokens_without_media + extra_tokens
        )
        prompt = _encode_prompt(loaded, identity, kind, media, text, video_max_pixels)
        tokens_beside_text = prompt.length - text_tokens  # everything except the text
        if tokens_beside_text + LEAST_TEXT <= tokens <= prompt.length:
            return _shorten(prompt, prompt.length - tokens, _template_tail_length(loaded, kind, len(media)))
        extra_tokens += max(0, tokens - prompt.length)
        markers_per_medium = max(
            markers_per_medium, -(-(tokens_beside_text - tokens_without_media - visual_tokens) // len(media))
        )
    raise ConfigError(
        f"lengths={tokens}: {type(loaded.processor).__name__} makes {kind}s of other lengths than its family's "
        "rule; use prompts=text"
    )


def _media(rules: Rules, kind: str, draw: random.Random, room: int, each: int) -> tuple[list[Any], int]:
    """Draw the pictures or the video of a prompt; none if nothing fits. Return also the number of their visual tokens.

    room: tokens for all media. each: further tokens per medium (markers).
    """
    if kind == IMAGE:
        picture_sizes = rules.pictures(room, each)
        return [picture(size, draw) for size in picture_sizes], sum(
            rules.picture_tokens(size, len(picture_sizes)) for size in picture_sizes
        )
    video_size = rules.video(room - each)
    return ([video(*video_size, draw)], rules.video_tokens(*video_size)) if video_size else ([], 0)


def _text(loaded: LoadedModel, draw: random.Random, least: int) -> tuple[str, int]:
    text, text_tokens = "", 0
    while text_tokens < least:
        text += sentences(max(4, (least - text_tokens) // 16), draw)
        text_tokens = len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
    return text.strip(), text_tokens


def _encode_prompt(
    loaded: LoadedModel, identity: str, kind: str, media: list[Any], text: str, video_max_pixels: int | None
) -> EncodedPrompt:
    """Return the encoded prompt, kept on the host to save device memory. identity: seeds its random streams."""
    content = [*({"type": kind} for _ in media), {"type": "text", "text": text}]
    images, videos = (media, []) if kind == IMAGE else ([], media)
    return encode(
        loaded.processor,
        replace(loaded.family, max_context=None),  # the text is cut later
        identity,
        [{"role": "user", "content": content}],
        images,
        videos,
        frames=len(videos[0]) if videos else None,
        video_max_pixels=video_max_pixels,
        replays=True,
    )


def _shorten(prompt: EncodedPrompt, excess: int, tail: int) -> EncodedPrompt:
    """Return a prompt without the last `excess` tokens of its text. tail: number of the template's tokens behind it."""
    text_end = prompt.length - tail

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:, : text_end - excess], tensor[:, text_end:]], 1)

    inputs = {
        name: cut(tensor) if tensor.ndim == 2 and tensor.shape == prompt.input_ids.shape else tensor
        for name, tensor in prompt.inputs.items()
    }
    return replace(prompt, inputs=inputs, types=cut(prompt.types))


def _template_tail_length(loaded: LoadedModel, kind: str, count: int) -> int:
    """Return the number of tokens that the chat template puts behind a message's text. count: number of media."""
    ids_from_end, other_ids_from_end = (_ids(loaded, [{"type": kind}] * count, text)[::-1] for text in ("One", "Two"))
    return next(
        place for place, pair in enumerate(zip(ids_from_end, other_ids_from_end, strict=False)) if pair[0] != pair[1]
    )


def _ids(loaded: LoadedModel, media: list[dict[str, str]], text: str) -> list[int]:
    """Return the token ids of a message in the chat template, with markers for media."""
    messages = [{"role": "user", "content": [*media, {"type": "text", "text": text}]}]
    return list(loaded.tokenizer(rendered(loaded.processor, messages))["input_ids"])


def picture(size: Size, draw: random.Random) -> Any:
    """Return a random RGB image (PIL) of the given size."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", size, _colour(draw))
    canvas = ImageDraw.Draw(image)
    for _ in range(_RECTANGLES):
        left, top = draw.randrange(size.width), draw.randrange(size.height)
        right, bottom = left + draw.randint(1, size.width // 4 + 1), top + draw.randint(1, size.height // 4 + 1)
        canvas.rectangle((left, top, right, bottom), fill=_colour(draw), outline=_colour(draw))
    return image


def video(frames: int, size: Size, draw: random.Random) -> np.ndarray:
    """Return a random video of a moving scene, uint8 `[frames, height, width, 3]`."""
    scene = np.asarray(picture(Size(size.width + _STEP_PIXELS * frames, size.height), draw))
    return np.stack([scene[:, _STEP_PIXELS * place : _STEP_PIXELS * place + size.width] for place in range(frames)])


def _colour(draw: random.Random) -> tuple[int, int, int]:
    return draw.randrange(256), draw.randrange(256), draw.randrange(256)
