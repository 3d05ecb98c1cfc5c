"""Prompts of text and images that a model cannot read whole, cut from the left behind their instruction.

MileBench (Song et al. 2024, utils.py of its code) keeps a sample's instruction and goes through the rest from its end, a
piece of text or an image at a time, until the next one does not fit; of a last piece of text that is too long by itself it
keeps the end. A dataset asks for it with the generation setting `cut_prompt: left`. The benchmark adds up an estimate (576
tokens an image) up to the whole context; here prompts are counted as the model reads them, with its template, and the answer
keeps its room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation.encode import prompt_length


def cut_from_left(
    processor: Any, messages: Sequence[dict], images: Sequence, instruction: str, limit: int | None
) -> tuple[list[dict], list]:
    """The messages and images that are left of a prompt, all of them where it has at most `limit` tokens.

    The number of tokens is taken to grow with the pieces that are kept.

    Args:
        instruction: text that the first message begins with and that stays, "" for none.
        limit: None = any number of tokens.

    Raises:
        UnsupportedError: messages that are not one user's text and images, or a limit that leaves no text.
    """
    if limit is None:
        return list(messages), list(images)
    parts = _parts(messages)
    whole = prompt_length(processor, messages, images)
    if whole <= limit:
        return list(messages), list(images)
    head, rest = _behind(parts, instruction)

    def kept(count: int, last: str | None = None) -> tuple[list[dict], list]:
        """The prompt with the last `count` pieces, or with `last` alone."""
        tail = rest[len(rest) - count :] if last is None else [{"type": "text", "text": last}]
        own = sum(part["type"] == "image" for part in tail)
        return [{"role": messages[0]["role"], "content": [*head, *tail]}], list(images)[len(images) - own :]

    def fits(prompt: tuple[list[dict], list]) -> bool:
        return prompt_length(processor, *prompt) <= limit

    low, high = 0, len(rest) - 1  # so many pieces fit; so many may
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(kept(middle)) else (low, middle - 1)
    if low:
        return kept(low)
    return _end_of(
        processor, rest[-1], kept, fits, f"a prompt of {whole} tokens cannot be cut to {limit} from the left"
    )


def _end_of(processor: Any, piece: dict, kept: Any, fits: Any, refusal: str) -> tuple[list[dict], list]:
    """The instruction and as many of the last tokens of a piece of text as fit."""
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = tokenizer(piece["text"], add_special_tokens=False)["input_ids"] if piece["type"] == "text" else []
    low, high = 0, len(ids)

    def prompt(count: int) -> tuple[list[dict], list]:
        end = tokenizer.decode(ids[len(ids) - count :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return kept(0, end)

    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(prompt(middle)) else (low, middle - 1)
    if not low:
        raise UnsupportedError(
            f"{refusal}: its template, its instruction and its last piece do not fit; raise model.max_prompt_tokens or "
            "lower max_new_tokens"
        )
    return prompt(low)


def _parts(messages: Sequence[dict]) -> list[dict]:
    """Pieces of a prompt that is one user message of text and images."""
    content = messages[0]["content"] if len(messages) == 1 else None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not parts or any(part["type"] not in ("text", "image") for part in parts):
        raise UnsupportedError(
            "cut_prompt=left cuts one user message of text and images; a prompt with videos or several turns stays whole"
        )
    return list(parts)


def _behind(parts: Sequence[dict], instruction: str) -> tuple[list[dict], list[dict]]:
    """The instruction as a piece, and the pieces behind it."""
    if not instruction:
        return [], list(parts)
    first = parts[0].get("text", "")
    if not first.startswith(instruction):
        raise UnsupportedError(
            "cut_prompt=left keeps the prompt's instruction, and this prompt does not begin with it; give "
            "cut_prompt=null"
        )
    behind = first[len(instruction) :]
    own = [{"type": "text", "text": behind}] if behind else []
    return [{"type": "text", "text": instruction}], [*own, *parts[1:]]
