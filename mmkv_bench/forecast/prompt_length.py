"""Length of a dataset's prompts before the data are opened."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from mmkv_bench.config.schema import PACKAGE_SCHEME
from mmkv_bench.datasets.drawn_page_tasks import PAGE_TASKS, page_task
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.families.base import PixelLimits
from mmkv_bench.families.registry import image_tokens
from mmkv_bench.models.source import Source
from mmkv_bench.store.schema import RESAMPLING

if TYPE_CHECKING:
    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.plan.plan import DatasetShare, Plan
    from mmkv_bench.store.store import Store

ASSUMED, QUESTION = 2048, 64  # tokens of an unknown prompt; of the text beside images of known size
_PAGE_TEXT, _PAGE_MARKERS = 10, 2  # tokens of the embedded model's template and question, and beside each of its images
_IMAGE_SETTINGS = ("min_pixels", "max_pixels", "video_max_pixels", "frames")
"""Settings of `model` that change the number of tokens of an image or a video."""
_TOKENS_PATTERN = re.compile(r"(?<![\d.,])(\d[\d,]*)(?: to (\d[\d,]*))? tokens")
_PROBE_SIZES = ((336, 336), (1344, 896), (300, 1500))
"""Sizes in pixels; a model with equal token counts for these scales all images to one size."""


@dataclass(frozen=True)
class PromptLength:
    """Expected length of a prompt [tokens], its visual tokens (if known), and the source of these numbers.

    Attributes:
        source: `given` (--prompt-tokens), `pictures` (--image), `stored` (median of stored answers), `pages` (size of
            the embedded pages), `picture` (a model that scales every image to one size), `dataset` (stated in the file
            of a dataset of texts), `lengths` (setting of scenario=efficiency), `assumed`.
        frames: number of frames or pictures that a stream would read; None if unknown.
    """

    tokens: int
    source: str
    visual: int | None = None
    frames: int | None = None


def stored_lengths(plan: Plan, store: Store) -> dict[str, PromptLength]:
    """Map each dataset to the median length of its stored prompts, for the plan's model and image settings."""
    image_settings = [getattr(plan.model, name) for name in _IMAGE_SETTINGS]
    cells = store.cells(columns=("cell", "base", "model_fingerprint", "config"))
    cells = cells.filter(pc.equal(cells["model_fingerprint"], plan.cells[0].model_fingerprint))
    configs = {text: json.loads(text).get("model") or {} for text in set(cells["config"].to_pylist())}
    configs_with_same_images = {
        text for text, model in configs.items() if [model.get(name) for name in _IMAGE_SETTINGS] == image_settings
    }
    cell_names = [
        cell["cell"]
        for cell in cells.to_pylist()
        if cell["config"] in configs_with_same_images
        and cell["base"] not in RESAMPLING  # these controls have smaller prompts
    ]
    rows = store.responses(
        cell_names, ("dataset", "prompt_tokens", "visual_tokens", "frames_left", "ask_at"), coded=True
    )
    # Earlier questions cut the prompt.
    rows = rows.filter(pc.fill_null(pc.equal(rows["ask_at"], 1.0), True)).drop_columns("ask_at")
    length_by_dataset = {}
    for part in plan.parts:
        prompts = rows.filter(pc.equal(rows["dataset"].cast("string"), part.dataset)).drop_columns("dataset")
        frame_ranges = prompts["frames_left"].cast("string").unique().drop_null().to_pylist()
        prompts = prompts.drop_columns("frames_left").drop_null()
        if prompts.num_rows:
            tokens, visual = (int(np.median(prompts[name].to_numpy())) for name in ("prompt_tokens", "visual_tokens"))
            last_frames = [int(re.split("[-,]", ranges)[-1]) for ranges in frame_ranges if ranges]
            length_by_dataset[part.dataset] = PromptLength(
                tokens, "stored", visual, max(last_frames) + 1 if last_frames else None
            )
    return length_by_dataset


def expected_length(plan: Plan, part: DatasetShare) -> PromptLength:
    """Return the expected prompt length of a dataset without stored answers.

    It follows from the images of drawn pages, or from one image if the model scales all images to one size. Otherwise
    the length comes from the file of a dataset of texts, or is assumed.
    """
    spec, family = part.spec, plan.family
    images_of_prompts = [_page_sizes(spec)] if spec.is_pages else [[shape] for shape in _PROBE_SIZES]
    has_one_image = [*spec.columns].count("image") == 1 and "turns" not in spec.columns and not spec.fixture
    if family is not None and family.multimodal and (spec.is_pages or has_one_image):
        with suppress(MMKVError, KeyError, TypeError):  # settings of a processor that lack something
            token_counts = {visual_tokens(plan, images) for images in images_of_prompts}
            if len(token_counts) == 1:
                is_embedded_model = str(plan.model.path).startswith(PACKAGE_SCHEME)
                text_tokens = (
                    _PAGE_TEXT + _PAGE_MARKERS * len(images_of_prompts[0])
                    if spec.is_pages and is_embedded_model
                    else QUESTION
                )
                return PromptLength(
                    min(token_counts) + text_tokens, "pages" if spec.is_pages else "picture", min(token_counts)
                )
    max_context = None if family is None else family.max_context
    if (stated_tokens := _stated_tokens(part.about)) is not None:
        return PromptLength(min(stated_tokens, max_context or stated_tokens), "dataset", 0)
    return PromptLength(min(ASSUMED, max_context or ASSUMED), "assumed")


def _stated_tokens(about: Mapping[str, Any]) -> int | None:
    """Return the prompt tokens, with a question, that a text dataset's file (`about`) states (middle of a range), or
    None."""
    match = _TOKENS_PATTERN.search(str(about.get("size") or ""))
    if match is None or about.get("media") != "none":
        return None
    range_ends = [int(number.replace(",", "")) for number in match.groups() if number]
    return sum(range_ends) // len(range_ends) + QUESTION


def of_images(plan: Plan, images: Sequence[tuple[int, int]]) -> PromptLength:
    """Return the length of a prompt with images of these sizes (width, height in pixels) and a question.

    Raises:
        ConfigError: the settings of the model's processor are unknown.
        UnsupportedError: the model reads no images.
    """
    visual = visual_tokens(plan, images)
    return PromptLength(visual + QUESTION, "pictures", visual, len(images))


def visual_tokens(plan: Plan, images: Sequence[tuple[int, int]]) -> int:
    """Return the number of visual tokens of images (width, height in pixels). Raises the errors of `of_images`."""
    model = plan.model
    settings = model.processor or _folder_processor(Source.of(model))
    if not settings or plan.family is None:
        raise ConfigError(
            f"--image needs the settings of a processor, but {model.name} has none in conf/model; give --prompt-tokens instead"
        )
    limits = PixelLimits(model.min_pixels, model.max_pixels)
    return sum(image_tokens(plan.family.model_type, settings, *size, len(images), limits) for size in images)


def _page_sizes(spec: TaskSpec) -> list[tuple[int, int]]:
    """Return the sizes of the pages in a task's prompt (width, height in pixels); one page if the number varies."""
    from mmkv_bench.tiny.glyphs import CELL
    from mmkv_bench.tiny.pages import FRAMES, SIZES

    task, size_name = page_task(spec.name)
    page_pixels = SIZES[size_name] * CELL
    has_several_images = all(kind.startswith(("mi_", "redundant_")) for kind in PAGE_TASKS[task])
    return [(page_pixels // 2, page_pixels // 2)] * FRAMES if has_several_images else [(page_pixels, page_pixels)]


def _folder_processor(source: Source) -> Mapping[str, Any]:
    """Return the processor settings in a model's folder, in the form of `model.processor`; empty without any."""
    try:
        values = json.loads((Path(source.place) / "processor_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    settings_by_kind = {
        kind: values[f"{kind}_processor"] for kind in ("image", "video") if f"{kind}_processor" in values
    }
    return settings_by_kind | {"processor": values}
