"""The style of documents: typeface, size and spacing, colours, paper, rules, boxes and marks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from mmkv_bench.reader.documents import FORMS


@dataclass(frozen=True)
class Style:
    """The style of a document's pages.

    Attributes:
        size: pixels of an em.
        tracking: pixels between glyphs.
        pitch: pixels of a line.
    """

    typeface: str
    size: int
    tracking: float
    pitch: int
    margin: int
    top: int
    gap: float  # pixels of a space
    columns: bool  # cells of table rows are aligned in columns
    paper: tuple[int, int, int]
    ink: tuple[int, int, int]


def style(seed: str, typefaces: list[str], form: str, lines: int) -> Style:
    """Draw a random style with which `lines` lines fit on a page. The widths of lines are adjusted when they are drawn.

    seed: any text. typefaces: paths of font files to choose from. form: form of the document, one of `FORMS`.
    """
    draw = random.Random(f"style {seed}")
    number = lambda low, high: low + draw.random() * (high - low)  # noqa: E731
    side = FORMS[form][0]
    typeface = typefaces[int(draw.random() * len(typefaces))]
    margin = int(number(6, 14 if side > 224 else 8))
    pitch = min(int(number(28, 35)), (side - 8) // max(lines, 1))
    size = int(number(0.72, 0.92) * pitch)
    is_dark = draw.random() < 0.12
    light_levels = [int(number(205, 256)) for _ in range(3)]
    dark_levels = [int(number(0, 90)) for _ in range(3)]
    if draw.random() < 0.5:  # grey
        light_levels, dark_levels = [light_levels[0]] * 3, [dark_levels[0]] * 3
    return Style(
        typeface,
        size,
        number(2, 8),
        pitch,
        margin,
        int(number(4, max(5, side - 6 - pitch * lines))),
        number(9, 18),
        draw.random() < 0.4,
        _colour(dark_levels if is_dark else light_levels),
        _colour(light_levels if is_dark else dark_levels),
    )


@cache
def _noise() -> np.ndarray:
    """Return fine and smooth noise for the background of all pages, [2, 512, 512] float32 around 0."""
    fine_noise = np.random.Generator(np.random.PCG64(1)).random((512, 512), dtype=np.float32) * 2 - 1
    smooth_noise = (
        fine_noise + np.roll(fine_noise, 1, 0) + np.roll(fine_noise, 1, 1) + np.roll(fine_noise, (1, 1), (0, 1))
    ) / 2
    return np.stack([fine_noise, smooth_noise])


def backdrop_of(draw: random.Random, side: int, look: Style) -> np.ndarray:
    """Draw a page's background: gradient, ruled lines, boxes, logo and noise.

    Args:
        draw: source of random numbers.
        side: side of the page in pixels.

    Returns:
        Darkness, (side, side) float32, from 0 (paper) to 1 (ink).
    """
    shade = np.zeros((side, side), dtype=np.float32)
    if draw.random() < 0.5:
        ramp = np.linspace(0, 0.25 * draw.random(), side, dtype=np.float32)
        shade += ramp[:, None] if draw.random() < 0.5 else ramp[None, ::-1]
    kind, strength = draw.random(), 0.06 + 0.2 * draw.random()
    if kind < 0.3:  # ruled paper
        for y in range(look.top + look.pitch - 2, side, look.pitch):
            shade[y : y + 1 + (strength > 0.2)] += strength
    elif kind < 0.4:  # a grid
        step = int(18 + 20 * draw.random())
        shade[::step] += strength / 2
        shade[:, ::step] += strength / 2
    elif kind < 0.55:  # stripes behind every other line
        for y in range(look.top, side, 2 * look.pitch):
            shade[y : y + look.pitch] += strength / 2
    if draw.random() < 0.35:  # a box around the page
        inset, thick = int(2 + 2 * draw.random()), int(1 + 2 * draw.random())
        shade[inset : inset + thick, inset:-inset] += 0.5
        shade[-inset - thick : -inset, inset:-inset] += 0.5
        shade[inset:-inset, inset : inset + thick] += 0.5
        shade[inset:-inset, -inset - thick : -inset] += 0.5
    if draw.random() < 0.4:  # a pale mark behind the text: disc, ring or square
        x, y, radius = (
            int(side * low + side * wide * draw.random()) for low, wide in ((0.2, 0.7), (0.2, 0.7), (0.06, 0.14))
        )
        rows, columns = np.ogrid[:side, :side]
        squared_distance = (
            (rows - y) ** 2 + (columns - x) ** 2
            if draw.random() < 0.6
            else np.maximum(abs(rows - y), abs(columns - x)) ** 2
        )
        shade[(squared_distance < radius**2) & (squared_distance > (radius * (draw.random() < 0.5) * 0.7) ** 2)] += (
            0.08 + 0.17 * draw.random()
        )
    x, y = int(draw.random() * (513 - side)), int(draw.random() * (513 - side))
    return shade + _noise()[int(draw.random() < 0.5), y : y + side, x : x + side] * np.float32(
        0.16 * draw.random() ** 2
    )


def inked(cover: np.ndarray, backdrop: np.ndarray, look: Style, draw: random.Random) -> np.ndarray:
    """Return a picture of text in ink over a background, (side, side, 3) uint8.

    Args:
        cover: how much of each pixel the glyphs cover, 0 to 255.
        backdrop: the background's darkness, see `backdrop_of`.
    """
    darkness = cover * np.float32((0.8 + 0.2 * draw.random()) / 255)
    darkness += backdrop * (1 - darkness)
    darkness *= 255
    darkness_bytes = np.clip(darkness, 0, 255, out=darkness).astype(np.uint8).tobytes()
    steps = np.arange(256, dtype=np.float32)[:, None] / 255
    table = (np.array(look.paper, np.float32) * (1 - steps) + np.array(look.ink, np.float32) * steps).astype(np.uint8)
    bands = [np.frombuffer(darkness_bytes.translate(table[:, band].tobytes()), dtype=np.uint8) for band in range(3)]
    return np.stack(bands, axis=1).reshape(*cover.shape, 3)


def _colour(levels: Sequence[int]) -> tuple[int, int, int]:
    red, green, blue = levels
    return red, green, blue
