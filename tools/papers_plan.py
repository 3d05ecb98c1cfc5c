"""Plan the runs that fill papers' tables, and estimate their hours: `python -m tools.papers_plan <id> ...`.

Only the papers' files are read: shapes and printed prompt lengths. One prefill of a sample serves all cells of its model and
data; a step reads the weights once for FORKS cells. Answers count in full length, so decoding hours are an upper bound. Roofline
hours leave out the methods' scores, vision towers and judges.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache

from mmkv_bench.config.files import content
from mmkv_bench.errors import MMKVError
from mmkv_bench.families.facts import StatedConfig
from mmkv_bench.families.registry import image_tokens
from mmkv_bench.forecast import roofline
from mmkv_bench.forecast.forecast import HOUR
from mmkv_bench.forecast.prompt_length import ASSUMED, QUESTION
from mmkv_bench.models.shape import decoder_of
from mmkv_bench.papers.address import (
    FRACTION,
    NONE,
    SYNTHETIC,
    Address,
    file_of,
    samples_of,
)
from mmkv_bench.papers.layout import TableLayout, load, table_ids
from mmkv_bench.papers.non_score_metrics import (
    TOKENS,
    bytes_per_token,
    has_numbers,
    model_file,
)
from mmkv_bench.papers.printed import of_table
from mmkv_bench.tables.formats import aligned

FORKS, PASSES = 16, 6
"""Answers that one step decodes together (`fork_batch`); timed passes of a cell, with one to warm up (`repeats`)."""
SHARES = (0.37, 0.27)
"""Measured shares of the roofline: of the text model's prefill in the time to the first token, with encoding and vision tower
(results/bench/fork.md), and of a step of 16 answers with reduced caches (results/bench/decode.md). Both on a CPU."""
SIDES = tuple(range(28, 3585, 28))
"""Sides of pictures [pixels]."""
_DRAWN = (".scorers.mmshift.", ".scorers.random.")
_NOTE = f"""\
One device of {{:,.0f}} GB/s and {{:,.0f}} TFLOP/s; answers count in full length.
roofline: lower bound. expected: at measured shares of it, {SHARES[0]} before the first token and {SHARES[1]} in a step of {FORKS}
answers (results/bench, on a CPU, not on a GPU). Prompt lengths are printed ones, of a picture of fixed size and a question, or
assumed where no paper prints one. `--format csv` has the commands of the cells.
"""


@dataclass(frozen=True)
class PlannedPrefills:
    """Cells that share prefills.

    tokens: length of a prompt; source: origin of `tokens`; samples: 0 if unknown; prefill, decode: hours of the roofline, None
    if the model's shape is unknown.
    """

    model: str
    dataset: str
    tokens: int
    source: str
    new_tokens: int
    samples: int
    cells: int
    prefill: float | None
    decode: float | None

    @property
    def expected(self) -> float | None:
        """Return the hours at the measured shares of the roofline."""
        if self.prefill is None or self.decode is None:
            return None
        return self.prefill / SHARES[0] + self.decode / SHARES[1]


@dataclass(frozen=True)
class PlanDevice:
    """A device: bandwidth in bytes/s, rate in operations/s."""

    bandwidth: float = 3.35e12
    rate: float = 4e14


def loads(layouts: Iterable[TableLayout], device: PlanDevice) -> list[PlannedPrefills]:
    """Plan the cells of tables; a cell in several tables counts once, and diagnostics are left out."""
    groups: dict[tuple[object, ...], set[Address]] = {}
    for one in (one for layout in layouts for one in layout.needed_addresses if one.runs and has_numbers(one.metric)):
        for cell in _cells(one):
            lengths = (cell.max_new_tokens, cell.cut_prompt, cell.frames, cell.length, cell.new_tokens, cell.batch)
            groups.setdefault((cell.model, cell.dataset, *lengths), set()).add(cell)
    planned = (_planned(list(cells), device) for cells in groups.values())
    return sorted(planned, key=lambda one: (one.model, one.dataset))


def total(planned: Sequence[PlannedPrefills]) -> tuple[float | None, float | None]:
    """Return (hours of the roofline, expected hours) of the loads whose hours are known."""
    roofline_hours = [hours for one in planned for hours in (one.prefill, one.decode)]
    sums = (
        [hours for hours in each if hours is not None] for each in (roofline_hours, [one.expected for one in planned])
    )
    least, expected = (sum(each) if each else None for each in sums)
    return least, expected


def plan_text(layouts: Sequence[TableLayout], device: PlanDevice) -> str:
    """Return the plan of each table, and of all tables together, as text."""
    parts = [(f"{layout.title} ({layout.id})", [layout]) for layout in layouts]
    parts += [("All of them, cells of several tables once", list(layouts))] if len(layouts) > 1 else []
    lines = []
    for title, group in parts:
        planned = loads(group, device)
        lines += [f"**{title}**", "", *([_table(planned), ""] if planned else [])]
        diagnostics = sum(not has_numbers(cell.address.metric) for layout in group for cell in layout.cells)
        if diagnostics:
            lines += [f"{diagnostics} cells are of diagnostics (`mmkv-bench diagnose`), which have no forecast.", ""]
    return "\n".join([*lines, _NOTE.format(device.bandwidth / 1e9, device.rate / 1e12)])


def _table(planned: Sequence[PlannedPrefills]) -> str:
    header = ["model", "dataset", "cells", "samples", "answers", "prompt", "from", "new", "roofline h", "expected h"]
    lines = []
    for one in planned:
        counts = [f"{one.cells:,}", f"{one.samples:,}" if one.samples else "unknown", f"{one.cells * one.samples:,}"]
        hours = map(_hours, total([one]))
        lines.append([one.model, one.dataset, *counts, f"{one.tokens:,}", one.source, f"{one.new_tokens:,}", *hours])
    cells, answers = sum(one.cells for one in planned), sum(one.cells * one.samples for one in planned)
    last = ["all", "", f"{cells:,}", "", f"{answers:,}", "", "", "", *map(_hours, total(planned))]
    return aligned(header, [*lines, last])


def _cells(at: Address) -> list[Address]:
    """Return the cells behind a number: metrics do not matter, and only stochastic methods have several seeds."""
    cells = []
    for method in filter(None, (at.method, at.minus)):
        reading = "paper" if method.base == "full" else at.reading
        one = replace(at, metric="", method=method, minus=None, samples=None, reading=reading)
        scorer = str(content("method", method.name).get("scorer"))
        seeds = at.seeds if any(name in scorer for name in _DRAWN) else (0,)
        cells += [replace(one, seeds=(seed,)) for seed in seeds]
    return cells


def _planned(cells: Sequence[Address], device: PlanDevice) -> PlannedPrefills:
    at, timed = cells[0], cells[0].dataset in SYNTHETIC
    tokens, source = (at.length or 0, "the table") if timed else _prompt(at)
    stated = {} if timed else content("dataset", file_of(at.dataset)).get("generation") or {}
    new = at.new_tokens or at.max_new_tokens or stated.get("max_new_tokens") or 0
    samples = PASSES if timed else samples_of(file_of(at.dataset))
    without_hours = PlannedPrefills(at.model, at.dataset, tokens, source, new, samples, len(cells), None, None)
    shape = model_file(at.model)["shape"]
    decoder = decoder_of(StatedConfig(shape)) if shape else None
    if decoder is None:
        return without_hours
    together, batch = (1, at.batch or 1) if timed else (FORKS, 1)
    prefills = samples * batch * (len(cells) if timed else 1)
    entries = sum(_kept(one, tokens) + new / 2 for one in cells) * batch
    step = -(-len(cells) // together) * decoder.read * 2 + entries * bytes_per_token(at.model)
    prefill = prefills * roofline.prefill_operations(decoder, tokens) / device.rate
    return replace(without_hours, prefill=prefill / HOUR, decode=samples * new * step / device.bandwidth / HOUR)


def _kept(at: Address, tokens: int) -> float:
    if at.budget_kind == NONE:
        return tokens
    return float(Decimal(at.budget) * tokens) if at.budget_kind == FRACTION else min(tokens, int(at.budget))


def _prompt(at: Address) -> tuple[int, str]:
    """Return (tokens of a prompt, source)."""
    printed = _printed_prompts()
    for key in ((at.model, at.dataset), (at.model, at.frames)):
        if key in printed and key[1] is not None:
            return printed[key], "printed"
    low, high = _image_bounds(at.model) if "vision_config" in model_file(at.model)["shape"] else (0, 0)
    return (low + QUESTION, "picture") if low == high and at.frames is None and low else (ASSUMED, "assumed")


@cache
def _image_bounds(model: str) -> tuple[int, int]:
    """Return the least and the most visual tokens of a picture with sides of 28 to 3,584 pixels and aspect ratios up to 20."""
    kind, settings = model_file(model)["shape"]["model_type"], model_file(model)["processor"]
    sizes = [(width, height) for width in SIDES for height in SIDES if max(width, height) <= 20 * min(width, height)]
    counts = [image_tokens(kind, settings, *size) for size in sizes]
    return min(counts), max(counts)


@cache
def _printed_prompts() -> dict[tuple[str, str | int | None], int]:
    """Map (model, dataset) or (model, frames) to the tokens of a prompt, as tables print them.

    A model's videos have the length of its timed passes, if a table has both.
    """
    prompts: dict[tuple[str, str | int | None], int] = {}
    for layout in map(load, table_ids()):
        values = of_table(layout.id)
        frames = {one.frames for one in layout.needed_addresses if one.frames is not None}
        for at in (cell.address for cell in layout.cells):
            printed = values.get(at.printed)
            if at.metric == TOKENS and printed is not None and printed.number is not None:
                prompts[at.model, at.dataset] = int(printed.number)
            if at.dataset == "made_up_video" and at.length and len(frames) == 1:
                prompts.setdefault((at.model, next(iter(frames))), at.length)
    return prompts


def _hours(hours: float | None) -> str:
    return "unknown" if hours is None else f"{hours:.2g}" if hours < 10 else f"{hours:.0f}"


def main() -> None:
    """Print the plan of the named tables, or of all tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.papers_plan", description="Print what the cells of tables take: answers, hours."
    )
    parser.add_argument("tables", nargs="*", metavar="id", help="as `mmkv-bench papers --list` has them; default: all")
    parser.add_argument("--bandwidth", type=float, default=3350.0, metavar="GB/S", help="default 3350, an H100")
    parser.add_argument("--matmul", type=float, default=400.0, metavar="TFLOP/S", help="default 400")
    given = parser.parse_args()
    device = PlanDevice(given.bandwidth * 1e9, given.matmul * 1e12)
    try:
        print(plan_text([load(name) for name in given.tables or table_ids()], device), end="")
    except MMKVError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
