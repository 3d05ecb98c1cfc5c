"""Prompts that a model cannot read whole: text cut in the middle; text and images from the left (`cut_left.py`).

LongBench (Bai et al. 2023, section 4.1 and pred.py of its code) keeps the first and the last half of the tokens that fit,
because instructions and questions stand at both ends. A dataset asks for it with the generation setting `cut_prompt: middle`;
without it a prompt that is too long is its sample's error. The lengths that LongBench's code cuts to are fixed by hand and a
little below the context of each model; here the template and the answer get the room they need and the text gets the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmkv_bench.errors import UnsupportedError

WAYS = (None, "middle", "left")


def check_way(way: Any) -> str | None:
    """The setting, if it is one that there is. Raises UnsupportedError."""
    if way not in WAYS:
        raise UnsupportedError(
            f"cut_prompt={way!r} is not known; give middle (text), left (text and images), or null to refuse prompts that are "
            "too long"
        )
    return way


def prompt_limit(max_prompt_tokens: int | None, max_context: int | None, max_new_tokens: int) -> int | None:
    """The most tokens that a prompt may have, None = any number: the configured limit, and what an answer leaves."""
    limits = [] if max_prompt_tokens is None else [max_prompt_tokens]
    limits += [] if max_context is None else [max_context - max_new_tokens]
    return min(limits, default=None)


def fitted(
    processor: Any,
    messages: Sequence[dict],
    images: Sequence,
    generation: Mapping[str, Any],
    limit: int | None,
    instruction: str = "",
) -> tuple[list[dict], list]:
    """The messages and images, cut if `generation` asks for it and the prompt has more than `limit` tokens.

    Args:
        instruction: what the prompt begins with and a cut from the left keeps.

    Raises:
        UnsupportedError: see `middle` and `cut_from_left`.
    """
    from mmkv_bench.generation.cut_left import cut_from_left

    way = check_way(generation.get("cut_prompt"))
    if way == "left":
        return cut_from_left(processor, messages, images, instruction, limit)
    return list(messages) if way is None else middle(processor, messages, limit), list(images)


def middle(processor: Any, messages: Sequence[dict], limit: int | None) -> list[dict]:
    """The messages, without their middle if the rendered prompt has more than `limit` tokens.

    Raises:
        UnsupportedError: messages that are not one user's text, a text with a media marker, or a limit that leaves nothing.
    """
    from mmkv_bench.generation.encode import prompt_length

    if limit is None:
        return list(messages)
    tokenizer = getattr(processor, "tokenizer", processor)
    text = _only_text(messages)
    whole = prompt_length(processor, messages)
    if whole <= limit:
        return list(messages)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    half = (limit - (whole - len(ids))) // 2
    while half > 0:
        ends = (ids[:half], ids[-half:])
        kept = "".join(
            tokenizer.decode(end, skip_special_tokens=True, clean_up_tokenization_spaces=False) for end in ends
        )
        cut = [{"role": messages[0]["role"], "content": [{"type": "text", "text": kept}]}]
        excess = prompt_length(processor, cut) - limit
        if excess <= 0:
            return cut
        half -= (excess + 1) // 2  # text that is cut anew may be a few tokens longer
    raise UnsupportedError(
        f"a prompt of {whole} tokens cannot be cut to {limit}: its template alone has {whole - len(ids)}; raise "
        "model.max_prompt_tokens or lower max_new_tokens"
    )


def _only_text(messages: Sequence[dict]) -> str:
    """The text of a prompt that is one user message of text."""
    content = messages[0]["content"] if len(messages) == 1 else None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not parts or any(part["type"] != "text" for part in parts):
        raise UnsupportedError(
            "cut_prompt=middle cuts one user message of text; a prompt with media or several turns stays whole"
        )
    return "".join(part["text"] for part in parts)
