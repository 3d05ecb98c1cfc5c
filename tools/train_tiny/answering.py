"""Answer page samples with the library's own processor and greedy `generate`, in batches of equal prompt length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import DataError
from mmkv_bench.tiny.pages import Sample

if TYPE_CHECKING:
    from transformers import BatchFeature, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor


def load(folder: Path, attention: str = "sdpa") -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    """Model (float32, CPU, eval mode) and processor of a folder, as any hub model would be loaded."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} holds no model (no config.json); train one with python -m tools.train_tiny.train")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.eval(), AutoProcessor.from_pretrained(folder)


def messages(sample: Sample) -> list[dict[str, Any]]:
    """The chat message of a sample: its images, then its question."""
    content = [{"type": "image"} for _ in sample.images] + [{"type": "text", "text": sample.question}]
    return [{"role": "user", "content": content}]


def encode(processor: Qwen2_5_VLProcessor, samples: Sequence[Sample]) -> BatchFeature:
    """Model inputs of samples of one task and size (equal prompt lengths, so nothing is padded)."""
    texts = [processor.apply_chat_template(messages(sample), add_generation_prompt=True) for sample in samples]
    images = [image for sample in samples for image in sample.images]
    return processor(text=texts, images=images, return_tensors="pt")


def answer(
    model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor, samples: Sequence[Sample]
) -> list[str]:
    """Greedy answers, special tokens removed."""
    import torch

    inputs = encode(processor, samples)
    with torch.no_grad():
        tokens = model.generate(**inputs, do_sample=False)
    return processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
