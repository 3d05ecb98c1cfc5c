"""Simulate false separations of equal methods, and the cost in power, on a grid fixed beforehand: `make simulate-levels`.

methods  2, 3, 5, 8, 28; every two of them are a pair, corrected together
pages    50, 100, 300 clusters of four shapes: single samples; 1 to 7; geometric with mean 4 and at most 25 (as DocVQA); one page
         in a hundred with 40 questions, the others with one
skews    binary    right or wrong; each method answers 15 % of the pages anew
         graded    as ANLS, likewise
         rare win  one method loses .1 on 18 % of the pages and wins .9 on 2 %
         half      half of the methods do
         hard      one method loses .01 on 90 % of the pages and wins .9 on 1 %
         nats      log-normal KL, at most 5 nats; one method has half the median and 5 nats on .9 % of the pages

`false` is the share of families of equal methods in which Holm's procedure separates any two. Power is that of the first
method against the others, each sample of it being right (0 nats) with a probability at which the plain cluster t test has a
power of .8; it is told where the plain test holds its level.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from scipy.special import stdtr

from mmkv_bench.statistics.cluster_sums import Block, Samples, blocks
from mmkv_bench.statistics.paired_tests import compare_pairs, holm
from tools.simulate import graded_scores, redrawn, right

METHODS, PAGES = (2, 3, 5, 8, 28), (50, 100, 300)
SHAPES = ("single", "1 to 7", "geometric", "rare big")
SKEWS = ("binary", "graded", "rare win", "half", "hard", "nats")
BATCH = 5  # families that have the same page sizes
_MEDIAN, _SPREAD, _CAP = 0.03, 1.5, 5.0


def page_sizes(rng: np.random.Generator, pages: int, shape: str) -> np.ndarray:
    """Return the number of samples of each page, int [pages]."""
    if shape == "1 to 7":
        return rng.integers(1, 8, pages)
    if shape == "geometric":
        return np.minimum(rng.geometric(0.25, pages), 25)
    return np.where(rng.random(pages) < 0.01, 40, 1) if shape == "rare big" else np.ones(pages, dtype=int)


def _mean_nats(median: float) -> float:
    """Return the mean of a log-normal variable that is cut at `_CAP`."""
    quantiles = np.exp(_SPREAD * np.random.default_rng(0).normal(size=2_000_000))
    return float(np.minimum(median * quantiles, _CAP).mean())


_RARE = (_mean_nats(_MEDIAN) - _mean_nats(_MEDIAN / 2)) / (_CAP - _mean_nats(_MEDIAN / 2))


def scores(rng: np.random.Generator, m: int, pages: np.ndarray, skew: str, gap: float = 0.0) -> np.ndarray:
    """Return scores float64 [m, n] of one family. pages: int [n], the page of each sample."""
    count = int(pages.max()) + 1
    first = rng.random(len(pages)) < gap
    if skew in ("binary", "graded"):
        found = redrawn(rng, pages, np.zeros(m), 0.15, right if skew == "binary" else graded_scores)
        found[0, first] = 1.0
        return found
    drawn = rng.random((m, count))
    if skew == "nats":
        medians = np.where(np.arange(m) == 0, _MEDIAN / 2, _MEDIAN)[:, None]
        found = np.minimum(medians * np.exp(_SPREAD * rng.normal(size=(m, count))), _CAP)
        found[0] = np.where(drawn[0] < _RARE, _CAP, found[0])
        found = found[:, pages]
        found[0, first] = 0.0
        return found
    lost, often, rarely = (0.01, 0.9, 0.01) if skew == "hard" else (0.1, 0.18, 0.02)
    change = np.where(drawn < often, -lost, np.where(drawn < often + rarely, 0.9, 0.0))
    change[((m + 1) // 2 if skew == "half" else 1) :] = 0.0
    found = 0.1 + change[:, pages]
    found[0, first] = 1.0
    return found


HEAD = """# How often equal methods are separated

`make simulate-levels` (tools/levels.py says what the skews and pages are): 2,000 families a cell, 400 of 28 methods, seed 0.
Columns are methods x pages; `single` pages have one sample each. Power is told where the plain cluster t test holds its level.

"""


@dataclass(frozen=True)
class Counts:
    """Shares of simulated families: decidable families, families with a false separation, and separated pairs.

    False separations and separated pairs of the first method are counted for our test and for the plain t test.
    """

    decidable: float
    false: float
    plain_false: float
    power: float
    plain_power: float


def count(m: int, pages: int, skew: str, shape: str, families: int, seed: int, gap: float = 0.0) -> Counts:
    """Simulate one cell of the grid."""
    rng = np.random.default_rng([seed, m, pages, SKEWS.index(skew), SHAPES.index(shape)])
    a, b = np.triu_indices(m, 1)
    every = np.arange(BATCH)[:, None] * m
    a, b, first = (every + a).ravel(), (every + b).ravel(), a == 0
    totals = np.zeros(5)
    for _ in range(families // BATCH):
        clusters = np.repeat(np.arange(pages), page_sizes(rng, pages, shape))
        values = np.concatenate([scores(rng, m, clusters, skew, gap) for _ in range(BATCH)])
        samples = Samples(values, clusters, None, skew != "nats")
        column = compare_pairs([""] * len(values), samples, a, b)
        plain = np.ones(len(a))
        for block in blocks(samples, a, b, np.flatnonzero(column.decidable)):
            plain[block.at] = plain_p(block)
        for ours, theirs, decidable in zip(
            *(x.reshape(BATCH, -1) for x in (column.p, plain, column.decidable)), strict=True
        ):
            apart, plainly = ours <= holm(ours)[1], theirs <= holm(theirs)[1]
            totals += [decidable.any(), apart.any(), plainly.any(), apart[first].mean(), plainly[first].mean()]
    return Counts(*(totals / (families // BATCH * BATCH)).tolist())


def plain_p(block: Block) -> np.ndarray:
    """Return the p-values [P] of the plain cluster t test, without the variance of unseen clusters."""
    sizes = np.broadcast_to(block.sizes, block.sums.shape)
    count, total = np.count_nonzero(sizes, axis=1), sizes.sum(axis=1)
    mean = block.sums.sum(axis=1) / total
    residuals = ((block.sums - mean[:, None] * sizes) ** 2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = np.where(mean == 0, 0.0, np.abs(mean) * total / np.sqrt(residuals * count / (count - 1)))
    return 2 * stdtr(count - 1, -statistic)


def limit(families: int) -> float:
    """Return 5 % plus two standard errors."""
    return 0.05 + 2 * (0.05 * 0.95 / families) ** 0.5


def gap_of(m: int, pages: int, skew: str, shape: str, families: int, seed: int) -> float:
    """Return the gap at which the plain t test separates .8 of the first method's pairs, by bisection."""
    low, high = 0.0, 0.6
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if count(m, pages, skew, shape, families, seed, middle).plain_power < 0.8 else (low, middle)
        )
    return (low + high) / 2


def rows(families: int, seed: int, skews: Sequence[str], shapes: Sequence[str]) -> Iterator[str]:
    """Yield one tab-separated line per cell when it is computed: false shares, then power if the plain test holds its level."""
    for shape, skew, m, pages in product(shapes, skews, METHODS, PAGES):
        own = families if m < 28 else families // 5
        null = count(m, pages, skew, shape, own, seed)
        line = [shape, skew, str(m), str(pages), *(f"{x:.4f}" for x in (null.decidable, null.false, null.plain_false))]
        if null.decidable > 0.5 and null.plain_false <= limit(own):
            gap = gap_of(m, pages, skew, shape, max(own // 20, 20), seed + 1)
            apart = count(m, pages, skew, shape, max(own // 5, 80), seed + 2, gap)
            line += [f"{gap:.3f}", f"{apart.power:.3f}", f"{apart.plain_power:.3f}"]
        yield "\t".join(line)


def report(lines: Sequence[str], families: int) -> str:
    """Return the tables of a whole grid in Markdown."""
    cells = {tuple(parts[:4]): parts[4:] for parts in (line.split("\t") for line in lines)}
    heads = list(product(METHODS, PAGES))
    head = (
        "| pages | skew | "
        + " | ".join(f"{m} x {pages}" for m, pages in heads)
        + " |\n"
        + "|---" * (len(heads) + 2)
        + "|"
    )
    tables: list[list[str]] = [[], [], []]
    most = [limit(families if m < 28 else families // 5) for m, _ in heads]
    for shape, skew in product(SHAPES, SKEWS):
        found = [cells[shape, skew, str(m), str(pages)] for m, pages in heads]
        ours = [f"{100 * float(c[1]):.1f}{'!' * (float(c[1]) > top)}" for c, top in zip(found, most, strict=True)]
        power = [f"{float(c[4]):.2f} of {float(c[5]):.2f}" if len(c) > 3 else "" for c in found]
        for table, row in zip(tables, (ours, [f"{100 * float(c[2]):.1f}" for c in found], power), strict=True):
            table.append(" | ".join(row))
    names = [f"| {shape} | {skew} | " for shape, skew in product(SHAPES, SKEWS)]
    titles = (
        "False separations [%], methods x pages",
        "Those of the plain cluster t test [%]",
        "Power, ours of the plain test's",
    )
    return HEAD + "\n\n".join(
        f"{title}\n\n{head}\n" + "\n".join(name + row + " |" for name, row in zip(names, table, strict=True))
        for title, table in zip(titles, tables, strict=True)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the lines, or write the tables of a file of lines."""
    command = argparse.ArgumentParser(prog="python -m tools.levels", description=__doc__.split("\n")[0])
    command.add_argument("--families", type=int, default=2000, help="per cell; a fifth for 28 methods (default: 2000)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--skews", default=",".join(SKEWS))
    command.add_argument("--shapes", default=",".join(SHAPES))
    command.add_argument("--report", type=Path, help="a file of printed lines: print their tables instead")
    arguments = command.parse_args(argv)
    if arguments.report:
        print(report(arguments.report.read_text().splitlines(), arguments.families))
        return 0
    for line in rows(arguments.families, arguments.seed, arguments.skews.split(","), arguments.shapes.split(",")):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
