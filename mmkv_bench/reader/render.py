"""Draw documents as square pictures of 14 px patches, and label each patch with its glyph.

There is an atlas of glyphs per typeface and size. Glyphs are pasted at whole pixels, so a page takes a few milliseconds. A
glyph's cell is at least 15 px wide, so it covers the centre of at least one column of patches. On average it covers 1.4
columns and two rows. Typefaces, sizes, spacing, colours, papers, rules, boxes and logos depend on the seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mmkv_bench.reader.document_style import Style, backdrop_of, inked, style
from mmkv_bench.reader.documents import FORMS, PATCH, Document, Line

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,:-/"
"""Signs on pages. Label 0 of a patch is blank, label i is CHARACTERS[i - 1]."""
SIGN, FIRST_COLUMN, FIRST_ROW = 127, 128, 256
"""Parts of a label: the mask of the sign, and flags of patches in the first column and in the first row of their glyph."""
NARROWEST = 15
"""Pixels of the narrowest cell: more than a patch, so each glyph's cell contains the centre of a patch."""


@dataclass(frozen=True)
class Glyph:
    """The picture of a sign.

    It has the coverage of pixels (0 to 255), the offset from the pen on the baseline, and the width of its cell in pixels.
    """

    ink: np.ndarray
    left: int
    top: int
    advance: float


@lru_cache(maxsize=400)
def atlas(path: str, size: int) -> dict[str, Glyph]:
    """Return all glyphs of a typeface, by sign. path: a font file. size: pixels of an em."""
    from PIL import ImageFont

    font = ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
    glyphs = {}
    for sign in CHARACTERS:
        mask, (left, top) = font.getmask2(sign, "L", anchor="ls")
        ink = np.asarray(mask, dtype=np.uint8).reshape(mask.size[1], mask.size[0])
        glyphs[sign] = Glyph(ink, int(left), int(top), float(font.getlength(sign)))
    return glyphs


def draw_document(paper: Document, seed: str, typefaces: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures of a document's pages, and for each patch the glyph that it shows.

    Args:
        seed: text that determines the style.
        typefaces: paths of font files, of which one is chosen.

    Returns:
        Pictures (n, side, side, 3) uint8, and labels (n, side / 14, side / 14) int16.
    """
    side, count = FORMS[paper.form]
    lines = max(len(page) for page in paper.pages)
    look = style(seed, typefaces, paper.form, lines)
    draw = random.Random(f"pages {seed}")
    pictures = np.empty((count, side, side, 3), dtype=np.uint8)
    labels = np.zeros((count, side // PATCH, side // PATCH), dtype=np.int16)
    backdrop = backdrop_of(draw, side, look)
    for place, page in enumerate(paper.pages):
        cover = np.zeros((side, side), dtype=np.uint8)
        shift = (int(draw.random() * 5) - 2, int(draw.random() * 5) - 2) if paper.form == "video" else (0, 0)
        _write(cover, labels[place], page, look, shift)
        pictures[place] = inked(cover, backdrop, look, draw)
    return pictures, labels


def _write(cover: np.ndarray, labels: np.ndarray, page: tuple[Line, ...], look: Style, shift: tuple[int, int]) -> None:
    """Draw the lines of a page into `cover`, and the numbers of their glyphs into `labels`; both are changed in place.

    cover: coverage of each pixel, 0 to 255. labels: glyph of each patch. shift: offset of the text in pixels.
    """
    side = cover.shape[0]
    glyphs = atlas(look.typeface, look.size)
    stops = _stops(page, glyphs, look, side) if look.columns else None
    for number, line in enumerate(page):
        baseline = look.top + look.pitch * number + int(look.pitch * 0.76) + shift[1]
        start = look.margin + (PATCH if line.indent else 0) + shift[0]
        free_width = side - start - 4
        tracking, gap = look.tracking, look.gap
        while (wide := _width(line.cells, glyphs, tracking, gap)) > free_width and tracking > -3:
            tracking, gap = tracking - 0.5, max(7.0, gap - 1)
        narrowest = NARROWEST if wide <= free_width else 0  # 0 for a line that does not fit otherwise
        pen = float(start)
        for place, cell in enumerate(line.cells):
            if stops and place and len(line.cells) > 1 and not line.heading and not line.indent and wide <= free_width:
                rest = _width(line.cells[place:], glyphs, tracking, gap)
                pen = max(pen, stops[place] + shift[0]) if stops[place] + rest < side - 4 else pen
            for sign in cell:
                if sign == " ":
                    pen += gap
                    continue
                glyph = glyphs[sign]
                advance = max(glyph.advance + tracking, narrowest)
                _paste(cover, glyph, round(pen + (advance - glyph.advance) / 2), baseline)
                _label(labels, pen, pen + advance, baseline, look.size, sign)
                pen += advance
            pen += gap


def _width(cells: tuple[str, ...], glyphs: dict[str, Glyph], tracking: float, gap: float) -> float:
    """Return the width in pixels of a line with these cells side by side.

    tracking: pixels between glyphs. gap: pixels of a space.
    """
    signs = "".join(cells).replace(" ", "")
    spaces = sum(cell.count(" ") for cell in cells) + len(cells) - 1
    return sum(max(glyphs[sign].advance + tracking, NARROWEST) for sign in signs) + gap * spaces


def _stops(page, glyphs, look: Style, side: int) -> list[float]:
    """Return the left edges of the columns of a page's table, in pixels. A column is as wide as its widest cell."""
    widest: list[float] = []
    for line in page:
        if line.heading or line.indent:
            continue
        for place, cell in enumerate(line.cells):
            wide = _width((cell,), glyphs, look.tracking, look.gap)
            widest[place:] = [max(wide, widest[place]), *widest[place + 1 :]] if place < len(widest) else [wide]
    stops, pen = [], float(look.margin)
    for wide in widest:
        stops.append(pen)
        pen += wide + look.gap
    return stops or [0.0]


def _paste(cover: np.ndarray, glyph: Glyph, x: int, baseline: int) -> None:
    """Draw one glyph into `cover`, in place. Parts outside the picture are cut off."""
    glyph_height, glyph_width = glyph.ink.shape
    left, top = x + glyph.left, baseline + glyph.top
    covered = cover[max(top, 0) : top + glyph_height, max(left, 0) : left + glyph_width]
    ink = glyph.ink
    if covered.shape != ink.shape:
        y, x = max(-top, 0), max(-left, 0)
        ink = ink[y : y + covered.shape[0], x : x + covered.shape[1]]
    np.maximum(covered, ink, out=covered)


def _label(labels: np.ndarray, left: float, right: float, baseline: int, size: int, sign: str) -> None:
    """Label, in place, the patches whose centres are in a glyph's cell.

    The cell has the columns from `left` to `right`, and the rows between cap height and baseline.
    """
    x0, x1 = int(left / PATCH + 0.5), int(right / PATCH + 0.5)  # first patch whose centre is at or right of the edge
    y0, y1 = int((baseline - 0.74 * size - 2) / PATCH + 0.5), int((baseline + 3) / PATCH + 0.5)
    labelled_patches = labels[y0 : max(y1, y0 + 1), x0 : max(x1, x0 + 1)]
    labelled_patches[:] = _LABELS[sign]
    labelled_patches[:, :1] += FIRST_COLUMN
    labelled_patches[:1] += FIRST_ROW


_LABELS = {sign: place for place, sign in enumerate(CHARACTERS, 1)}
