"""Which visual tokens cells kept of a sample, for the heat maps over its images: of rows with `keep=indices`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.report.columns import numbers
from mmkv_bench.report.answers import pa_places
from mmkv_bench.store.kept import digest, unpacked

if TYPE_CHECKING:
    from mmkv_bench.report.answers import Answers

WIDTH = 6
"""Numbers of each visual token in the column `visual`: place in the prompt, image, top, bottom, left, right."""


def kept_maps(
    answers: Answers, cells: Sequence[str], samples: Sequence[str], visual: Sequence[list[float] | None]
) -> list[dict[str, Any] | None]:
    """Of each sample: where its visual tokens lie and which of them each cell kept; None where no row tells.

    visual: of each sample, the column of the table `prompts`.
    """
    if not any(visual):
        return [None] * len(samples)
    found: list[dict[int, dict[str, Any]]] = [{} for _ in samples]
    columns = answers.table.select(["kept_indices", "kept_digest"])
    for number, cell in enumerate(cells):
        rows = columns.take(pa_places(answers.of_samples(cell, samples)))
        texts, digests = (rows[name].to_pylist() for name in rows.column_names)
        for place, (text, boxes) in enumerate(zip(texts, visual, strict=True)):
            if text is not None and boxes:
                told = _of_cell(text, digests[place], np.reshape(boxes, (-1, WIDTH))[:, 0].astype(int))
                if told is not None:
                    found[place][number] = told
    return [
        {"visual": np.round(np.reshape(each, (-1, WIDTH))[:, 1:], 5).tolist(), "cells": own} if own and each else None
        for each, own in zip(visual, found, strict=True)
    ]


def _of_cell(text: str, stored: str | None, places: np.ndarray) -> dict[str, Any] | None:
    """Per layer and head the bits of the visual tokens (base64, the first token in the highest bit), counts of all entries and
    of visual ones, and whether the row's own digest says the same. None where the cell was answered from another prompt."""
    bits = unpacked(text)
    if len(places) and places.max() >= bits.shape[-1]:
        return None
    own = bits[:, :, places]
    return {
        "bits": [[base64.b64encode(np.packbits(head).tobytes()).decode() for head in layer] for layer in own],
        "entries": [numbers(layer.tolist()) for layer in bits.sum(axis=-1)],
        "visual": [numbers(layer.tolist()) for layer in own.sum(axis=-1)],
        "proven": None if stored is None else digest(bits) == stored,
    }
