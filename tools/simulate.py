"""Simulate how often tables make wrong statements, on made-up columns whose truth is known: `make simulate`.

false    columns of equal methods (skew: of equal means) in which Holm's procedure separates any two
unbold   how often a method chosen beforehand among the truly best ones is not bold: all methods of a column of equal
         ones, the best one of a column whose methods are apart
rank     how often the true rank of a method chosen beforehand is outside its printed range, where methods are apart

Each may happen in 5 % of columns. Power, in the issue's words: pairs separated of 11 methods whose neighbours are `gap`
standard deviations of a paired difference apart, at each of 5 budgets, corrected by budget and over all 275 pairs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mmkv_bench.statistics.cluster_sums import Samples
from mmkv_bench.statistics.metric_kinds import F1_OF_MEANS, PERPLEXITY, bleu
from mmkv_bench.statistics.paired_tests import Column, compare_column, holm

METHODS = 30
GAPS = (1.6, 0.16, 0.08)
Make = Callable[[np.random.Generator, np.ndarray], Samples]
"""(random numbers, how far each method is moved up [m]) -> a column; 0 for all: equal methods."""


def _pages(rng: np.random.Generator, clusters: int, per: int) -> np.ndarray:
    """Return the cluster of each sample: one sample per cluster, or 1 to 2 per - 1."""
    sizes = np.ones(clusters, dtype=int) if per == 1 else rng.integers(1, 2 * per, clusters)
    return np.repeat(np.arange(clusters), sizes)


def redrawn(
    rng: np.random.Generator, clusters: np.ndarray, moved: np.ndarray, share: float, draw: Callable[..., np.ndarray]
) -> np.ndarray:
    """Draw scores [m, n] from a common base; each method changes a share of the clusters, alike within half of a cluster."""
    m, n, count = len(moved), len(clusters), int(clusters.max()) + 1
    changed = (rng.random((m, count)) < share)[:, clusters] & (rng.random((m, n)) < 0.9)
    alike = draw(rng, np.repeat(moved[:, None], count, axis=1))[:, clusters]
    anew = np.where(rng.random((m, n)) < 0.5, alike, draw(rng, np.repeat(moved[:, None], n, axis=1)))
    return np.where(changed, anew, draw(rng, np.zeros(n)))


def right(rng: np.random.Generator, moved: np.ndarray) -> np.ndarray:
    """Draw right or wrong, 70 % right."""
    return (rng.random(moved.shape) < 0.7 + moved).astype(np.float64)


def graded_scores(rng: np.random.Generator, moved: np.ndarray) -> np.ndarray:
    """Draw graded scores: 60 % ones, the rest 0 or from .5 to .9."""
    return np.where(rng.random(moved.shape) < 0.6 + moved, 1.0, rng.choice([0, 0.5, 0.6, 0.7, 0.8, 0.9], moved.shape))


def binary(rng: np.random.Generator, moved: np.ndarray, clusters: int = 100, per: int = 1) -> Samples:
    """Simulate right or wrong, with `per` samples per cluster on average."""
    pages = _pages(rng, clusters, per)
    return Samples(redrawn(rng, pages, moved, 0.15, right), pages)


def graded(rng: np.random.Generator, moved: np.ndarray, clusters: int = 100, per: int = 1) -> Samples:
    """Simulate scores like ANLS: most answers equal the common base."""
    pages = _pages(rng, clusters, per)
    return Samples(redrawn(rng, pages, moved, 0.15, graded_scores), pages)


def seeds(rng: np.random.Generator, moved: np.ndarray, clusters: int = 100, per: int = 1) -> Samples:
    """Simulate right or wrong, averaged over three seeds."""
    pages = _pages(rng, clusters, per)
    base = right(rng, np.zeros(len(pages)))
    shape = (3, len(moved), len(pages))
    anew = right(rng, np.broadcast_to(moved[:, None], shape))
    return Samples(np.where(rng.random(shape) < 0.15, anew, base).mean(axis=0), pages)


def nll(rng: np.random.Generator, moved: np.ndarray, clusters: int = 100, per: int = 1) -> Samples:
    """Simulate negative log-likelihoods with heavy tails over answers of 1 to 59 tokens."""
    pages = _pages(rng, clusters, per)
    tokens = rng.integers(1, 60, len(pages)).astype(np.float64)
    noise = rng.standard_t(4, (len(moved), len(pages))) * 0.2
    sums = (rng.gamma(2, 1, len(pages)) + noise - moved[:, None]) * tokens
    return Samples(np.stack(np.broadcast_arrays(sums, tokens), axis=-1), pages, PERPLEXITY)


def f1(rng: np.random.Generator, moved: np.ndarray, clusters: int = 100, per: int = 1) -> Samples:
    """Simulate the F1 of mean precision and mean recall, which are graded and correlated."""
    pages = _pages(rng, clusters, per)
    both = redrawn(rng, pages, moved, 0.3, graded_scores)
    recall = np.clip(both * rng.uniform(0.6, 1, both.shape), 0, 1)
    return Samples(np.stack([both, recall, np.ones(both.shape)], axis=-1), pages, F1_OF_MEANS)


def corpus_bleu(rng: np.random.Generator, moved: np.ndarray, clusters: int = 100, per: int = 1) -> Samples:
    """Simulate the corpus BLEU-2 of answers of 4 to 19 words, of which 70 % are right on average."""
    pages = _pages(rng, clusters, per)
    words = rng.integers(4, 20, len(pages))
    right = rng.binomial(words, np.clip(redrawn(rng, pages, moved, 0.3, graded_scores) * 0.6 + 0.3, 0, 1))
    parts = [np.broadcast_to(words, right.shape), np.broadcast_to(words, right.shape), right, right // 2]
    given = [parts[0], parts[0] - 1]
    return Samples(np.stack([*parts, *given], axis=-1).astype(np.float64), pages, bleu(2))


def skew(rng: np.random.Generator, moved: np.ndarray, clusters: int = 100, per: int = 1) -> Samples:
    """Simulate equal means where half of the methods lose .1 on 18 % of the samples and win .9 on 2 %."""
    pages = _pages(rng, clusters, per)
    drawn = rng.random((len(moved), len(pages)))
    change = np.where(drawn < 0.18, -0.1, np.where(drawn < 0.2, 0.9, 0.0))
    change[len(moved) // 2 :] = 0.0
    return Samples((0.15 + change + moved[:, None]) / 1.1, pages)


def documents(rng: np.random.Generator, moved: np.ndarray, clusters: int = 120) -> Samples:
    """Simulate right or wrong on pages of unequal size, geometric with mean 4 and at most 25; a page's answers are correlated."""
    pages = np.repeat(np.arange(clusters), np.minimum(rng.geometric(0.25, clusters), 25))
    shared = 0.55 * rng.normal(size=clusters)[pages] + 0.55 * rng.normal(size=len(pages))
    alone = 0.4 * rng.normal(size=(len(moved), clusters))[:, pages] + 0.48 * rng.normal(size=(len(moved), len(pages)))
    return Samples((shared + alone < 0.25 + 2.6 * moved[:, None]).astype(np.float64), pages)


def broken(rng: np.random.Generator, moved: np.ndarray, clusters: int = 300, worst: float = 5.0) -> Samples:
    """Simulate KL in nats; the last method loses `worst` nats on every other sample."""
    scores = rng.gamma(1.0, 0.05, clusters) + np.abs(rng.normal(0, 0.03, (len(moved), clusters))) - moved[:, None]
    scores[-1] += np.where(rng.random(clusters) < 0.5, worst, 0.0)
    return Samples(scores, np.arange(clusters), None, False)


CASES: Mapping[str, Make] = {
    "binary n=100": binary,
    "binary n=500": partial(binary, clusters=500),
    "binary 100 clusters of about 4": partial(binary, per=4),
    "graded n=100": graded,
    "graded n=500": partial(graded, clusters=500),
    "graded 100 clusters of about 4": partial(graded, per=4),
    "three seeds n=100": seeds,
    "three seeds n=500": partial(seeds, clusters=500),
    "three seeds 100 clusters of about 4": partial(seeds, per=4),
    "NLL n=100": nll,
    "NLL 100 clusters of about 4": partial(nll, per=4),
    "F1 100 clusters of about 4": partial(f1, per=4),
    "BLEU 100 clusters of about 4": partial(corpus_bleu, per=4),
    "skew n=100": skew,
    "skew n=500": partial(skew, clusters=500),
    "binary 120 unequal pages": documents,
}
APART: Mapping[str, tuple[Make, float]] = {
    "binary n=100": (binary, 0.3),
    "graded 100 clusters of about 4": (partial(graded, per=4), 0.4),
    "three seeds n=500": (partial(seeds, clusters=500), 0.3),
    "NLL n=100": (nll, 0.2),
    "skew n=500": (partial(skew, clusters=500), 0.05),
    "binary 120 unequal pages": (documents, 0.3),
    "KL n=300, the worst one broken": (broken, 0.2),
}
"""Columns whose methods are apart, and how far the best one is above the worst."""


def column(make: Make, rng: np.random.Generator, moved: np.ndarray) -> Column:
    """Return a simulated column after its tests."""
    samples = make(rng, moved)
    falling = samples.aggregator is PERPLEXITY or not samples.share
    return compare_column([str(i) for i in range(len(moved))], samples, falling=falling)


@dataclass(frozen=True)
class Rates:
    """Counts among `columns`, as the module describes; `rank` is None if all methods are equal, `false` if none are."""

    columns: int
    unbold: float
    false: float | None = None
    rank: float | None = None


def rates(make: Make, columns: int, seed: int, spread: float = 0.0, methods: int = METHODS) -> Rates:
    """Count wrong statements in simulated columns. spread: how far the best method is above the worst."""
    rng = np.random.default_rng(seed)
    moved = np.linspace(0, -spread, methods)
    false = unbold = outside = 0.0
    for _ in range(columns):
        found = column(make, rng, moved)
        false += bool(found.separated.any())
        best = found.best
        unbold += 1 - (best[0] if spread else best.mean())
        low, high = found.ranks.T
        rank = np.arange(1, methods + 1)
        outside += ((low > rank) | (rank > high)).mean()
    if spread:
        return Rates(columns, unbold / columns, rank=outside / columns)
    return Rates(columns, unbold / columns, false=false / columns)


def power(gap: float, seed: int, n: int = 500, methods: int = 11, budgets: int = 5) -> tuple[int, int]:
    """Count separated pairs of all `budgets` columns of graded scores: corrected per column, and over all pairs together."""
    rng = np.random.default_rng(seed)
    columns = [column(partial(_ladder, n=n), rng, gap * np.arange(methods)) for _ in range(budgets)]
    together = np.concatenate([found.p for found in columns])
    return sum(int(found.separated.sum()) for found in columns), int((together <= holm(together)[1]).sum())


def _ladder(rng: np.random.Generator, moved: np.ndarray, n: int) -> Samples:
    """Draw scores of which 60 % have noise of .1; `moved` in standard deviations of a paired difference."""
    base = np.clip(rng.normal(0.5, 0.25, n), 0, 1)
    noise = rng.normal(0, 0.1, (len(moved), n)) * (rng.random((len(moved), n)) < 0.6)
    return Samples(base + noise + moved[:, None] * np.sqrt(2 * 0.6) * 0.1, np.arange(n))


def lines(columns: int, seed: int) -> Iterator[str]:
    """Yield the lines of the report when they are computed."""
    from scipy.stats import binomtest

    def told(rate: float | None) -> str:
        if rate is None:
            return f"{'':22}"
        bound = binomtest(round(rate * columns), columns).proportion_ci(0.95)
        return f"{rate:6.1%} [{bound.low:5.1%}, {bound.high:5.1%}]"

    yield f"{columns} columns of {METHODS} methods each, {METHODS * (METHODS - 1) // 2} pairs, seed {seed}"
    yield f"{'equal methods':38} {'false':22} {'unbold':22} seconds"
    for name, make in CASES.items():
        start = time.perf_counter()
        found = rates(make, columns, seed)
        yield f"{name:38} {told(found.false)} {told(found.unbold)} {time.perf_counter() - start:.0f}"
    yield f"{'methods apart':38} {'unbold':22} {'rank':22} seconds"
    for name, (make, spread) in APART.items():
        start = time.perf_counter()
        found = rates(make, columns, seed, spread)
        yield f"{name:38} {told(found.unbold)} {told(found.rank)} {time.perf_counter() - start:.0f}"
    yield "power: 11 methods x 5 budgets, n = 500, of 275 pairs"
    for gap in GAPS:
        counts = np.array([power(gap, seed + i) for i in range(max(1, columns // 50))])
        means, least = counts.mean(axis=0), counts.min(axis=0)
        yield (
            f"gap {gap:4} sd: by budget {means[0]:.1f} in the mean, at least {least[0]}; "
            f"all 275 together {means[1]:.1f}, at least {least[1]}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report."""
    command = argparse.ArgumentParser(prog="python -m tools.simulate", description=__doc__.split("\n")[0])
    command.add_argument("--columns", type=int, default=1000, help="simulated columns of each kind (default: 1000)")
    command.add_argument("--seed", type=int, default=0)
    arguments = command.parse_args(argv)
    for line in lines(arguments.columns, arguments.seed):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
