"""Length of a dataset's prompts before its data are opened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from mmkv_bench.config.schema import PACKAGE_SCHEME
from mmkv_bench.datasets.page_tasks import PAGE_TASKS, page_task
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.families.base import PixelLimits
from mmkv_bench.families.registry import image_tokens
from mmkv_bench.models.source import FOLDER, Source

if TYPE_CHECKING:
    from mmkv_bench.datasets.task_spec import TaskSpec
    from mmkv_bench.plan.plan import Part, Plan
    from mmkv_bench.store.store import Store

ASSUMED = 2048
"""Tokens of a prompt of which nothing is known."""
QUESTION = 64
"""Tokens of the text beside images, template included, where only images are known."""
_PAGE_TEXT, _PAGE_MARKERS = 10, 2  # tokens of the embedded model's template and question, and beside each of its images
_SHOWN = ("min_pixels", "max_pixels", "video_max_pixels", "frames")
"""Settings of `model` that change how many tokens an image or a video has."""
_SHAPES = (
    (336, 336),
    (1344, 896),
    (300, 1500),
)  # pixels; a model that gives these the same number of tokens scales to one size


@dataclass(frozen=True)
class PromptLength:
    """Tokens of a prompt, the visual ones among them where they are known, and the source of both.

    source: `given` (--prompt-tokens), `pictures` (--image), `stored` (median of stored answers), `pages` (size of the embedded
    pages), `picture` (a model that scales every image to one size), `lengths` (setting of scenario=efficiency), `assumed`.
    """

    tokens: int
    source: str
    visual: int | None = None


def stored_lengths(plan: Plan, store: Store) -> dict[str, PromptLength]:
    """Median lengths of stored prompts by dataset, of the plan's model with the same image settings and any method."""
    model = plan.model
    shown = [getattr(model, name) for name in _SHOWN]
    columns = ("cell", "base", "model_fingerprint", "config")
    cells = store.cells(columns=columns)
    cells = cells.filter(pc.equal(cells["model_fingerprint"], plan.cells[0].model_fingerprint))
    same: dict[str, bool] = {}
    names = []
    for cell in cells.to_pylist():
        config = cell["config"]
        if config not in same:
            stored = json.loads(config).get("model") or {}
            same[config] = [stored.get(name) for name in _SHOWN] == shown
        if same[config] and cell["base"] != "pixels":  # whose pictures are smaller
            names.append(cell["cell"])
    rows = store.responses(names, ("dataset", "prompt_tokens", "visual_tokens"), coded=True)
    lengths = {}
    for part in plan.parts:
        prompts = (
            rows.filter(pc.equal(rows["dataset"].cast("string"), part.dataset)).drop_columns("dataset").drop_null()
        )
        if prompts.num_rows:
            tokens, visual = (int(np.median(prompts[name].to_numpy())) for name in ("prompt_tokens", "visual_tokens"))
            lengths[part.dataset] = PromptLength(tokens, "stored", visual)
    return lengths


def expected_length(plan: Plan, part: Part) -> PromptLength:
    """The length that a dataset's shape tells: its pages, or one image where a model scales all to one size; else assumed."""
    images, text = _images(part.spec), QUESTION
    if images and part.spec.is_pages and str(plan.model.path).startswith(PACKAGE_SCHEME):
        text = _PAGE_TEXT + _PAGE_MARKERS * len(images)
    visual = None
    if images and plan.family is not None and plan.family.multimodal:
        try:
            counts = {visual_tokens(plan, sizes) for sizes in _alternatives(part.spec, images)}
        except (MMKVError, KeyError, TypeError):  # settings that do not tell
            counts = set()
        visual = counts.pop() if len(counts) == 1 else None
    if visual is not None:
        return PromptLength(visual + text, "pages" if part.spec.is_pages else "picture", visual)
    context = None if plan.family is None else plan.family.max_context
    return PromptLength(min(ASSUMED, context or ASSUMED), "assumed")


def of_images(plan: Plan, images: Sequence[tuple[int, int]]) -> PromptLength:
    """The length of a prompt with images of these sizes and a question.

    Raises:
        ConfigError: a model whose processor is not known here; UnsupportedError: one without images.
    """
    if not plan.model.processor:
        raise ConfigError(
            f"--image needs the settings of a processor, and {plan.model.name} has none in conf/model; give "
            "--prompt-tokens instead"
        )
    visual = visual_tokens(plan, images)
    return PromptLength(visual + QUESTION, "pictures", visual)


def visual_tokens(plan: Plan, images: Sequence[tuple[int, int]]) -> int:
    """Visual tokens of a prompt's images, given as width and height in pixels. Raises ConfigError without a known processor."""
    model = plan.model
    settings = model.processor or _folder_processor(Source.of(model))
    assert plan.family is not None, "without a family nothing is counted"
    limits = PixelLimits(model.min_pixels, model.max_pixels)
    return sum(image_tokens(plan.family.model_type, settings, *size, len(images), limits) for size in images)


def _images(spec: TaskSpec) -> list[tuple[int, int]]:
    """Sizes in pixels of the images of a dataset's prompt; of data whose prompts have one image, of any size; else none."""
    if not spec.is_pages:
        return [_SHAPES[0]] if list(spec.columns).count("image") == 1 and not spec.fixture else []
    from mmkv_bench.tiny.glyphs import CELL
    from mmkv_bench.tiny.pages import FRAMES, SIZES

    task, size = page_task(spec.name)
    side = SIZES[size] * CELL
    cut = [kind.startswith(("mi_", "redundant_")) for kind in PAGE_TASKS[task]]
    return [(side // 2, side // 2)] * FRAMES if all(cut) else [(side, side)]


def _alternatives(spec: TaskSpec, images: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
    """Images to count: those of pages, whose size is known; else one of several shapes, which must agree."""
    return [images] if spec.is_pages else [[shape] for shape in _SHAPES]


def _folder_processor(source: Source) -> Mapping[str, Any]:
    """Settings of the processor in a model's folder, in the form of `model.processor`.

    Raises:
        ConfigError: they are not here or cannot be read.
    """
    if source.kind == FOLDER:
        try:
            values = json.loads((Path(source.place) / "processor_config.json").read_text(encoding="utf-8"))
            parts = {kind: values[f"{kind}_processor"] for kind in ("image", "video") if f"{kind}_processor" in values}
            return parts | {"processor": values}
        except (OSError, ValueError):
            pass
    raise ConfigError(f"the processor of {source.place} is not known here; give --prompt-tokens")
