"""Write docs/reproducibility.md, what was reproduced of the papers: `python -m tools.reproducibility_page [ROWS,...]`.

It has results of the papers' tables, claims, obstacles, and the cost of the next rows. Zeros are shown.

Claims: sentences of the papers that state a number. Each holds, fails, is undecided or was not tested.

Only judged cells test a claim: their status allows a comparison (times and sizes in ratios alone), their conditions are the
table's, and the full cache beside them is the paper's. A number that is stated as about so large may be off by the margin of its
cell, or for a ratio or percentage by SHARE, but never by more than half of the stated effect: without an effect no claim holds.
The spread over seeds counts as in a cell's verdict. A claim that leaves its cells open is ambiguous and never tested.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from mmkv_bench.config.files import conf_dir, reference_dir
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.papers import printed
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.judgement import FilledCell, FilledTable, fill
from mmkv_bench.papers.layout import PAPERS, load, table_ids
from mmkv_bench.papers.margins import (
    AGREES,
    CONFIRMED,
    DIFFERS,
    NOT_COMPARABLE,
    ROUNDING,
    UNDECIDED,
    margin,
    seed_half_width,
    versions,
)
from mmkv_bench.papers.measurement import WHOLE, State, incomparable
from mmkv_bench.papers.printed import COMPARABLE, OPEN, RATIOS
from mmkv_bench.tables.formats import aligned
from mmkv_bench.tables.table import verdict_text
from tools import papers_plan

PAGE = Path(__file__).parents[1] / "docs" / "reproducibility.md"
_TEXT = """\
# What of the papers was reproduced here

Made by `make papers`; do not edit. `conf/table` lays out every table and figure of the five
papers, `results/reference` has every number that they print, and `mmkv-bench papers <id>` prints a table beside result rows. A
number agrees, differs or is undecided by rules and margins that were fixed beforehand (`results/reference/margins.yaml`,
`mmkv_bench/papers/margins.py`). Nothing here is stamped reproduced.

Margins were fixed

{versions}

A row is judged by version {version} if the commit that made it holds that version; any other row is shown and not judged.

{status}

## Paper by paper

{papers}

- printed: values of numbered tables. comparable: those with status `comparable` or `settings open`.
- uninformative: comparable values whose margin, at most half of the printed gap to the strongest baseline, is less than one
  answer and half of the last digit; they get no verdict.
- run: cells with a measured number. computed: cells whose number follows from the model's shape and a chosen length; no verdict
  counts them.
- own: the paper's method as its text describes it, without further readings. others: baselines and the full cache.
- drops agree: differences to full, only where the full cache itself agrees.
- leads: those that the paper prints for its method over its strongest baseline.

## Sentences of the papers

{claims}

Ambiguous sentences, which no cell tests:

{ambiguous}

## What cannot be reproduced or only in part, and why

{reasons}

## What the next rows cost

Weights and data of the hub and a GPU. Hours are of an H100 (3,350 GB/s, 400 TFLOP/s), for exactly the cells of all tables of a
paper, cells of several tables once: at the roofline, a lower bound, and at shares of it that were measured on a CPU.
`python -m tools.papers_plan <id>` has a table's hours by model and data, with the source of its prompt lengths.

{costs}

In the order of value per hour, after the bytes of caches, which need no weights (`computed` above):

1. `experiment=papers/` mmshift_qwen_{{1..5}} (the gates of Qwen2.5-VL-7B, MM-ShiftKV Table 1)
2. `experiment=papers/` hybridkv_image_qwen2_5_vl_7b_{{1..5}} (HybridKV Table 1)
3. `experiment=papers/` flashcache_favor and flashcache_milebench_qwen2_5_vl_7b_{{6,7}} (FlashCache Tables 4, 5, 7)
4. `experiment=papers/` mmshift_llava (MM-ShiftKV Tables 2 and 3)
"""
_COLUMNS = ["paper", "printed", "comparable", "uninformative", "run", "computed", "own: agrees, differs, undecided",
            "others", "drops agree", "leads", "gates"]  # fmt: skip


def summary(tables: Sequence[FilledTable]) -> str:
    """Write the page of all tables."""
    by_paper = {paper: [table for table in tables if table.layout.paper == paper] for paper in PAPERS}
    claims, ambiguous = _claims(tables)
    days = (
        f"- version {one.version} on {one.fixed}, at {one.measured} measured cells: {one.change}" for one in versions()
    )
    states = sum((table.states for table in tables), Counter[str]())
    status = [f"{states[State.MEASURED]} cells hold a measured number."]
    if not states[State.MEASURED]:
        status = ["**Nothing of real weights has been run yet: no number below was measured.**"]
    status.append(
        f"{states[State.COMPUTED]} cells hold a number that needs no weights: bytes of a cache by the model's shape."
    )
    if states[State.PLANNED]:
        status.append(f"{states[State.PLANNED]} hold a peak that a dry run counted (planned): shown, and not judged.")
    return _TEXT.format(
        versions="\n".join(days),
        version=versions()[-1].version,
        status=" ".join(status),
        papers=aligned(_COLUMNS, [_row(paper, group) for paper, group in by_paper.items()]),
        claims=claims,
        ambiguous=ambiguous,
        reasons=_reasons(),
        costs=_costs({**{PAPERS[paper]: group for paper, group in by_paper.items()}, "all": tables}),
    )


def _row(paper: str, tables: Sequence[FilledTable]) -> list[str]:
    values = printed.load()
    values = values[(values["paper"] == paper) & (values["status"] != printed.CLAIM) & (values["value"] != "")]
    comparable = int(values["status"].isin([printed.COMPARABLE, printed.OPEN]).sum())
    cells = [(table.layout.id, one) for table in tables for one in table.cells]
    states = sum((table.states for table in tables), Counter[str]())
    limits = [one.tolerance for _, one in cells if one.printed and one.printed.status in (COMPARABLE, OPEN)]
    blind = sum(limit is not None and not limit.informative for limit in limits)
    counts = [len(values), comparable, blind, states[State.MEASURED], states[State.COMPUTED]]
    words = [sum((table.verdicts(proposed) for table in tables), Counter[str]()) for proposed in (True, False)]
    levels = [", ".join(str(count[word]) for word in (AGREES, DIFFERS, UNDECIDED)) for count in words]
    drops = [one.drop.word for _, one in cells if one.drop is not None and one.counted]
    leads = [lead.word for table in tables for lead in table.leads]
    gates = _gates(paper)
    agreeing = [(table, one.cell.address) for table, one in cells if one.verdict and one.verdict.word == AGREES]
    fulls = [(at.model, table, at.dataset, at.metric) for table, at in agreeing if at.method.base == "full"]
    passed = sum(full in gates for full in fulls)
    shares = [
        f"{drops.count(AGREES)} of {len(drops)}", f"{leads.count(CONFIRMED)} of {len(leads)}", f"{passed} of {len(gates)}"
    ]  # fmt: skip
    return [PAPERS[paper], *map(str, counts), *levels, *shares]


@cache
def _gates(paper: str) -> tuple[tuple[str, ...], ...]:
    """Return (model, table, dataset, metric) of the gates that a paper prints."""
    import yaml

    gates = []
    for file in sorted((conf_dir() / "model").glob("*.yaml")):
        content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        for gate in content.get("gates") or []:
            if str(gate.get("printed", "")).startswith(f"{paper}_"):
                what = (gate["group"], "mean") if "group" in gate else (gate["dataset"], gate["metric"])
                gates.append((file.stem, gate["printed"], *what))
    return tuple(gates)


def _claims(tables: Sequence[FilledTable]) -> tuple[str, str]:
    """Return the table of claims, and the list of ambiguous claims."""
    lines, ambiguous = [], []
    for one in tested(tables):
        claim = one.claim
        quote = f"... {' '.join(claim.quote.replace('|', ' ').split())} ..."
        states = f"{claim.how} {claim.number:g}".removeprefix("ambiguous ")
        ours_text = "-" if one.ours is None else f"{one.ours:.4g}"
        lines.append([PAPERS[claim.paper], quote, states, ours_text, verdict_text(one.word), claim.table])
        ambiguous += [f"- {quote}: {claim.why}."] if claim.why else []
    return aligned(["paper", "sentence", "states", "ours", "word", "table"], lines), "\n".join(ambiguous)


def _reasons() -> str:
    rows = printed.load()
    rows = rows[(rows["status"] != printed.CLAIM) & (rows["value"] != "") & (rows["reason"] != "")]
    lines = []
    for (status, paper, reason), group in rows.groupby(["status", "paper", "reason"], sort=True):
        tables = sorted({name.rpartition("_table")[2].lstrip("0") for name in group["id"]}, key=int)
        where = dict.fromkeys(str(int(line)) for line in (group["line"].min(), group["line"].max()))
        lines.append([status, PAPERS[str(paper)], ", ".join(tables), str(len(group)), " to ".join(where), str(reason)])
    return aligned(["status", "paper", "tables", "values", "lines of its text", "reason"], lines)


def _costs(groups: dict[str, Sequence[FilledTable]]) -> str:
    lines = []
    for name, tables in groups.items():
        loads = papers_plan.loads([table.layout for table in tables], papers_plan.PlanDevice())
        counts = sum(one.cells for one in loads), sum(one.cells * one.samples for one in loads)
        lines.append(
            [name, *(f"{count:,}" for count in counts), *(f"{hours or 0:.0f}" for hours in papers_plan.total(loads))]
        )
    return aligned(["paper", "cells of rows", "answers", "roofline h", "expected h"], lines)


HOLDS, FAILS, NOT_TESTED, AMBIGUOUS = "holds", "fails", "not tested", "ambiguous sentence"
SHARE = 0.05
"""Tolerance of a ratio or percentage that is stated as about so large, beside its rounding."""
_NO_EFFECT = {"ratio": 1.0, "difference": 0.0, "reduction": 0.0, "gain": 0.0}
_OF_TWO = ("ratio", "reduction", "gain")
"""Operations that times and sizes of another device allow."""
_OPERATIONS: Mapping[str, Callable[[float, float], float]] = {
    "level": lambda a, b: a,
    "difference": lambda a, b: a - b,
    "ratio": lambda a, b: a / b,
    "reduction": lambda a, b: 100 * (1 - a / b),
    "gain": lambda a, b: 100 * (a / b - 1),
}


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper that states a number.

    number, half: the stated number, and half of its last digit; by: one of `_OPERATIONS`; how: about, at least, at most or
    ambiguous; of: labels of the claim's cells; why: for an ambiguous claim, what the sentence leaves open.
    """

    paper: str
    quote: str
    number: float
    half: float
    table: str
    by: str
    how: str
    of: tuple[Mapping[str, str], ...]
    why: str = ""


@dataclass(frozen=True)
class ClaimResult:
    """A claim with its verdict and our number, which is None if there is none."""

    claim: Claim
    word: str
    ours: float | None = None


@cache
def claims() -> tuple[Claim, ...]:
    """Read all claims of `claims.yaml`, with the numbers that their sentences state.

    Raises:
        ConfigError: no row of the printed numbers has the quote, or several rows have.
    """
    import yaml

    return tuple(map(_claim, yaml.safe_load((reference_dir() / "claims.yaml").read_text(encoding="utf-8"))["claims"]))


def _claim(entry: Mapping[str, Any]) -> Claim:
    rows = printed.load()
    rows = rows[(rows["status"] == printed.CLAIM) & (rows["paper"] == entry["paper"])]
    rows = rows[rows["note"].str.contains(entry["quote"], regex=False)]
    for key in {"metric", "subset"} & {*entry}:
        rows = rows[rows[key] == entry[key]]
    if rows["number"].nunique() != 1:
        raise ConfigError(
            f"claims.yaml: {len(rows)} numbers of {entry['paper']} quote {entry['quote']!r}; a claim quotes one"
        )
    number = float(rows["number"].iloc[0])
    half = printed.half_digit(str(rows["value"].iloc[0]), number)
    cells = tuple({key: str(value) for key, value in entry[side].items()} for side in ("a", "b") if side in entry)
    sentence = (entry["paper"], entry["quote"], number, half)
    return Claim(*sentence, entry["table"], entry.get("by", ""), entry["is"], cells, entry.get("why", ""))


def find(table: FilledTable, where: Mapping[str, str]) -> FilledCell:
    """Find the cell of a table with these labels.

    Raises:
        ConfigError: no cell has these labels, or several cells have.
    """
    cells = [one for one in table.cells if where.items() <= table.layout.labels(one.cell).items()]
    if len(cells) != 1:
        raise ConfigError(f"claims.yaml: {table.layout.id} has {len(cells)} cells {dict(where)}; a claim names one")
    return cells[0]


def tested(tables: Sequence[FilledTable]) -> list[ClaimResult]:
    """Test every claim."""
    by_name = {table.layout.id: table for table in tables}
    return [_tested(claim, [find(by_name[claim.table], where) for where in claim.of]) for claim in claims()]


def _tested(claim: Claim, cells: Sequence[FilledCell]) -> ClaimResult:
    if claim.how == "ambiguous":
        return ClaimResult(claim, AMBIGUOUS)
    states = {one.measured.state for one in cells}
    if (
        states - {*WHOLE, State.PART}
        or not states & {State.MEASURED, State.PART}
        or not all(_judged(one, claim.by) for one in cells)
    ):
        return ClaimResult(claim, NOT_TESTED)
    if len({id(one) for one in cells}) > 1 and incomparable(cells[0].measured, cells[-1].measured):
        return ClaimResult(claim, NOT_TESTED)
    spreads = [(one.measured.number, seed_half_width(one.measured.seeds)) for one in cells]
    ends = [(number - spread, number + spread) for number, spread in spreads]
    ours = _OPERATIONS[claim.by](*(one.measured.number for one in (*cells, *cells)[:2]))
    every = [_OPERATIONS[claim.by](a, b) for a in ends[0] for b in ends[-1]]
    low, high = _allowed(claim, cells)
    if State.PART in states or min(every) < low - ROUNDING <= max(every) or min(every) <= high + ROUNDING < max(every):
        return ClaimResult(claim, UNDECIDED, ours)
    return ClaimResult(claim, HOLDS if low - ROUNDING <= ours <= high + ROUNDING else FAILS, ours)


def _judged(one: FilledCell, by: str) -> bool:
    """Tell whether a cell's number may count for or against the paper."""
    if one.measured.value is None or one.measured.mismatches:
        return False
    if one.printed is None or one.printed.status == RATIOS:
        return by in _OF_TWO
    judged = one.printed.status in (COMPARABLE, OPEN)
    return judged and (one.verdict is None or one.verdict.word != NOT_COMPARABLE)


def _allowed(claim: Claim, cells: Sequence[FilledCell]) -> tuple[float, float]:
    """Return the ends of the range in which our number may be."""
    if claim.how != "about":
        low = claim.number - claim.half if claim.how == "at least" else -inf
        return low, claim.number + claim.half if claim.how == "at most" else inf
    if claim.by in _OF_TWO:
        room, effect = SHARE * abs(claim.number), abs(claim.number - _NO_EFFECT[claim.by])
    else:
        at, number = cells[0].cell.address, cells[0].printed_number
        fixed = margin(at.dataset, at.metric)
        room = fixed.margin * (number if fixed.relative else 1.0)
        effect = abs(claim.number) if claim.by == "difference" else inf
        if claim.by == "level" and len(cells) > 1:
            effect = abs(number - cells[1].printed_number)
    room = claim.half + min(room, effect / 2)
    return claim.number - room, claim.number + room


def main(folders: Sequence[str] = ()) -> None:
    """Write the page, with numbers of the rows in these folders; the default is `results/papers` if it exists."""
    papers = reference_dir().parent / "papers"
    roots = [Path(folder) for folder in folders] or ([papers] if papers.is_dir() else [])
    evidence = Evidence.of(roots)
    PAGE.write_text(summary([fill(load(name), evidence) for name in table_ids()]), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tools.reproducibility_page", description="Write docs/reproducibility.md."
    )
    parser.add_argument(
        "rows", nargs="*", help="rows folders, also joined by commas (default: results/papers, if it exists)"
    )
    try:
        main([folder for word in parser.parse_args().rows for folder in word.split(",")])
    except MMKVError as error:
        sys.exit(str(error))
