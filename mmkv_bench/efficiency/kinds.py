"""Kinds of prompts of the scenario: the dataset's name in rows of each, and what a cell's identity holds of it. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from mmkv_bench.families.facts import ModelFacts

TEXT, IMAGE, VIDEO = "text", "image", "video"
DATASETS = {TEXT: "made_up_text", IMAGE: "made_up_image", VIDEO: "made_up_video"}
"""Kind -> the dataset's name in rows."""
SCHEMES = {TEXT: 1, IMAGE: 1, VIDEO: 1}
"""Versions of how prompts of a kind are made, part of every cell's identity."""
_KINDS = {name: kind for kind, name in DATASETS.items()}


def kind_of(dataset: str) -> str:
    """The kind of prompts whose dataset's name it is."""
    return _KINDS[dataset]


def refuse_blind(kind: str, family: ModelFacts) -> None:
    """Raises UnsupportedError where models of the family take no such media."""
    if kind != TEXT and kind not in family.rules.media:
        takes = ", ".join((TEXT, *family.rules.media))
        raise UnsupportedError(f"prompts={kind}: {family.name} takes no {kind}s; allowed for it: {takes}; choose one")


def refuse_textual(kind: str, method: str) -> None:
    """Raises ConfigError for a method that needs visual tokens beside prompts that have none."""
    if kind == TEXT:
        raise ConfigError(
            f"method {method} needs visual tokens and prompts=text have none; allowed: prompts=image or prompts=video; "
            "choose one, or leave the method out"
        )
