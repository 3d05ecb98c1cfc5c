"""Maps of the visual tokens that cells kept of a sample, drawn over its images; only for rows with `keep=indices`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.report.charts import over_image
from mmkv_bench.report.fields import numbers
from mmkv_bench.store.response import digest_of_kept, unpack_kept

if TYPE_CHECKING:
    from mmkv_bench.report.folder import Folder

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
        boxes: float64 [V, 5], image, top, bottom, left and right of each visual token; -1 if it shows no part of an image.
        proven: whether the row's digest matches these entries; None without a digest.
    """

    bits: np.ndarray
    places: np.ndarray
    boxes: np.ndarray
    proven: bool | None

    @classmethod
    def of(cls, row: Mapping[str, Any], visual: Sequence[float] | None) -> KeptTokens | None:
        """Read kept tokens from a row of responses and the column `visual` of the table `prompts`; None if one is missing."""
        if not visual or row["kept_indices"] is None:
            return None
        bits, columns = unpack_kept(row["kept_indices"]), np.reshape(np.asarray(visual, float), (-1, WIDTH))
        places, stored = columns[:, 0].astype(int), row["kept_digest"]
        if places.max() >= bits.shape[-1]:  # a cell with fewer pixels had another prompt
            return None
        return cls(bits, places, columns[:, 1:], None if stored is None else digest_of_kept(bits) == stored)


def kept_section(
    kept: Mapping[int, KeptTokens], images: Sequence[tuple[str, float]], group: Sequence[Any], folder: Folder
) -> dict[str, Any]:
    """Return the maps of a sample for its page.

    Args:
        kept: number of a cell -> entries that the cell kept.
        images: (address, ratio of width to height) of each image.
        group: the cells of the page, by number; each has a `label` and a `budget`.
        folder: folder for the heat map by layer and head.
    """
    first = next(iter(kept.values()))
    boxes, (layers, heads, _) = first.boxes.round(5), first.bits.shape
    grids = [_grid(boxes, image) for image in range(len(images))]
    budgets = list(dict.fromkeys(group[number].budget for number in kept if group[number].budget))
    figure, cells, bits = folder.heads(layers, heads, "visual tokens"), [], {}
    for number, tokens in kept.items():
        visual, entries = tokens.bits[:, :, tokens.places], tokens.bits.sum(axis=-1).tolist()
        bits[number] = [[base64.b64encode(np.packbits(head).tobytes()).decode() for head in layer] for layer in visual]
        counts = visual.sum(axis=-1).tolist()
        shared = f"b{budgets.index(group[number].budget)} " if group[number].budget else ""
        rows = [
            [str(layer), *(f"{a} of {b}" for a, b in zip(*both, strict=True))]
            for layer, both in enumerate(zip(counts, entries, strict=True))
        ]
        cells.append(
            {
                "number": number,
                "panels": f"{shared}{number}",
                "label": group[number].words,
                "words": f"{np.sum(counts)} of its {np.sum(entries)} entries are visual tokens. {PROOF[tokens.proven]}",
                "figure": (figure, [counts]),
                "numbers": (["layer", *(f"head {head}: visual of all" for head in range(heads))], rows),
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
    """Divide an image into a grid by all edges of its tokens' boxes, which may overlap. Return the edges of the grid's columns
    and rows, and for each field the tokens whose boxes cover it. boxes: as in `KeptTokens`."""
    tokens = np.flatnonzero(boxes[:, 0] == image)
    down, across = (np.unique(boxes[tokens][:, sides]) for sides in ([1, 2], [3, 4]))
    fields: list[list[list[int]]] = [[[] for _ in across[1:]] for _ in down[1:]]
    for token in tokens.tolist():
        top, bottom = np.searchsorted(down, boxes[token, 1:3])
        left, right = np.searchsorted(across, boxes[token, 3:5])
        for row in fields[top:bottom]:
            for field in row[left:right]:
                field.append(token)
    return numbers(across), numbers(down), fields  # type: ignore[return-value]
