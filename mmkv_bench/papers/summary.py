"""docs/reproducibility.md: what of the papers was run here, what came out, what cannot and why. Zeros are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from mmkv_bench.config.schema import conf_dir
from mmkv_bench.papers import plan, printed
from mmkv_bench.papers.claims import tested
from mmkv_bench.papers.filled_table import FilledCell, FilledTable
from mmkv_bench.papers.fixed import versions
from mmkv_bench.papers.layout import PAPERS
from mmkv_bench.papers.reader import COMPUTED, MEASURED, PLANNED
from mmkv_bench.papers.verdict import AGREES, CONFIRMED, DIFFERS, UNDECIDED
from mmkv_bench.tables.formats import aligned

_FIRST = (
    "mmshift_qwen_{1..5} (the gates of Qwen2.5-VL-7B, MM-ShiftKV Table 1)",
    "hybridkv_image_qwen2_5_vl_7b_{1..5} (HybridKV Table 1)",
    "flashcache_favor and flashcache_milebench_qwen2_5_vl_7b_{6,7} (FlashCache Tables 4, 5, 7)",
    "mmshift_llava (MM-ShiftKV Tables 2 and 3)",
)
"""Experiments of conf/experiment/papers in the order of value per hour."""


def summary(pages: Sequence[FilledTable]) -> str:
    """The page, of all tables."""
    lines = [
        "# What of the papers was reproduced here",
        "",
        "Made by `make papers` (`mmkv-bench papers --summary`); do not edit. Every table and figure of the five papers is laid",
        "out in `conf/table`, every number that they print in `results/reference`; `mmkv-bench papers <id>` prints one of them",
        "with what rows hold for it. A number agrees, differs or is undecided by rules and margins that were fixed beforehand",
        "(`results/reference/margins.yaml`, `mmkv_bench/papers/verdict.py`). Nothing here is stamped reproduced.",
        "",
        *_versions(),
        "",
        _said(pages),
        "",
        "## Paper by paper",
        "",
        *aligned(
            _HEADER, [_row(paper, [page for page in pages if page.spec.paper == paper]) for paper in PAPERS]
        ).split("\n"),
        "",
        "Values are those of numbered tables. Comparable are those whose status is `comparable` or `settings open`;",
        "uninformative are those of them whose margin, at most half of the printed gap to the strongest baseline, is less than",
        "one answer of their n and half of their last digit: nothing is said of them. Run are cells with a measured number,",
        "computed those whose number follows from the model's shape and from a length that was chosen to fit; no word counts",
        "them. `own` is the paper's method as the paper's own text has it, and no further reading; `others` are its baselines",
        "and the full cache. Drops to full count only where the full cache itself agrees. Leads are those that the paper prints",
        "for its method over its strongest baseline.",
        "",
        "## Sentences of the papers",
        "",
        *_claims(pages),
        "",
        "## What cannot be reproduced or only in part, and why",
        "",
        *_reasons(),
        "",
        "## What the next rows cost",
        "",
        "Weights and data of the hub and a GPU. Hours are of an H100 (3,350 GB/s, 400 TFLOP/s), for exactly the cells of all",
        "tables of a paper, cells of several tables once: of the roofline, at least, and at the shares of it that were reached",
        "on a CPU. `mmkv-bench papers <id> --plan` has the same of a table, by model and data, and where its lengths of prompts",
        "are from.",
        "",
        *_costs(pages),
        "",
        "In the order of value per hour, after the bytes of caches, which need no weights (`computed` above):",
        "",
        *(f"{number}. `experiment=papers/` {one}" for number, one in enumerate(_FIRST, 1)),
        "",
    ]
    return "\n".join(lines)


def _costs(pages: Sequence[FilledTable]) -> list[str]:
    device, lines = plan.PlanDevice(), []
    groups = {PAPERS[paper]: [page.spec for page in pages if page.spec.paper == paper] for paper in PAPERS}
    for name, specs in {**groups, "all": [page.spec for page in pages]}.items():
        found = plan.loads(specs, device)
        told = [f"{sum(one.cells for one in found):,}", f"{sum(one.cells * one.samples for one in found):,}"]
        lines.append([name, *told, *(f"{hours or 0:.0f}" for hours in plan.total(found))])
    return aligned(["paper", "cells of rows", "answers", "roofline h", "expected h"], lines).split("\n")


_HEADER = [
    "paper",
    "printed",
    "comparable",
    "uninformative",
    "run",
    "computed",
    "own: agrees, differs, undecided",
    "others",
    "drops agree",
    "leads",
    "gates",
]


def _said(pages: Sequence[FilledTable]) -> str:
    run = sum(page.states[MEASURED] for page in pages)
    computed = sum(page.states[COMPUTED] for page in pages)
    needless = f"{computed} cells hold a number that needs no weights: bytes of a cache by the model's shape."
    planned = sum(page.states[PLANNED] for page in pages)
    needless += f" {planned} hold a peak that a dry run counted (planned): shown, and not judged." if planned else ""
    if not run:
        return f"**Nothing of real weights has been run yet: no number below was measured.** {needless}"
    return f"{run} cells hold a measured number. {needless}"


def _row(paper: str, pages: Sequence[FilledTable]) -> list[str]:
    rows = printed.load()
    own = rows[(rows["paper"] == paper) & (rows["status"] != printed.CLAIM) & (rows["value"] != "")]
    held = own["status"].isin([printed.COMPARABLE, printed.OPEN])
    run, computed = (sum(page.states[state] for page in pages) for state in (MEASURED, COMPUTED))
    words = [Counter[str](), Counter[str]()]
    for page in pages:
        for number, of_paper in enumerate((True, False)):
            words[number] += page.verdicts(of_paper)
    drops = [one.drop.word for page in pages for one in page.cells if one.drop is not None and one.counted]
    leads = [lead.verdict.word for page in pages for lead in page.leads]
    gates = _gates(paper)
    passed = sum(_is_gate(page.spec.id, one, gates) for page in pages for one in page.cells)
    told = [", ".join(str(count[word]) for word in (AGREES, DIFFERS, UNDECIDED)) for count in words]
    texts = [
        f"{drops.count(AGREES)} of {len(drops)}",
        f"{leads.count(CONFIRMED)} of {len(leads)}",
        f"{passed} of {len(gates)}",
    ]
    blind = sum(_is_blind(one) for page in pages for one in page.cells)
    return [PAPERS[paper], str(len(own)), str(int(held.sum())), str(blind), str(run), str(computed), *told, *texts]


def _versions() -> list[str]:
    *_, now = versions()
    days = (
        f"- version {one.version} on {one.fixed}, at {one.measured} measured cells: {one.change}" for one in versions()
    )
    return [
        "Margins were fixed",
        "",
        *days,
        "",
        f"A row is judged by version {now.version} if the commit that it was made from holds it; any other is shown, and not",
        "judged.",
    ]


def _is_blind(one: FilledCell) -> bool:
    judged = one.printed is not None and one.printed.status in (printed.COMPARABLE, printed.OPEN)
    return judged and one.limits is not None and not one.limits.informative


def _is_gate(table: str, one: FilledCell, gates: Sequence[tuple[str, ...]]) -> bool:
    at = one.cell.address
    passed = one.verdict is not None and one.verdict.word == AGREES and at.method.base == "full"
    return passed and (at.model, table, at.dataset, at.metric) in gates


@cache
def _gates(paper: str) -> tuple[tuple[str, ...], ...]:
    """(model, table, dataset, metric) of the gates that a paper prints."""
    import yaml

    found = []
    for file in sorted((conf_dir() / "model").glob("*.yaml")):
        told: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        for gate in told.get("gates") or []:
            if str(gate.get("printed", "")).startswith(f"{paper}_"):
                what = (gate["group"], "mean") if "group" in gate else (gate["dataset"], gate["metric"])
                found.append((file.stem, gate["printed"], *what))
    return tuple(found)


def _claims(pages: Sequence[FilledTable]) -> list[str]:
    lines, notes = [], []
    for one in tested(pages):
        claim = one.claim
        quote = " ".join(claim.quote.replace("|", " ").split())
        states = f"{claim.how} {claim.number:g}".removeprefix("ambiguous ")
        ours = "-" if one.ours is None else f"{one.ours:.4g}"
        lines.append([PAPERS[claim.paper], f"... {quote} ...", states, ours, one.word, claim.table])
        notes += [f"- ... {quote} ...: {claim.why}."] if claim.why else []
    table = aligned(["paper", "sentence", "states", "ours", "word", "table"], lines).split("\n")
    return [*table, "", "Ambiguous sentences, which are tested by no cell:", "", *notes]


def _reasons() -> list[str]:
    rows = printed.load()
    own = rows[(rows["status"] != printed.CLAIM) & (rows["value"] != "") & (rows["reason"] != "")]
    lines = []
    for (status, paper, reason), group in own.groupby(["status", "paper", "reason"], sort=True):
        tables = ", ".join(sorted({name.rpartition("_table")[2].lstrip("0") for name in group["id"]}, key=int))
        where = (
            f"{int(group['line'].min())}"
            if group["line"].nunique() == 1
            else f"{int(group['line'].min())} to {int(group['line'].max())}"
        )
        lines.append([status, PAPERS[str(paper)], tables, str(len(group)), where, str(reason)])
    return aligned(["status", "paper", "tables", "values", "lines of its text", "reason"], lines).split("\n")
