"""The supported model families, and functions for a family given by `model_type`.

Visual tokens are tokens whose embeddings are replaced by image features. Markers and the timestamps of Qwen3-VL are text.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import mmkv_bench.families
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.base import (
    LLAMA,
    MISTRAL,
    NO_LIMITS,
    OWN_FILES,
    QWEN2,
    QWEN3,
    Box,
    Family,
    ImagePrompt,
    PixelLimits,
    Settings,
    Size,
)

if TYPE_CHECKING:
    from torch import Tensor

_LOW, _HIGH = "shortest_edge", "longest_edge"
"""Names of the limits in Qwen-VL's processors; the values are areas in pixels, not edges."""

FAMILIES = (
    Family("llama", "Llama (text)", (LLAMA,), "LlamaForCausalLM"),
    Family("mistral", "Mistral (text)", (MISTRAL,), "MistralForCausalLM"),
    Family("qwen2", "Qwen2 (text)", (QWEN2,), "Qwen2ForCausalLM"),
    Family("qwen3", "Qwen3 (text)", (QWEN3,), "Qwen3ForCausalLM"),
)
"""Text models, which have no file of their own."""


_REASONS: dict[str, tuple[str, ...]] = {
    "its scores are capped softly, which no scorer here does": ("gemma2",),
    "its later layers read the keys of an earlier one and would inherit what that evicts": ("gemma3n", "gemma3n_text"),
    "its pictures and sounds are not tested here; its text model alone, gemma4_text, is supported, and `python -m "
    "tools.gemma4_text` of this project's repository takes it out": ("gemma4",),
    "its pictures and sounds are not tested here": ("gemma4_unified",),
    "its other layers are short convolutions, which are not tested here": ("lfm2", "lfm2_moe", "lfm2_vl"),
    "its other layers are Mamba blocks, which are not tested here": (
        *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "zamba", "zamba2"),
    ),
    "it has no keys and values that could be compressed": ("falcon_mamba", "mamba", "mamba2"),
    "its other layers are recurrent blocks, which are not tested here": ("recurrent_gemma",),
    "its other layers attend in chunks, which are not tested here": ("llama4", "llama4_text"),
    "its attention chooses keys by an index of its own": ("deepseek_v32", "glm_moe_dsa"),
    "its cache holds latent vectors, not keys and values of heads": ("deepseek_v2", "deepseek_v3"),
    "its experts are not tested here": ("minimax", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
}
REFUSED = {model_type: reason for reason, refused in _REASONS.items() for model_type in refused}
"""`model_type` of models of transformers that are refused by name -> the reason."""


@cache
def families() -> dict[str, Family]:
    """Return all supported families by `model_type`, from the list `FAMILIES` of each file in this folder."""
    modules = (
        import_module(f"{mmkv_bench.families.__name__}.{module.name}")
        for module in pkgutil.iter_modules(mmkv_bench.families.__path__)
        if not module.ispkg
    )
    return {family.model_type: family for module in modules for family in getattr(module, "FAMILIES", ())}


def family(model_type: str) -> Family:
    """Return the family of a `model_type`. Raises UnsupportedError: no family has this `model_type`."""
    if model_type not in families():
        names = ", ".join(one.name for one in families().values())
        reason = f" ({REFUSED[model_type]})" if model_type in REFUSED else ""
        raise UnsupportedError(
            f"model_type {model_type!r} is not supported{reason}; supported families: {names}; choose a model of one "
            "of these"
        )
    return families()[model_type]


def family_of_processor(processor: Any) -> Family | None:
    """Return the family whose processor class this is; None for tokenizers and other processors."""
    by_class = {one.processor: one for one in families().values()}
    class_names = (base.__name__ for base in type(processor).__mro__)
    return next((by_class[name] for name in class_names if name in by_class), None)


def image_tokens(
    model_type: str, settings: Settings, width: int, height: int, images: int = 1, limits: PixelLimits = NO_LIMITS
) -> int:
    """Count the visual tokens of one image of width x height pixels in a prompt of `images` images.

    settings: keys of the checkpoint's processor. limits: pixel limits of the run.

    Raises UnsupportedError: a model without images; or one side is more than 200 times the other, and the family refuses this.
    """
    _check_takes(model_type, "image")
    return family(model_type).image_tokens(settings, (width, height), images, limits)


def video_tokens(
    model_type: str, settings: Settings, frames: int, width: int, height: int, limits: PixelLimits = NO_LIMITS
) -> int:
    """Count the visual tokens of a video of `frames` >= 1 sampled frames of width x height pixels.

    settings: keys of the checkpoint's processor. limits: pixel limits of the run.

    Raises UnsupportedError: a model without videos; or one side is more than 200 times the other, and the family refuses this.
    """
    _check_takes(model_type, "video")
    return family(model_type).video_tokens(settings, frames, (width, height), limits)


def token_boxes(
    config: Any, processor: Any, inputs: Mapping[str, Tensor], sizes: Sequence[Size], visual: int
) -> list[Box | None]:
    """Return the box (rectangle of an image) of every visual token of a prompt with images and no video, in prompt order.

    Args:
        config: the whole model's config.
        processor: the processor that made `inputs`.
        inputs: tensors of one prompt.
        sizes: sizes of the prompt's images, in order.
        visual: number of visual tokens of the prompt.

    Returns:
        `visual` boxes; None for a token that shows no part of an image (a newline, or only padding).

    Raises:
        UnsupportedError: the family has no rule for boxes, or the processor's settings cut images differently.
    """
    boxes = family(config.model_type).boxes(ImagePrompt(config, processor, inputs, sizes))
    if len(boxes) != visual:
        raise UnsupportedError(
            f"images of {', '.join(f'{w}x{h}' for w, h in sizes)} have {len(boxes)} tokens by the rule of "
            f"{config.model_type} models but {visual} in the prompt, so visual tokens cannot be located; restore "
            f"the {OWN_FILES}"
        )
    return boxes


def check_chunks(known: Family) -> None:
    """Raise UnsupportedError for a family whose videos cannot be read in chunks (`protocol=stream`)."""
    if not known.streams:
        streaming_family_names = ", ".join(one.name for one in families().values() if one.streams)
        raise UnsupportedError(
            f"protocol=stream feeds a video in chunks, which {known.name} does not support; allowed: {streaming_family_names}; "
            "choose one of these, or use protocol=query_agnostic"
        )


def check_no_states(known: Family, states: bool) -> None:
    """Raise UnsupportedError for `protocol=stream` if the model has layers with a window or a recurrent state (`states`)."""
    if states:
        raise UnsupportedError(
            f"protocol=stream evicts while it prefills, but {known.name} has layers that keep a window or a "
            "recurrent state of all that was read; choose a model whose layers all attend to the whole prompt"
        )


def check_smaller(one: Family) -> None:
    """Raise UnsupportedError for a family whose images cannot get fewer tokens (`Family.smaller_by` is None)."""
    if one.smaller_by is None:
        supported_families = ", ".join(sorted(kind for kind, other in families().items() if other.smaller_by))
        raise UnsupportedError(
            f"method pixels shows smaller pictures, but pictures of {one.name} cannot get fewer tokens (its "
            f"`smaller_by` is None); allowed: {supported_families}; leave pixels out"
        )


def apply_limits(
    processor: Any,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    video_max_pixels: int | None = None,
    frames: int | None = None,
) -> None:
    """Set a processor's pixel limits to those of a run.

    Args:
        min_pixels, max_pixels: limits of the area that an image is scaled to, before it is cut into patches.
        video_max_pixels: largest area of one frame.
        frames: number of frames of a video. Processors that limit whole videos get `video_max_pixels` times `frames`.

    Raises:
        ConfigError: a processor without such limits, or limits that exclude each other.
    """
    kind = family_of_processor(processor)
    if min_pixels is not None or max_pixels is not None:
        key = "model.min_pixels" if max_pixels is None else "model.max_pixels"
        _set_limits(processor, "image_processor", key, min_pixels, max_pixels)
    if video_max_pixels is not None:
        frames_per_limit = (frames or 1) if kind is not None and kind.whole_video_limit else 1
        _set_limits(processor, "video_processor", "model.video_max_pixels", None, video_max_pixels * frames_per_limit)


def _set_limits(processor: Any, part_name: str, key: str, low: int | None, high: int | None) -> None:
    kind, processor_part = family_of_processor(processor), getattr(processor, part_name, None)
    size = dict(getattr(processor_part, "size", None) or {})
    if (
        processor_part is None
        or kind is None
        or not kind.pixel_limits
        or size.get(_LOW) is None
        or size.get(_HIGH) is None
    ):
        raise ConfigError(
            f"{key} has no effect on {'a text model' if processor_part is None else type(processor_part).__name__}, "
            "which scales to fixed sizes; leave it out (only Qwen-VL models have pixel limits)"
        )
    size |= {name: value for name, value in ((_LOW, low), (_HIGH, high)) if value is not None}
    if size[_LOW] > size[_HIGH]:
        raise ConfigError(
            f"{key}: at least {size[_LOW]} and at most {size[_HIGH]} pixels exclude each other; give both "
            "model.min_pixels and model.max_pixels"
        )
    processor_part.size = type(processor_part.size)(**size)


def _check_takes(model_type: str, kind: str) -> None:
    if kind not in family(model_type).media:
        supported_families = ", ".join(name for name, one in families().items() if kind in one.media)
        raise UnsupportedError(f"a {model_type} model takes no {kind}s; models that do: {supported_families}")
