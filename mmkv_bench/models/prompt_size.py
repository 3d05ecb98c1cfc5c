"""What `mmkv-bench tokens` prints: tokens and cache bytes of images and videos, without a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmkv_bench.config import unavailable
from mmkv_bench.config.schema import conf_dir
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.families.base import PixelLimits
from mmkv_bench.families.qwen_vl import area
from mmkv_bench.families.registry import family, image_tokens, video_tokens

_NUMBERS = ("model.frames", *(f"model.{field.name}" for field in dataclasses.fields(PixelLimits)))


def lines(words: Sequence[str]) -> list[str]:
    """What the command prints.

    Args:
        words: sizes such as `1344x896`, and settings as of a run: `model=<name>`, `model.frames=<n>` (the sizes are then those
            of videos), `model.min_pixels`, `model.max_pixels`, `model.video_max_pixels`.

    Raises:
        ConfigError: words that are neither, no size, a model without a processor, limits without effect.
    """
    name, sizes, numbers = _read(words)
    node = _model(name)
    frames = numbers.pop("frames", None)
    limits, kind, settings = PixelLimits(**numbers), node["shape"]["model_type"], node["processor"]
    _check_limits(name, kind, settings, limits, frames)
    bytes_per_token = _bytes_per_token(node)
    told, total = [f"{name}: {bytes_per_token / 1024:g} KiB of keys and values per token in {node['dtype']}"], 0
    for width, height in sizes:
        if frames is None:
            tokens, what = image_tokens(kind, settings, width, height, len(sizes), limits), "image"
        else:
            tokens, what = video_tokens(kind, settings, frames, width, height, limits), f"{frames} frames of"
        total += tokens
        told.append(f"  {what} {width}x{height}: {tokens:,} visual tokens, {_size(tokens * bytes_per_token)}")
    if len(sizes) > 1:
        told.append(f"  together: {total:,} visual tokens, {_size(total * bytes_per_token)}")
    return told


def _read(words: Sequence[str]) -> tuple[str, list[tuple[int, int]], dict[str, int]]:
    """The model's name, the sizes and the numbers of a command line."""
    name, sizes, numbers = None, [], {}
    for word in words:
        key, _, value = word.partition("=")
        if re.fullmatch(r"[1-9]\d*x[1-9]\d*", word):
            width, _, height = word.partition("x")
            sizes.append((int(width), int(height)))
        elif key == "model":
            name = value
        elif key in _NUMBERS and value.isdecimal() and int(value) > 0:
            numbers[key.removeprefix("model.")] = int(value)
        elif key in _NUMBERS:
            raise ConfigError(f"{word}: a whole number >= 1 belongs there")
        else:
            raise ConfigError(f"{word!r} is no size such as 1344x896 and no key; {nearest(key, ('model', *_NUMBERS))}")
    if name is None or not sizes:
        raise ConfigError("a model and a size are needed: model=qwen2_5_vl_7b 1344x896")
    return name, sizes, numbers


def _check_limits(name: str, kind: str, settings: Mapping[str, Any], limits: PixelLimits, frames: int | None) -> None:
    """Refuse limits that a run refuses, and those that have no effect on what is asked for."""
    asked = {key: value for key, value in dataclasses.asdict(limits).items() if value is not None}
    if not asked:
        return
    if not family(kind).pixel_limits:
        raise ConfigError(
            f"{', '.join(asked)}: model={name} scales to fixed sizes; leave it out (only Qwen-VL has pixel limits)"
        )
    idle = [key for key in asked if (key == "video_max_pixels") == (frames is None)]
    if idle:
        what = "images" if frames is None else "videos"
        raise ConfigError(f"{', '.join(idle)} has no effect on {what}; leave it out")
    low, high = area(settings["image"])
    low, high = limits.min_pixels or low, limits.max_pixels or high
    if frames is None and low > high:
        raise ConfigError(f"at least {low} and at most {high} pixels exclude each other; give both limits")


def _model(name: str) -> dict[str, Any]:
    """conf/model/<name>.yaml as data. Raises ConfigError where it describes no processor."""
    from omegaconf import OmegaConf

    found = {}
    for file in sorted((conf_dir() / "model").glob("*.yaml")):
        node = OmegaConf.to_container(OmegaConf.load(file))
        if node.get("shape") and node.get("processor"):
            found[file.stem] = node
    if name not in found and (model := unavailable.find(name)) is not None:
        raise ConfigError(model.sentence(name))
    if name not in found:
        raise ConfigError(f"model={name} has no settings of a processor in conf/model; {nearest(name, found)}")
    return found[name]


def _bytes_per_token(node: dict[str, Any]) -> int:
    from mmkv_bench.families.facts import kv_bytes_per_token
    from mmkv_bench.models.shape import config_of

    return kv_bytes_per_token(config_of(node["shape"]), node["dtype"])


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"
