"""Maps of the visual tokens that cells kept of a sample, over its images: of rows with `keep=indices`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.report.charts import over_image
from mmkv_bench.report.fields import numbers
from mmkv_bench.store.kept_entries import digest, unpacked

if TYPE_CHECKING:
    from mmkv_bench.report.answers import AnswerTable
    from mmkv_bench.report.folder import Folder

WIDTH = 6
"""Numbers of each visual token in the column `visual`: place in the prompt, image, top, bottom, left, right."""
PROOF = {
    True: "The digest in its row proves the choice.",
    False: "The digest in its row is that of ANOTHER choice: the row is damaged.",
    None: "Its row has no digest to check the choice by.",
}


@dataclass
class KeptTokens:
    """Visual tokens of a sample that a cell kept.

    Attributes:
        bits: base64 per layer and KV head, a bit per visual token, the first token in the highest one.
        entries, visual: counts per layer and KV head, of all entries that stay and of the visual ones.
        proven: the row's digest is that of these entries; None where it has none.
    """

    bits: list[list[str]]
    entries: list[list[int]]
    visual: list[list[int]]
    proven: bool | None

    @classmethod
    def of_row(cls, text: str, stored: str | None, places: np.ndarray) -> KeptTokens | None:
        """From the columns `kept_indices` and `kept_digest`; None where the cell was answered from another prompt."""
        bits = unpacked(text)
        if len(places) and places.max() >= bits.shape[-1]:
            return None
        visual = bits[:, :, places]
        return cls(
            [[base64.b64encode(np.packbits(head).tobytes()).decode() for head in layer] for layer in visual],
            bits.sum(axis=-1).tolist(),
            visual.sum(axis=-1).tolist(),
            None if stored is None else digest(bits) == stored,
        )


def kept_tokens(
    answers: AnswerTable, cells: Sequence[str], samples: Sequence[str], visual: Sequence[list[float] | None]
) -> list[dict[int, KeptTokens]]:
    """For each sample: number of a cell -> what it kept, of those whose rows tell it.

    visual: of each sample, the column of the table `prompts`.
    """
    kept: list[dict[int, KeptTokens]] = [{} for _ in samples]
    if not any(visual):
        return kept
    for number, cell in enumerate(cells):
        rows = answers.of_samples(cell, samples, ["kept_indices", "kept_digest"])
        for place, (row, boxes) in enumerate(zip(rows, visual, strict=True)):
            if row["kept_indices"] is not None and boxes:
                visual_places = np.reshape(boxes, (-1, WIDTH))[:, 0].astype(int)
                tokens = KeptTokens.of_row(row["kept_indices"], row["kept_digest"], visual_places)
                if tokens is not None:
                    kept[place][number] = tokens
    return kept


def kept_section(
    kept: Mapping[int, KeptTokens],
    visual: Sequence[float],
    images: Sequence[tuple[str, float]],
    group: Sequence[Any],
    folder: Folder,
) -> dict[str, Any]:
    """Maps of a sample as its page shows them.

    Args:
        visual: places of the visual tokens, as the table `prompts` has them; images: addresses and ratios of width to height.
        group: the cells of the page, by number; each has a `label` and a `budget`.
        folder: that the heat map by layer and head is written to.
    """
    boxes = np.reshape(visual, (-1, WIDTH))[:, 1:].round(5)
    grids = [_grid(boxes, image) for image in range(len(images))]
    budgets = list(dict.fromkeys(group[number].budget for number in kept if group[number].budget))
    layers, heads = np.shape(next(iter(kept.values())).visual)
    figure, cells = folder.heads(layers, heads, "visual tokens"), []
    for number, tokens in kept.items():
        count, total = (int(np.sum(counts)) for counts in (tokens.visual, tokens.entries))
        shared = f"b{budgets.index(group[number].budget)} " if group[number].budget else ""
        rows = [
            [str(layer), *(f"{a} of {b}" for a, b in zip(*both, strict=True))]
            for layer, both in enumerate(zip(tokens.visual, tokens.entries, strict=True))
        ]
        cells.append(
            {
                "number": number,
                "panels": f"{shared}{number}",
                "label": group[number].words,
                "words": f"{count} of its {total} entries are visual tokens. {PROOF[tokens.proven]}",
                "figure": (figure, [tokens.visual]),
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
            "bits": {number: tokens.bits for number, tokens in kept.items()},
            "figures": [over_image(image, grid[:2]) for (image, _), grid in zip(images, grids, strict=True)],
            "places": [grid[2] for grid in grids],
        },
    }


def _grid(boxes: np.ndarray, image: int) -> tuple[list[float], list[float], list[list[list[int]]]]:
    """Edges of the columns and rows that the boxes of an image make, and the tokens that show each field: boxes of any layout,
    overlapping ones too."""
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
