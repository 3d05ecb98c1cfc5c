"""Training batches: every batch is a pure function of (seed, step, phase), so a resumed run sees the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmkv_bench.tiny import splits
from mmkv_bench.tiny.layout import BLANK, Document, Turn, ask, make_document
from mmkv_bench.tiny.pages import draw_look, render
from mmkv_bench.tiny.vocabulary import DIGITS, PAGE_CHARACTERS, VOCAB_SIZE
from tools.train_tiny.sequences import cell_sources, make_sequence, tokens_of

POOL_ROWS = VOCAB_SIZE + 10  # token ids, then the ten handwritten digits
KINDS = ("lookup", "walk", "walk", "chain")  # drawn evenly
HANDWRITTEN_SHARE = 0.15


@dataclass(frozen=True)
class Phase:
    """One step of the curriculum: ranges (inclusive) of page sides and entries, documents per batch, questions each.

    Small batches and few questions come first: matching a question to its entry is learned at a certain number of
    steps rather than of samples, and sooner at short distances.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    entries: tuple[int, int]
    documents: int
    turns: int  # questions per document
    hops: int  # longest chain
    share: float  # of its own steps that draw this phase's pages; the others revisit the two phases before


PHASES = (
    Phase((4, 5), (6, 8), (3, 4), 12, 2, 2, 1.0),
    Phase((6, 8), (7, 9), (3, 8), 16, 3, 3, 0.8),
    Phase((10, 12), (10, 12), (5, 14), 20, 4, 3, 0.8),
    Phase((14, 16), (14, 16), (8, 20), 16, 4, 3, 0.8),
    Phase((20, 24), (20, 24), (10, 23), 8, 4, 3, 0.5),
)


@dataclass(frozen=True)
class Batch:
    """Arrays of one batch of D documents with I images of R x C cells each and sequences of S tokens.

    ids, labels, sources int64 (D, S); positions int64 (3, D, S); cells (token ids) and cell_sources int64 (D*I*R*C,)
    in reading order; pool_rows int64 (D*I*R*C,): rows of the pool of tower outputs; pages: uint8 (28R, 28C, 3) each,
    empty unless real images were asked for.
    """

    phase: int
    rows: int
    columns: int
    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    sources: np.ndarray
    cells: np.ndarray
    cell_sources: np.ndarray
    pool_rows: np.ndarray
    pages: list[np.ndarray]


@dataclass(frozen=True)
class _Shape:
    phase: int
    rows: int
    columns: int
    images: int  # distinct pages per document
    repeats: int  # frames per page (redundant documents)
    entries: int
    documents: int
    hops: int


def _between(rng: np.random.Generator, limits: tuple[int, int]) -> int:
    return int(rng.integers(limits[0], limits[1] + 1))


def _draw_shape(rng: np.random.Generator, phase: int, real: bool) -> _Shape:
    if phase > 0 and rng.random() >= PHASES[phase].share:
        phase = int(rng.integers(max(0, phase - 2), phase))
    plan = PHASES[phase]
    rows, columns, entries = (_between(rng, limits) for limits in (plan.rows, plan.columns, plan.entries))
    images, repeats, kind = 1, 1, rng.random()
    if real:  # windows of 4 x 4 cells
        rows, columns = (max(8, (side + 2) // 4 * 4) for side in (rows, columns))
    if phase > 0 and kind < 0.4:
        images = 2 if phase == 1 else int(rng.choice([2, 3, 4, 4, 4, 4]))
        rows, columns = (max(8, (side + 4) // 8 * 4) if real else side // 2 for side in (rows, columns))
        rows, columns = max(4, rows), max(6, columns)
        if kind < 0.15:
            images, repeats = 1, images
        entries = min(entries, images * rows * columns // (8 if repeats > 1 else 12))
    documents = plan.documents * 3 // 4 if real else plan.documents
    return _Shape(phase, rows, columns, images, repeats, max(entries, plan.hops), documents, plan.hops)


def _draw_document(rng: np.random.Generator, shape: _Shape) -> Document:
    sparse = shape.repeats > 1 and rng.random() < 0.75
    density = 0.0 if sparse else float(rng.uniform(0.0, 0.6))
    return make_document(rng, shape.rows, shape.columns, shape.images, shape.entries, density, shape.hops)


def draw_batch(seed: int, step: int, phase: int, real: bool) -> Batch:
    """Training batch number `step` while the curriculum stands at `phase`; with rendered pages if `real`."""
    rng = splits.generator("train", "batch", seed, step, phase, real)
    shape = _draw_shape(rng, phase, real)
    plan = [
        (KINDS[int(rng.integers(len(KINDS)))], int(rng.integers(1, shape.hops + 1)))
        for _ in range(PHASES[shape.phase].turns)
    ]
    sequences, grids, rows = [], [], []
    pages: list[np.ndarray] = []
    for _ in range(shape.documents):
        document = _draw_document(rng, shape)
        while any(all(document.hops(key) != hops for key in document.entries) for _, hops in plan):
            document = _draw_document(rng, shape)
        turns: list[Turn] = [ask(document, kind, hops, rng) for kind, hops in plan]
        frames = np.repeat(document.grids, shape.repeats, axis=0)
        handwritten = bool(rng.random() < HANDWRITTEN_SHARE)
        sequences.append(make_sequence(shape.rows, shape.columns, len(frames), turns))
        grids.append(frames)
        rows.append(pool_rows(frames, handwritten))
        if real:
            look = draw_look("train", rng)
            pages.extend(render(grid, "train", look, handwritten, rng) for grid in frames)
    cells = np.stack(grids)
    return Batch(
        shape.phase,
        shape.rows,
        shape.columns,
        ids=np.stack([sequence.ids for sequence in sequences]),
        labels=np.stack([sequence.labels for sequence in sequences]),
        positions=np.stack([sequence.positions for sequence in sequences], 1),
        sources=np.stack([sequence.sources for sequence in sequences]),
        cells=tokens_of(cells).reshape(-1),
        cell_sources=cell_sources(cells).reshape(-1),
        pool_rows=np.stack(rows).reshape(-1),
        pages=pages,
    )


def pool_rows(grids: np.ndarray, handwritten: bool) -> np.ndarray:
    """Row of the pool of tower outputs for every cell: its token id, or the handwritten digit's own row."""
    rows = tokens_of(grids)
    if handwritten:
        digit = (grids >= ord("0")) & (grids <= ord("9"))
        rows[digit] = VOCAB_SIZE + grids[digit] - ord("0")
    return rows


def reading_page(rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """A page of random characters for the vision tower: uint8 image, and pool rows int64 (rows * columns,).

    Half of the pages carry handwritten digits, and many of them, since those are the hardest to read.
    """
    handwritten = bool(rng.random() < 0.5)
    codes = np.array([ord(character) for character in PAGE_CHARACTERS])[
        rng.integers(0, len(PAGE_CHARACTERS), (rows, columns))
    ]
    if handwritten:
        more = rng.random((rows, columns)) < 0.6
        codes[more] = ord(DIGITS[0]) + rng.integers(0, 10, int(more.sum()))
    codes[rng.random((rows, columns)) >= rng.uniform(0.1, 1.0)] = BLANK
    page = render(codes, "train", draw_look("train", rng), handwritten, rng)
    return page, pool_rows(codes, handwritten).reshape(-1)
