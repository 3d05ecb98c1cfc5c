"""Samples as pages show them: question, reference, images, and maps of the visual tokens in the compressed cache.

Prompts come from the store's table `prompts`; synthetic pages of this package are drawn again. Nothing is downloaded.
Maps need rows with `keep=indices`.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.datasets.drawn_pages import drawn
from mmkv_bench.errors import DataError
from mmkv_bench.report.charts import over_image
from mmkv_bench.report.folder import Folder
from mmkv_bench.report.formatting import numbers
from mmkv_bench.store.response import digest_of_kept, unpack_kept

if TYPE_CHECKING:
    from PIL import Image

FRAMES = 4  # frames shown of a video
LONGEST_SIDE_PX = 672  # pixels of an image's longer side in the report
NO_TABLE = (
    "The rows have no question for this sample: they are older than the table `prompts`. Only embedded pages can be drawn "
    "again."
)
OTHER_PAGE = (
    "The page drawn now differs from the page that was answered: other versions of the drawing libraries are installed."
)


@dataclass
class Prompt:
    """Prompt of a sample. images: files below the report's folder. ratios: width over height. missing: why a part is
    not shown."""

    question: str | None = None
    reference: str | None = None
    images: list[str] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    missing: str = ""


def pictures_of(path: str) -> list[Image.Image]:
    """Return the image of a file, or evenly spaced frames of a video.

    Raises OSError, ValueError, DataError: the file is missing, or is neither an image nor a video.
    """
    from PIL import Image, UnidentifiedImageError

    from mmkv_bench.models.video import sample_frames

    try:
        with Image.open(path) as image:
            return [image.convert("RGB")]
    except UnidentifiedImageError:
        return [Image.fromarray(frame) for frame in sample_frames(path, FRAMES).frames]


class Prompts:
    """Prompts of samples. The images of a prompt are written at its first use.

    folder: folder of the images; None: write none. stored: prompt hash -> row of the table `prompts`.
    """

    def __init__(self, folder: Folder | None, stored: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder, self._stored, self._prompts = folder, stored, dict[tuple[str, str], Prompt]()

    def of(self, sample_id: str, prompt_hash: str | None) -> Prompt:
        """Return the prompt of a sample.

        Synthetic pages are drawn again, and shown only if `prompt_hash` proves that the model saw the same images.
        """
        key = sample_id, prompt_hash or ""
        if key not in self._prompts:
            self._prompts[key] = self._prompt(*key)
        return self._prompts[key]

    def _prompt(self, sample_id: str, prompt_hash: str) -> Prompt:
        row: Mapping[str, Any] = self._stored.get(prompt_hash, {})
        question, reference = row.get("question"), row.get("reference")
        page = drawn(sample_id, prompt_hash, question or "", reference or "")
        if page is not None and page.images:
            images = self._images(prompt_hash or sample_id, page.images)
            return Prompt(page.question or question, page.answer or reference, *images)
        return self._of_row(row) if row else Prompt(missing=NO_TABLE if page is None else OTHER_PAGE)

    def visual(self, prompt_hash: str | None) -> list[float] | None:
        """Return the column `visual` of a prompt: positions and boxes of visual tokens; None if not stored."""
        return self._stored.get(prompt_hash or "", {}).get("visual")

    def _of_row(self, row: Mapping[str, Any]) -> Prompt:
        images: list[Image.Image] = []
        unreadable, image_paths = [], row["images"] or ()
        for path in image_paths:
            try:
                images += pictures_of(path)
            except (OSError, ValueError, DataError):
                unreadable.append(Path(path).name)
        missing_images = [f"Images or videos that cannot be read now: {', '.join(unreadable)}."] if unreadable else []
        unstored_images = row["media"] - len(image_paths)
        if unstored_images > 0:
            missing_images.append(
                f"{unstored_images} of the sample's {row['media']} images or videos are in the dataset itself, not in files."
            )
        return Prompt(
            row["question"], row["reference"], *self._images(row["prompt_hash"], images), " ".join(missing_images)
        )

    def _images(self, name: str, images: Sequence[Image.Image]) -> tuple[list[str], list[float]]:
        """Write images in the report's size. Return (paths relative to the report, width / height of each)."""
        paths: list[str] = []
        if self._folder is None:
            return paths, []
        for number, image in enumerate(images):
            thumbnail = image.copy()
            thumbnail.thumbnail((LONGEST_SIDE_PX, LONGEST_SIDE_PX))
            image_buffer = io.BytesIO()
            thumbnail.save(image_buffer, "WEBP", quality=60, method=2)
            path = f"{re.sub('[^A-Za-z0-9]', '_', name)[:40]}-{number}.webp"
            self._folder.write(f"images/{path}", image_buffer.getvalue())
            paths.append(f"images/{path}")
        return paths, [round(image.width / image.height, 4) for image in images]


WIDTH = 6
"""Numbers per visual token in the column `visual`: position in the prompt, image, top, bottom, left, right."""
PROOF = {
    True: "The row's digest confirms these entries.",
    False: "The row's digest belongs to OTHER entries: the row is damaged.",
    None: "The row has no digest to check these entries.",
}


@dataclass(frozen=True)
class KeptTokens:
    """Entries that a cell kept of a prompt.

    Attributes:
        bits: bool [layers, KV heads, tokens].
        places: int [V], positions of the visual tokens.
        boxes: float64 [V, 5], image, top, bottom, left and right of each visual token; -1 if the token shows no part of
            an image.
        proven: whether the row's digest matches these entries; None without a digest.
    """

    bits: np.ndarray
    places: np.ndarray
    boxes: np.ndarray
    proven: bool | None

    @classmethod
    def of(cls, row: Mapping[str, Any], visual: Sequence[float] | None) -> KeptTokens | None:
        """Return the entries of one row; None if a column is missing, or if `visual` has positions beyond the row's
        prompt.

        row: row of `responses`. visual: column `visual` of the table `prompts`.
        """
        if not visual or row["kept_indices"] is None:
            return None
        bits, columns = unpack_kept(row["kept_indices"]), np.reshape(np.asarray(visual, float), (-1, WIDTH))
        visual_places, stored_digest = columns[:, 0].astype(int), row["kept_digest"]
        if visual_places.max() >= bits.shape[-1]:  # a cell with fewer pixels had another prompt
            return None
        return cls(
            bits,
            visual_places,
            columns[:, 1:],
            None if stored_digest is None else digest_of_kept(bits) == stored_digest,
        )


def kept_section(
    kept: Mapping[int, KeptTokens], images: Sequence[tuple[str, float]], group: Sequence[Any], folder: Folder
) -> dict[str, Any]:
    """Return the template values for the maps of kept visual tokens on a sample's page.

    Args:
        kept: number of a cell -> entries that the cell kept.
        images: (address, width / height) of each image.
        group: the cells of the page, by number.
        folder: folder for the heat map by layer and head.
    """
    first_tokens = next(iter(kept.values()))
    boxes, (layers, heads, _) = first_tokens.boxes.round(5), first_tokens.bits.shape
    grids = [_grid(boxes, image) for image in range(len(images))]
    budgets = list(dict.fromkeys(group[number].budget for number in kept if group[number].budget))
    figure, cells, bits = folder.heads(layers, heads, "visual tokens"), [], {}
    for number, tokens in kept.items():
        visual_bits, entries = tokens.bits[:, :, tokens.places], tokens.bits.sum(axis=-1).tolist()
        bits[number] = [
            [base64.b64encode(np.packbits(head).tobytes()).decode() for head in layer] for layer in visual_bits
        ]
        counts = visual_bits.sum(axis=-1).tolist()
        budget_class = f"b{budgets.index(group[number].budget)} " if group[number].budget else ""
        rows_of_counts = [
            [str(layer), *(f"{a} of {b}" for a, b in zip(*both, strict=True))]
            for layer, both in enumerate(zip(counts, entries, strict=True))
        ]
        cells.append(
            {
                "number": number,
                "panels": f"{budget_class}{number}",
                "label": group[number].words,
                "words": f"{np.sum(counts)} of its {np.sum(entries)} entries are visual tokens. {PROOF[tokens.proven]}",
                "figure": (figure, [counts]),
                "numbers": (["layer", *(f"head {head}: visual of all" for head in range(heads))], rows_of_counts),
            }
        )
    return {
        "choices": [
            *((f"b{i}", f"all at {budget}") for i, budget in enumerate(budgets)),
            *((number, group[number].words) for number in kept),
        ],
        "layers": [("", "mean of all"), *((layer, layer) for layer in range(layers))],
        "heads": [("", "mean of all"), *((head, head) for head in range(heads))],
        "aspects": [ratio for _, ratio in images],
        "cells": cells,
        "data": {
            "tokens": len(boxes),
            "bits": bits,
            "figures": [over_image(image, grid[:2]) for (image, _), grid in zip(images, grids, strict=True)],
            "places": [grid[2] for grid in grids],
        },
    }


def _grid(boxes: np.ndarray, image: int) -> tuple[list[float], list[float], list[list[list[int]]]]:
    """Divide an image into a grid by all edges of its tokens' boxes, which may overlap.

    Return (edges of columns, edges of rows, tokens whose boxes cover each field). boxes: as in `KeptTokens`.
    """
    tokens = np.flatnonzero(boxes[:, 0] == image)
    row_edges, column_edges = (np.unique(boxes[tokens][:, sides]) for sides in ([1, 2], [3, 4]))
    tokens_of_field: list[list[list[int]]] = [[[] for _ in column_edges[1:]] for _ in row_edges[1:]]
    for token in tokens.tolist():
        top, bottom = np.searchsorted(row_edges, boxes[token, 1:3])
        left, right = np.searchsorted(column_edges, boxes[token, 3:5])
        for row in tokens_of_field[top:bottom]:
            for place in row[left:right]:
                place.append(token)
    return numbers(column_edges), numbers(row_edges), tokens_of_field  # type: ignore[return-value]
