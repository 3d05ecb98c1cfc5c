"""What the cells of a table take to run: exactly those, in hours, by arithmetic from shapes and printed lengths.

Nothing is opened but the papers' files. One prefill of a sample serves all cells of its model and data; a step reads the weights
once for FORKS cells. Answers count in full length, so that decoding is at most what is said, and methods' scores, vision
towers and the judges' calls are in no hour of the first kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache

from mmkv_bench.config.files import content
from mmkv_bench.families.config_file import StatedConfig
from mmkv_bench.forecast import roofline
from mmkv_bench.models.sizes import Decoder, decoder_of
from mmkv_bench.papers.address import FRACTION, NONE, SYNTHETIC, Address, MethodSettings, file_of, samples_of
from mmkv_bench.papers.computed import TOKENS, bytes_per_token, image_bounds
from mmkv_bench.papers.filled_table import needed
from mmkv_bench.papers.layout import TableLayout, load, table_ids
from mmkv_bench.papers.metrics import has_numbers
from mmkv_bench.papers.printed import of_table
from mmkv_bench.tables.formats import aligned

FORKS, PASSES = 16, 6
"""Answers that one step decodes together (`fork_batch`); timed passes of a cell, and one to warm up (`repeats`)."""
SHARES = (0.37, 0.27)
"""Of the roofline that was reached: the text model's prefill in all that comes before the first token, encoding and vision
tower included (results/bench/fork.md), and a step of 16 answers with reduced caches (results/bench/decode.md). Both on a CPU."""
ASSUMED, QUESTION = 2048, 64
"""Tokens of a prompt that no paper tells, and of the text beside a picture."""
_DRAWN = (".scorers.mmshift.", ".scorers.random.")
_HOUR = 3600.0


@dataclass(frozen=True)
class PlannedPrefills:
    """Cells that share prefills. tokens: of a prompt, `source` says where from; samples 0: unknown. Hours are those of the
    roofline, None where the model's shape is not known."""

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
        """Hours at the shares of the roofline that were reached."""
        return (
            None if self.prefill is None or self.decode is None else self.prefill / SHARES[0] + self.decode / SHARES[1]
        )


@dataclass(frozen=True)
class PlanDevice:
    """bandwidth: bytes/s; rate: operations/s."""

    bandwidth: float = 3.35e12
    rate: float = 4e14


def loads(specs: Iterable[TableLayout], device: PlanDevice) -> list[PlannedPrefills]:
    """What the cells of tables take, those of several tables once. Diagnostics are not among them."""
    found: dict[tuple[object, ...], set[Address]] = {}
    for one in (one for spec in specs for one in needed(spec)):
        if not one.runs or not has_numbers(one.metric):
            continue
        for own in _cells(one):
            told = (own.max_new_tokens, own.cut_prompt, own.frames, own.length, own.new_tokens, own.batch)
            found.setdefault((own.model, own.dataset, *told), set()).add(own)
    return sorted((_load(list(cells), device) for cells in found.values()), key=lambda load: (load.model, load.dataset))


def text(specs: Sequence[TableLayout], device: PlanDevice) -> str:
    """A line for each of their loads, and all of them together; of tables one below the other, then of all once."""
    parts = [(spec.title, [spec]) for spec in specs] + ([("All of them", list(specs))] if len(specs) > 1 else [])
    lines = []
    for title, own in parts:
        name = f" ({own[0].id})" if len(own) == 1 else ", cells of several tables once"
        found = loads(own, device)
        apart = sum(not has_numbers(cell.address.metric) for spec in own for cell in spec.cells)
        lines += [f"**{title}{name}**", "", *([_table(found), ""] if found else [])]
        lines += [
            f"{apart} cells are of diagnostics (`mmkv-bench diagnose`), whose minutes are not foretold.",
            "",
        ] * bool(apart)
    said = [
        f"One device of {device.bandwidth / 1e9:,.0f} GB/s and {device.rate / 1e12:,.0f} TFLOP/s; answers count in full length.",
        f"roofline: at least. expected: at shares of it reached, {SHARES[0]} before the first token and {SHARES[1]} in a",
        f"step of {FORKS} answers (results/bench, on a CPU: a GPU's were not measured). Prompts are as papers print them, of a",
        "picture of fixed size and a question, or assumed where no paper tells. `--format csv` has the commands of the cells.",
        "",
    ]
    return "\n".join([*lines, *said])


def _table(found: Sequence[PlannedPrefills]) -> str:
    header = ["model", "dataset", "cells", "samples", "answers", "prompt", "from", "new", "roofline h", "expected h"]
    lines = []
    for one in found:
        counts = [f"{one.cells:,}", f"{one.samples:,}" if one.samples else "unknown", f"{one.cells * one.samples:,}"]
        hours = [_hours(_sum([one.prefill, one.decode])), _hours(one.expected)]
        lines.append([one.model, one.dataset, *counts, f"{one.tokens:,}", one.source, f"{one.new_tokens:,}", *hours])
    cells, answers = sum(one.cells for one in found), sum(one.cells * one.samples for one in found)
    return aligned(
        header, [*lines, ["all", "", f"{cells:,}", "", f"{answers:,}", "", "", "", *map(_hours, total(found))]]
    )


def total(found: Sequence[PlannedPrefills]) -> tuple[float | None, float | None]:
    """(hours of the roofline, expected hours) of what is known."""
    return _sum([hours for one in found for hours in (one.prefill, one.decode)]), _sum([one.expected for one in found])


def _cells(at: Address) -> list[Address]:
    """The cells of rows that a number is made of: what its metric is does not matter, and only some methods have seeds."""
    methods = [at.method] + ([at.minus] if at.minus is not None else [])
    found = []
    for method in methods:
        reading = "paper" if method.base == "full" else at.reading
        one = replace(at, metric="", method=method, minus=None, seeds=(0,), samples=None, reading=reading)
        found += [replace(one, seeds=(seed,)) for seed in (at.seeds if _is_drawn(method) else (0,))]
    return found


@cache
def _is_drawn(method: MethodSettings) -> bool:
    scorer = content("method", method.name).get("scorer")
    return any(name in str(scorer) for name in _DRAWN)


def _load(cells: Sequence[Address], device: PlanDevice) -> PlannedPrefills:
    at = cells[0]
    timed = at.dataset in SYNTHETIC
    tokens, source = (at.length or 0, "the table") if timed else _prompt(at)
    new = at.new_tokens or at.max_new_tokens or _answer(at.dataset)
    samples = PASSES if timed else samples_of(file_of(at.dataset))
    decoder = _decoder(at.model)
    if decoder is None:
        return PlannedPrefills(at.model, at.dataset, tokens, source, new, samples, len(cells), None, None)
    together, batch = (1, at.batch or 1) if timed else (FORKS, 1)
    prefills = samples * batch * (len(cells) if timed else 1)
    weights, entry = decoder.read * 2, bytes_per_token(at.model)
    entries = sum(_kept(one, tokens) + new / 2 for one in cells) * batch
    step = -(-len(cells) // together) * weights + entries * entry
    prefill = prefills * roofline.prefill_operations(decoder, tokens) / device.rate
    decode = samples * new * step / device.bandwidth
    return PlannedPrefills(
        at.model, at.dataset, tokens, source, new, samples, len(cells), prefill / _HOUR, decode / _HOUR
    )


def _kept(at: Address, tokens: int) -> float:
    if at.budget_kind == NONE:
        return tokens
    return float(Decimal(at.budget) * tokens) if at.budget_kind == FRACTION else min(tokens, int(at.budget))


def _prompt(at: Address) -> tuple[int, str]:
    """(tokens of a prompt, where that is from)."""
    known = _printed_prompts()
    for key in ((at.model, at.dataset), (at.model, at.frames)):
        if key in known and key[1] is not None:
            return known[key], "printed"
    low, high = _bounds(at.model)
    if low == high and at.frames is None and low:
        return low + QUESTION, "picture"
    return ASSUMED, "assumed"


@cache
def _answer(dataset: str) -> int:
    """Tokens of an answer, by the data set's own file."""
    return (content("dataset", file_of(dataset)).get("generation") or {}).get("max_new_tokens") or 0


@cache
def _decoder(model: str) -> Decoder | None:
    shape = content("model", model).get("shape")
    return decoder_of(StatedConfig(shape)) if shape else None


@cache
def _bounds(model: str) -> tuple[int, int]:
    shape = content("model", model).get("shape") or {}
    return image_bounds(model) if "vision_config" in shape else (0, 0)


@cache
def _printed_prompts() -> dict[tuple[str, str | int | None], int]:
    """(model, dataset) or (model, frames) -> tokens of a prompt: those that a table of input tokens prints, and the length of
    the timed passes of the same model's videos, where a table has both."""
    found: dict[tuple[str, str | int | None], int] = {}
    for spec in map(load, table_ids()):
        values = of_table(spec.id)
        frames = {one.frames for one in needed(spec) if one.frames is not None}
        for cell in spec.cells:
            at, printed = cell.address, values.get(cell.address.printed)
            if at.metric == TOKENS and printed is not None and printed.number is not None:
                found[at.model, at.dataset] = int(printed.number)
            if at.dataset == "made_up_video" and at.length and len(frames) == 1:
                found.setdefault((at.model, next(iter(frames))), at.length)
    return found


def _sum(hours: Sequence[float | None]) -> float | None:
    known = [one for one in hours if one is not None]
    return sum(known) if known else None


def _hours(hours: float | None) -> str:
    return "unknown" if hours is None else f"{hours:.2g}" if hours < 10 else f"{hours:.0f}"
