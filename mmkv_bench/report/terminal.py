"""Texts, tables, and maps of kept visual tokens in a terminal.

A part of a map is darker the more pairs of layer and KV head keep its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def console() -> Console:
    """Return a console for standard output. If it is no terminal, it is 80 columns wide, or $COLUMNS."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)


def plain(text: str) -> str:
    """Return a text with escapes in place of control characters; line breaks stay."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table(
    console: Console,
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    right: Sequence[str] = (),
    wrapped: Sequence[str] = (),
) -> None:
    """Print a table of strings or rich texts.

    right: headers of right-aligned columns. wrapped: headers of columns that shrink in a narrow terminal.
    """
    from rich import box
    from rich.table import Table

    rich_table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True)
    for name in header:
        rich_table.add_column(
            name, justify="right" if name in right else "left", overflow="fold", no_wrap=name not in wrapped
        )
    for row in rows:
        rich_table.add_row(*row)
    console.print(rich_table)


def pairs(console: Console, lines: Iterable[tuple[str, Any]]) -> None:
    """Print names and values in two columns without a header."""
    from rich.table import Table

    rich_table = Table(box=None, pad_edge=False, show_header=False)
    rich_table.add_column(no_wrap=True, style="dim")
    rich_table.add_column(overflow="fold")
    for name, value in lines:
        rich_table.add_row(name, value)
    console.print(rich_table)


LONGEST = 20_000
"""Largest number of characters of a text that are printed; rich takes minutes for ten million."""
MARK = ">>"
"""Printed where an answer starts to differ from the answer of `full`."""


def shorten(text: str) -> str:
    """Return the printable beginning of a text, followed by the number of left-out characters, if any."""
    more_text = f" [{len(text) - LONGEST:,} more characters]" if len(text) > LONGEST else ""
    return plain(text[:LONGEST]) + more_text


def marked_text(text: str, at: int | None) -> Text:
    """Return the beginning of a text, with `MARK` and bold style from character `at` on. None: no mark."""
    from rich.text import Text

    if at is None or at > LONGEST:
        return Text(shorten(text))
    styled_text = Text(plain(text[:at]))
    styled_text.append(MARK, style="bold")
    return styled_text.append(shorten(text)[len(plain(text[:at])) :], style="bold")


SHADES, ASCII = "·░▒▓█", ".-+#@"
NOTHING = " "  # no visual token shows this part
ACROSS, DOWN = 2, 48  # characters per column, so that squares look square; largest number of lines
GAP = "   "


def shares(kept: Sequence[np.ndarray], tokens: int) -> np.ndarray:
    """Return the share of pairs of layer and KV head that keep each token, float64 [tokens].

    kept: per layer int [KV heads, m], positions; negative positions are padding.
    """
    heads = sum(len(layer) for layer in kept)
    kept_counts = np.concatenate([layer[layer >= 0] for layer in kept])
    return np.bincount(kept_counts, minlength=tokens)[:tokens] / heads


class KeptMap(NamedTuple):
    """Map of the tokens that a cell kept of a prompt.

    Attributes:
        title, words: lines above the map.
        share: float64 [tokens], share of pairs of layer and KV head that keep each token.
        visual: int [V], positions of the visual tokens.
        places: float64 [V, 5], image number of each visual token, then top, bottom, left and right as fractions of the
            image's sides; -1 if the token shows no part of an image. None: unknown.
    """

    title: str
    words: Sequence[str]
    share: np.ndarray
    visual: np.ndarray
    places: np.ndarray | None

    def lines(self, shades: str, width: int) -> list[str]:
        """Return the map as text lines of at most `width` characters. shades: from nothing kept to all kept."""
        visual = self.share[self.visual]
        text = len(self.share) - len(visual)
        counts_text = (
            f"visual {visual.sum():.0f} of {len(visual)}, text {self.share.sum() - visual.sum():.0f} of {text}"
        )
        head_lines = [self.title, counts_text, *self.words]
        if self.places is None or not len(visual):
            return [*head_lines, "positions of its visual tokens are unknown"]
        if visual.min() == 1:
            return [*head_lines, "all of them"]
        images = range(int(self.places[:, 0].max()) + 1)
        blocks = [shade_lines(raster(self.places, visual, image, width // ACROSS), shades) for image in images]
        return head_lines + side_by_side(blocks, width)


def show(console: Console, maps: Sequence[KeptMap]) -> None:
    """Print maps side by side with a legend. Shades are block characters, or ASCII if the output cannot show these."""
    try:
        SHADES.encode(console.encoding)
        shades = SHADES
    except (UnicodeEncodeError, LookupError):
        shades = ASCII
    for line in side_by_side([one.lines(shades, console.width) for one in maps], console.width):
        console.print(line, overflow="ignore", no_wrap=True, crop=False)
    shade_steps = len(shades) - 1
    middle_legend = [f"{shades[i]} up to {i / shade_steps:.0%}" for i in range(1, shade_steps)]
    legend = [f"{shades[0]} no layer and KV head keeps it", *middle_legend, f"{shades[-1]} more, up to all"]
    console.print(f"\n{', '.join(legend)}")


def raster(places: np.ndarray, share: np.ndarray, image: int, width: int) -> np.ndarray:
    """Return the mean share of kept entries in each part of an image, float64 [lines, columns]; NaN for a part without
    tokens.

    Tokens are weighted by the area of the part that they cover.

    Args:
        places: as in `KeptMap`.
        share: float64 [V], share of layers and KV heads that keep each visual token.
        image: number of the image.
        width: largest number of columns.
    """
    in_image = places[:, 0] == image
    if not in_image.any():
        return np.full((1, 1), np.nan)
    top, bottom, left, right = (places[in_image, side] for side in range(1, 5))
    image_rows, image_columns = round(1 / (bottom - top).min()), round(1 / (right - left).min())
    scale = min(1.0, width / image_columns, DOWN / image_rows)
    row_overlap = _overlap(top, bottom, max(1, round(image_rows * scale)))
    column_overlap = _overlap(left, right, max(1, int(image_columns * scale)))
    cell_area = row_overlap @ column_overlap.T
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(cell_area > 1e-12, (row_overlap * share[in_image]) @ column_overlap.T / cell_area, np.nan)


def _overlap(start: np.ndarray, end: np.ndarray, parts: int) -> np.ndarray:
    """Return the overlap of each of n spans with each part of the unit interval, float64 [parts, n]."""
    low = np.arange(parts)[:, None] / parts
    return np.clip(np.minimum(end, low + 1 / parts) - np.maximum(start, low), 0, None)


def shade_lines(grid: np.ndarray, shades: str) -> list[str]:
    """Return a raster as text lines. The first shade means that nothing is kept, the last that more than three quarters
    are."""
    shade_levels = np.ceil(np.clip(np.nan_to_num(grid), 0, 1) * (len(shades) - 1) - 1e-9).astype(int)
    letters = np.where(np.isnan(grid), NOTHING, np.array(list(shades))[shade_levels])
    return ["".join(letter * ACROSS for letter in line) for line in letters]


def side_by_side(blocks: Sequence[Sequence[str]], width: int) -> list[str]:
    """Join blocks of lines, with as many blocks side by side as fit into the width."""
    lines: list[str] = []
    current_row: list[Sequence[str]] = []
    for block in blocks:
        if current_row and len(GAP) * len(current_row) + sum(map(_width, [*current_row, block])) > width:
            lines += [*_joined(current_row), ""]
            current_row = []
        current_row.append(block)
    return lines + _joined(current_row)


def _joined(row: Sequence[Sequence[str]]) -> list[str]:
    padded_blocks = [[line.ljust(_width(block)) for line in block] for block in row]
    line_rows = zip_longest(*padded_blocks)
    return [
        GAP.join(part or " " * _width(block) for part, block in zip(parts, row, strict=True)).rstrip()
        for parts in line_rows
    ]


def _width(block: Sequence[str]) -> int:
    return max(map(len, block), default=0)
