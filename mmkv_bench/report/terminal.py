"""Texts and tables in a terminal, and maps of kept visual tokens as characters.

A map is darker where more layers and KV heads keep a place of the image.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def console() -> Console:
    """Standard output; 80 columns, or $COLUMNS, where it is no terminal."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)


def plain(text: str) -> str:
    """A model's or a user's text without control characters, which are written as escapes; line breaks stay."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table(
    console: Console,
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    right: Sequence[str] = (),
    wrapped: Sequence[str] = (),
) -> None:
    """Print a table of strings or rich texts; columns of `right` stand at the right edge, those of `wrapped` give way where the
    terminal is narrow."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True)
    for name in header:
        made.add_column(
            name, justify="right" if name in right else "left", overflow="fold", no_wrap=name not in wrapped
        )
    for row in rows:
        made.add_row(*row)
    console.print(made)


def pairs(console: Console, lines: Iterable[tuple[str, Any]]) -> None:
    """Print names with what they are, in two columns without a header."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True, style="dim")
    made.add_column(overflow="fold")
    for name, value in lines:
        made.add_row(name, value)
    console.print(made)


LONGEST = 20_000
"""Characters of a text that are shown; rich takes minutes to lay out ten million."""
MARK = ">>"
"""Stands where an answer leaves that of `full`."""


def cut(text: str) -> str:
    """The plain beginning of a text, and how much of it is not shown."""
    more = f" [{len(text) - LONGEST:,} more characters]" if len(text) > LONGEST else ""
    return plain(text[:LONGEST]) + more


def marked(text: str, at: int | None) -> Text:
    """A text, cut, with a mark before its `at`-th character, and what follows in another style; None: as it is."""
    from rich.text import Text

    if at is None or at > LONGEST:
        return Text(cut(text))
    made = Text(plain(text[:at]))
    made.append(MARK, style="bold")
    return made.append(cut(text)[len(plain(text[:at])) :], style="bold")


SHADES, ASCII = "·░▒▓█", ".-+#@"
NOTHING = " "  # no visual token shows that place
ACROSS, DOWN = 2, 48  # characters to a column, so that squares look like squares; lines at most
GAP = "   "


def shares(kept: Sequence[np.ndarray], tokens: int) -> np.ndarray:
    """float64 [tokens]: the share of layers and KV heads that keep each token.

    Args:
        kept: per layer int [KV heads, m], positions; negative ones are padding.
    """
    heads = sum(len(layer) for layer in kept)
    flat = np.concatenate([layer[layer >= 0] for layer in kept])
    return np.bincount(flat, minlength=tokens)[:tokens] / heads


@dataclass(frozen=True)
class KeptMap:
    """Map of the tokens that a cell kept of a prompt.

    title, words: lines above it. share: float64 [tokens], of layers and KV heads that keep each token; visual: int [V], positions
    of the visual tokens; places: float64 [V, 5], of each its image, top, bottom, left and right as parts of the image's sides, -1
    where it shows no place; None where that is not known.
    """

    title: str
    words: Sequence[str]
    share: np.ndarray
    visual: np.ndarray
    places: np.ndarray | None

    def lines(self, shades: str, width: int) -> list[str]:
        """Draw it as a block of lines."""
        visual = self.share[self.visual]
        text = len(self.share) - len(visual)
        counted = f"visual {visual.sum():.0f} of {len(visual)}, text {self.share.sum() - visual.sum():.0f} of {text}"
        head = [self.title, counted, *self.words]
        if self.places is None or not len(visual):
            return [*head, "where its visual tokens lie is not known"]
        if visual.min() == 1:
            return [*head, "all of them"]
        images = range(int(self.places[:, 0].max()) + 1)
        blocks = [drawn(raster(self.places, visual, image, width // ACROSS), shades) for image in images]
        return head + side_by_side(blocks, width)


def show(console: Console, maps: Sequence[KeptMap]) -> None:
    """Print maps beside each other, with what their shades mean."""
    shades = shades_of(console)
    for line in side_by_side([one.lines(shades, console.width) for one in maps], console.width):
        console.print(line, overflow="ignore", no_wrap=True, crop=False)
    console.print(f"\n{legend(shades)}")


def raster(places: np.ndarray, share: np.ndarray, image: int, width: int) -> np.ndarray:
    """float64 [lines, columns]: the mean share of what shows each part of an image, weighted by how much of the part it shows;
    NaN where nothing does.

    Args:
        places: see `Map`; share: float64 [V]. width: columns at most; there are no more than the finest tokens make.
    """
    in_image = places[:, 0] == image
    if not in_image.any():
        return np.full((1, 1), np.nan)
    top, bottom, left, right = (places[in_image, side] for side in range(1, 5))
    lines, columns = round(1 / (bottom - top).min()), round(1 / (right - left).min())
    smaller = min(1.0, width / columns, DOWN / lines)
    down = _overlap(top, bottom, max(1, round(lines * smaller)))
    across = _overlap(left, right, max(1, int(columns * smaller)))
    covered = down @ across.T
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(covered > 1e-12, (down * share[in_image]) @ across.T / covered, np.nan)


def _overlap(start: np.ndarray, end: np.ndarray, parts: int) -> np.ndarray:
    """float64 [parts, n]: how much of each of n spans lies in each part of the unit interval."""
    low = np.arange(parts)[:, None] / parts
    return np.clip(np.minimum(end, low + 1 / parts) - np.maximum(start, low), 0, None)


def drawn(grid: np.ndarray, shades: str) -> list[str]:
    """A raster as lines: the first shade where nothing is kept, the last above three quarters."""
    levels = np.ceil(np.clip(np.nan_to_num(grid), 0, 1) * (len(shades) - 1) - 1e-9).astype(int)
    letters = np.where(np.isnan(grid), NOTHING, np.array(list(shades))[levels])
    return ["".join(letter * ACROSS for letter in line) for line in letters]


def legend(shades: str) -> str:
    """Explain the shades."""
    steps = len(shades) - 1
    words = [f"{shades[0]} no layer and KV head keeps it"]
    words += [f"{shades[i]} up to {i / steps:.0%}" for i in range(1, steps)]
    return ", ".join([*words, f"{shades[-1]} more, up to all"])


def shades_of(console: Console) -> str:
    """Blocks, or letters where the output cannot show blocks."""
    try:
        SHADES.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return SHADES


def side_by_side(blocks: Sequence[Sequence[str]], width: int) -> list[str]:
    """Blocks of lines, as many beside each other as fit."""
    lines: list[str] = []
    row: list[Sequence[str]] = []
    for block in blocks:
        if row and len(GAP) * len(row) + sum(map(_width, [*row, block])) > width:
            lines += [*_joined(row), ""]
            row = []
        row.append(block)
    return lines + _joined(row) if row else lines


def _joined(row: Sequence[Sequence[str]]) -> list[str]:
    tall = max(map(len, row))
    padded = [[line.ljust(_width(block)) for line in [*block, *[""] * (tall - len(block))]] for block in row]
    return [GAP.join(parts).rstrip() for parts in zip(*padded, strict=True)]


def _width(block: Sequence[str]) -> int:
    return max(map(len, block), default=0)
