"""Rows of the table `prompts`: a sample's question, for readers of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import UnsupportedError

if TYPE_CHECKING:
    from mmkv_bench.evaluation.samples import Request
    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.models.load import LoadedModel


def prompt_row(
    request: Request, dataset: str, fingerprint: str, visual: Sequence[float] | None, rendered: str | None
) -> dict[str, Any]:
    """Return a sample's row of the table `prompts`.

    dataset: the dataset's name in the cells' rows. fingerprint: the model's. visual: the result of `visual_places`. rendered: the
    prompt's text.
    """
    return {
        "prompt_hash": request.prompt_hash,
        "model_fingerprint": fingerprint,
        "dataset": dataset,
        "sample_id": request.sample_id,
        "doc_id": request.doc_id,
        "question": question_text(request.messages),
        "rendered": rendered,
        "reference": request.target,
        "media": len(request.images) + len(request.videos),
        "images": request.files or None,
        "visual": None if visual is None else list(visual),
    }


def question_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the messages' text in order, with `<image>` and `<video>` for media. If there are several turns, each starts with
    its role."""
    turns = []
    for turn in messages:
        parts = [part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in turn["content"]]
        turns.append((turn["role"], "\n".join(parts)))
    return "\n\n".join(text if len(turns) == 1 else f"{role}: {text}" for role, text in turns)


def visual_places(loaded: LoadedModel, prompt: EncodedPrompt, request: Request) -> list[float] | None:
    """Return the position and the picture box of each visual token, six numbers per token: index in the prompt, number of the
    image, top, bottom, left, right. The last five are -1 if the token shows no part of an image.

    Return None if the family's rule is unknown, or the prompt has videos.
    """
    from mmkv_bench.families.registry import token_boxes

    if request.videos or not request.images:
        return None
    places = prompt.types[0].nonzero().flatten().tolist()
    sizes = [image.size for image in request.images]
    try:
        boxes = token_boxes(loaded.model.config, loaded.processor, prompt.inputs, sizes, len(places))
    except UnsupportedError:
        return None
    found: list[float] = []
    for place, box in zip(places, boxes, strict=True):
        found += [float(place), *((-1.0,) * 5 if box is None else (float(part) for part in box))]
    return found
