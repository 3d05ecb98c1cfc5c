"""Prompts of an exact number of tokens, made up by a seed: no data are needed, and every cell reads the same ones."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import torch

from mmkv_bench.efficiency.kinds import DATASETS, SCHEMES
from mmkv_bench.efficiency.kinds import TEXT as KIND
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation.encode import EncodedPrompt, from_tensors

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel

TEXT, SCHEME = DATASETS[KIND], SCHEMES[KIND]

_WHO = (
    "The baker",
    "A sailor",
    "Her uncle",
    "The old clock",
    "Our neighbour",
    "The engine",
    "A small dog",
    "The council",
)
_DID = ("found", "carried", "described", "painted", "counted", "lost", "repaired", "sold")
_WHAT = (
    "a red lamp",
    "the wooden bridge",
    "seven letters",
    "two green doors",
    "the harbour map",
    "a silver coin",
    "the roof",
)
_WHERE = (
    "near the station",
    "behind the mill",
    "in the north of the town",
    "at the river",
    "under the stairs",
    "in the square",
)
_SENTENCES = 64  # at a time, until there are tokens enough


def sentences(count: int, draw: random.Random) -> str:
    """So many sentences of plain English, each with a number of its own."""
    return "".join(
        f"{draw.choice(_WHO)} {draw.choice(_DID)} {draw.choice(_WHAT)} {draw.choice(_WHERE)} in {draw.randint(1500, 1999)}. "
        for _ in range(count)
    )


def text_prompt(loaded: LoadedModel, tokens: int, number: int = 0) -> EncodedPrompt:
    """A prompt of exactly `tokens` tokens: made-up sentences, cut behind the last of them. `encode_s` is the tokenizer's time.

    Args:
        number: of the sequence in its batch, from 0; each has sentences and random streams of its own.

    Raises:
        UnsupportedError: a tokenizer that makes nothing of plain English.
    """
    own = f"/{number}" if number else ""
    draw, text, before = random.Random(f"{TEXT}/{SCHEME}/{tokens}{own}"), "", -1
    while True:
        text += sentences(_SENTENCES, draw)
        start = time.perf_counter()
        ids: list[int] = _ids(loaded.tokenizer, text)
        seconds = time.perf_counter() - start
        if len(ids) >= tokens:
            break
        if len(ids) <= before:
            raise UnsupportedError(
                f"the tokenizer of {loaded.name} makes no tokens of plain English; choose another model"
            )
        before = len(ids)
        text += sentences(_SENTENCES * (tokens // max(len(ids), 1)), draw)
    inputs = {"input_ids": torch.tensor([ids[:tokens]])}
    prompt = from_tensors(f"{TEXT}/{tokens}{own}", inputs, loaded.family, seconds)
    if prompt.visual_tokens:
        raise UnsupportedError(
            f"the tokenizer of {loaded.name} makes visual tokens of plain English; choose another model"
        )
    return prompt


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])
