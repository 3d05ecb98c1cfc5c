"""A prompt of the true shape with nothing to see: blank images through the model's own processor, and a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmkv_bench.families.facts import model_facts
from mmkv_bench.families.registry import apply_limits
from mmkv_bench.generation.encode import EncodedPrompt, encode
from mmkv_bench.models.processor import build_processor

QUESTION = "What is the total that the last row of the table on this page states?"


def blank_prompt(
    config: Any, settings: Mapping[str, Any], images: Sequence[tuple[int, int]], limits: Mapping[str, int | None]
) -> EncodedPrompt:
    """Encode blank images.

    Args:
        config: of transformers; settings: `model.processor`; images: width and height in pixels of each; limits: as
            `families.registry.apply_limits` takes them.

    Raises:
        UnsupportedError: a prompt longer than the model's context, a model without images.
    """
    from PIL import Image

    processor = build_processor(config, settings)
    apply_limits(processor, **limits)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": QUESTION}]
    blank = [Image.new("RGB", size) for size in images]
    return encode(processor, model_facts(config), "planned", [{"role": "user", "content": content}], blank)
