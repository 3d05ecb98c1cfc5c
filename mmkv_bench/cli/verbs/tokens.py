"""`mmkv-bench tokens`: how many visual tokens images or a video become, and the bytes of their cache."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.cli.grammar import Parser
from mmkv_bench.errors import ConfigError, nearest

if TYPE_CHECKING:
    from mmkv_bench.families.base import PixelLimits

SUMMARY = "how many visual tokens images or a video become in a model, and the bytes of their keys and values"
_KEYS = ("model", "model.frames", "model.min_pixels", "model.max_pixels", "model.video_max_pixels")


def options(parser: Parser) -> None:
    """The model and the sizes."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="WIDTHxHEIGHT | key=value",
        help="sizes in pixels, and settings as of a run: model=<name>, model.frames=<n> (the sizes are then those of videos, "
        "of which n frames are taken), for Qwen-VL models model.min_pixels, model.max_pixels, model.video_max_pixels",
    )
    parser.examples(
        "mmkv-bench tokens model=qwen2_5_vl_7b 1344x896",
        "mmkv-bench tokens model=llava_onevision_7b 640x480 model.frames=32",
    )


def answer(given: argparse.Namespace) -> int:
    """Print a line per size, and their sum.

    Raises:
        ConfigError: words that are no size and no setting, a model without a processor, limits without effect.
    """
    from mmkv_bench.families.base import PixelLimits
    from mmkv_bench.families.facts import kv_bytes_per_token
    from mmkv_bench.families.registry import image_tokens, video_tokens
    from mmkv_bench.models.shape import config_of

    sizes, settings = _read(given.words)
    name, frames = settings.pop("model"), settings.pop("frames", None)
    node, limits = _model(name), PixelLimits(**settings)
    kind, processor = node["shape"]["model_type"], node["processor"]
    _check_limits(name, node, limits, frames)
    per_token, counts = kv_bytes_per_token(config_of(node["shape"]), node["dtype"]), []
    print(f"{name}: {per_token / 1024:g} KiB of keys and values per token in {node['dtype']}")
    for size in sizes:
        if frames is None:
            counts.append(image_tokens(kind, processor, *size, len(sizes), limits))
        else:
            counts.append(video_tokens(kind, processor, frames, *size, limits))
        medium = "image" if frames is None else f"{frames} frames of"
        print(f"  {medium} {size[0]}x{size[1]}: {_tokens(counts[-1], per_token)}")
    if len(sizes) > 1:
        print(f"  together: {_tokens(sum(counts), per_token)}")
    return 0


def _tokens(count: int, per_token: int) -> str:
    nbytes = count * per_token
    held = f"{nbytes / 2**20:,.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:,.2f} GiB"
    return f"{count:,} visual tokens, {held}"


def _read(words: Sequence[str]) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    """Sizes and settings of a command line."""
    sizes, settings = [], dict[str, Any]()
    for word in words:
        key, _, value = word.partition("=")
        if re.fullmatch(r"[1-9]\d*x[1-9]\d*", word):
            width, _, height = word.partition("x")
            sizes.append((int(width), int(height)))
        elif key not in _KEYS:
            raise ConfigError(f"{word!r} is no size such as 1344x896 and no key; {nearest(key, _KEYS)}")
        elif key != "model" and not (value.isdecimal() and int(value) > 0):
            raise ConfigError(f"{word}: a whole number >= 1 belongs there")
        else:
            settings[key.removeprefix("model.")] = value if key == "model" else int(value)
    if "model" not in settings or not sizes:
        raise ConfigError("a model and a size are needed: model=qwen2_5_vl_7b 1344x896")
    return sizes, settings


def _model(name: str) -> Mapping[str, Any]:
    """The content of conf/model/<name>.yaml. Raises ConfigError where it describes no processor."""
    from mmkv_bench.config import unavailable
    from mmkv_bench.config.files import content
    from mmkv_bench.config.schema import options as names_of

    nodes = {one: content("model", one) for one in names_of("model")}
    known = {one: node for one, node in nodes.items() if node.get("shape") and node.get("processor")}
    if name not in known and (model := unavailable.find(name)) is not None:
        raise ConfigError(model.sentence(name))
    if name not in known:
        raise ConfigError(f"model={name} has no settings of a processor in conf/model; {nearest(name, known)}")
    return known[name]


def _check_limits(name: str, node: Mapping[str, Any], limits: PixelLimits, frames: int | None) -> None:
    """Refuse limits that a run refuses, and those that have no effect on the sizes."""
    from mmkv_bench.families.qwen_vl import area
    from mmkv_bench.families.registry import family

    given = [key for key, value in vars(limits).items() if value is not None]
    if given and not family(node["shape"]["model_type"]).pixel_limits:
        raise ConfigError(
            f"{', '.join(given)}: model={name} scales to fixed sizes; leave it out (only Qwen-VL has pixel limits)"
        )
    idle = [key for key in given if (key == "video_max_pixels") == (frames is None)]
    if idle:
        raise ConfigError(
            f"{', '.join(idle)} has no effect on {'images' if frames is None else 'videos'}; leave it out"
        )
    if given and frames is None:
        low, high = area(node["processor"]["image"])
        low, high = limits.min_pixels or low, limits.max_pixels or high
        if low > high:
            raise ConfigError(f"at least {low} and at most {high} pixels exclude each other; give both limits")
