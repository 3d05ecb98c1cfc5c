"""docs/reproducibility.md: what of the papers was run here, what came out, what cannot and why. Zeros are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from mmkv_bench.config.schema import conf_dir
from mmkv_bench.papers import printed
from mmkv_bench.papers.claims import tested
from mmkv_bench.papers.fill import Filled, Page
from mmkv_bench.papers.measured import MEASURED
from mmkv_bench.papers.spec import PAPERS
from mmkv_bench.papers.verdict import AGREES, CONFIRMED, DIFFERS, UNDECIDED
from mmkv_bench.tables.render import aligned

_FIRST = (
    (
        "what needs no weights: bytes of a cache at its shape",
        "mmkv-bench plan model=qwen2_5_vl_7b method=flashcache budget=0.1",
    ),
    (
        "the gates of Qwen2.5-VL-7B and MM-ShiftKV Table 1 in both readings",
        "mmkv-bench experiment=papers/mmshift_qwen_1",
    ),
    ("HybridKV Table 1", "mmkv-bench experiment=papers/hybridkv_image_qwen2_5_vl_7b_1"),
    ("FlashCache Tables 4, 5 and 7", "mmkv-bench experiment=papers/flashcache_favor"),
    ("MEDA and PrefixKV", "mmkv-bench experiment=papers/prefixkv_mmvet_llava_v1_5_7b_1"),
)
"""In the order of value per hour."""


def summary(pages: Sequence[Page]) -> str:
    """The page, of all tables."""
    lines = [
        "# What of the papers was reproduced here",
        "",
        "Made by `make papers` (`mmkv-bench papers --summary`); do not edit. Every table and figure of the five papers is laid",
        "out in `conf/table`, every number that they print in `results/reference`; `mmkv-bench papers <id>` prints one of them",
        "with what rows hold for it. A number agrees or differs by rules and margins that were fixed before anything of real",
        "weights was run (`results/reference/margins.yaml`). Nothing here is stamped reproduced.",
        "",
        _said(pages),
        "",
        "## Paper by paper",
        "",
        *aligned(
            _HEADER, [_row(paper, [page for page in pages if page.spec.paper == paper]) for paper in PAPERS]
        ).split("\n"),
        "",
        "Values are those of numbered tables. Comparable are those whose status is `comparable` or `settings open`. Run, and the",
        "words behind it, are cells with a number; `own` is the paper's method, `others` its baselines and the full cache. Drops",
        "to full count only where the full cache itself agrees. Leads are those that the paper prints for its method over",
        "its strongest baseline.",
        "",
        "## Sentences of the papers",
        "",
        *_claims(pages),
        "",
        "## Printed values with a status or a remark, and why",
        "",
        *_reasons(),
        "",
        "## What the next rows need",
        "",
        "Weights and data of the hub and a GPU; `mmkv-bench plan experiment=papers/<name>` says hours and memory before a run.",
        "In the order of value per hour:",
        "",
        *(f"{number}. {what}: `{line}`" for number, (what, line) in enumerate(_FIRST, 1)),
        "",
    ]
    return "\n".join(lines)


_HEADER = [
    "paper",
    "printed",
    "comparable",
    "run",
    "own: agrees, differs, undecided",
    "others",
    "drops agree",
    "leads",
    "gates",
]


def _said(pages: Sequence[Page]) -> str:
    run = sum(page.states[MEASURED] for page in pages)
    if not run:
        return "**Nothing of real weights has been run yet: no number below was measured.**"
    return f"{run} cells hold a number."


def _row(paper: str, pages: Sequence[Page]) -> list[str]:
    rows = printed.load()
    own = rows[(rows["paper"] == paper) & (rows["status"] != printed.CLAIM) & (rows["value"] != "")]
    held = own["status"].isin([printed.COMPARABLE, printed.OPEN])
    run = sum(page.states[MEASURED] for page in pages)
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
    return [PAPERS[paper], str(len(own)), str(int(held.sum())), str(run), *told, *texts]


def _is_gate(table: str, one: Filled, gates: Sequence[tuple[str, ...]]) -> bool:
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


def _claims(pages: Sequence[Page]) -> list[str]:
    lines = []
    for one in tested(pages):
        claim = one.claim
        quote = " ".join(claim.quote.replace("|", " ").split())
        states = {"about": "about", "at least": "at least", "at most": "at most"}[claim.how]
        ours = "" if one.ours is None else f"{one.ours:.4g}"
        lines.append(
            [PAPERS[claim.paper], f"... {quote} ...", f"{states} {claim.number:g}", ours or "-", one.word, claim.table]
        )
    return aligned(["paper", "sentence", "states", "ours", "word", "table"], lines).split("\n")


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
