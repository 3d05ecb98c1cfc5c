"""Made-up rows in the schema of `store/schema.py`, for the tests of tables; nothing here is a result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from mmkv_bench.store.store import Store
from mmkv_bench.tables.formats import write
from mmkv_bench.tables.sample_scores import Scores, Sheet
from mmkv_bench.tables.score_notes import score_notes
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.score_text import tables_of_scores
from mmkv_bench.tables.stored_rows import Rows
from tests.store.store_examples import write_scores

HEADS = 8  # KV heads of all layers together
PROMPT = 300  # tokens


def cell_row(cell: str, method: str, budget: int | str | None = None, **changed) -> dict:
    """A `cells` row; an int is a budget in entries, a string an exact fraction, None no budget."""
    kind = {int: "entries", str: "fraction", type(None): "none"}[type(budget)]
    row = {
        "cell": cell,
        "model": "tiny",
        "model_fingerprint": "m" * 16,
        "dataset": "walk3",
        "dataset_fingerprint": "d" * 16,
        "method": method,
        "base": method,
        "reading": None if method == "full" else "paper",
        "protocol": "paper",
        "budget_kind": kind,
        "budget_entries": budget if kind == "entries" else None,
        "budget_fraction": budget if kind == "fraction" else None,
        "seed": None,
        "parameters": "{}",
        "tuned": False,
        "allocation_scope": None if method == "full" else "layer",
        "dtype": "float32",
        "attention": "sdpa",
        "generation": "{}",
        "numerics_version": 1,
        "method_version": None,
        "torch": "2.15",
        "transformers": "5.23",
        "config": "{}",
        "versions": "{}",
        "device": "cpu",
        "cpu": None,
        "weights": None,
        "weights_file": None,
        "model_revision": None,
        "git_dirty": None,
    }
    unknown = set(changed) - set(row)
    if unknown:
        raise KeyError(f"no such column: {unknown}")
    row |= changed
    if isinstance(row["parameters"], dict):
        row["parameters"] = json.dumps(row["parameters"], sort_keys=True)
    return row


def sample_rows(
    cell: str, values: Sequence[float | None] | Mapping[str, float | None], dataset: str = "walk3", **changed
) -> list[dict]:
    """`samples` rows s000, s001, ... (or as named) of metric `exact_match`, each a cluster; None = out of memory."""
    named = values if isinstance(values, Mapping) else {f"s{i:03d}": value for i, value in enumerate(values)}
    return [
        {
            "cell": cell,
            "dataset": dataset,
            "sample_id": name,
            "cluster": f"page-{name}",
            "metric": "exact_match",
            "value": value,
            "status": "oom" if value is None else "ok",
        }
        | changed
        for name, value in named.items()
    ]


def response_rows(cell: dict, samples: Sequence[dict], **changed) -> list[dict]:
    """`responses` rows that go with `samples` rows: T = 300 tokens, 8 KV heads, the budget met exactly."""
    entries = cell["budget_entries"]
    if cell["budget_fraction"] is not None:
        entries = max(1, int(float(cell["budget_fraction"]) * PROMPT))
    rows = []
    for i, sample in enumerate(samples):
        ok = sample["status"] == "ok"
        kept = PROMPT if entries is None else entries
        answer = {
            "prompt_hash": "p",
            "answer": "384q592m107.",
            "token_ids": list(range(13)),
            "n_tokens": 13,
            "tokens_from_compressed": 12 if cell["protocol"] == "paper" else 13,
            "finish_reason": "eos",
            "prompt_tokens": PROMPT,
            "context_tokens": PROMPT,
            "visual_tokens": 256,
            "question_text_before_cut": 0,
            "entries_resident": kept * HEADS,
            "kept": [[kept] * HEADS],
            "kept_digest": "0" * 16,
        }
        row = {
            "cell": cell["cell"],
            "dataset": cell["dataset"],
            "sample_id": sample["sample_id"],
            "doc_id": i,
            "cluster": sample["cluster"],
            "status": sample["status"],
            "error": None if ok else "out of memory",
            "fallback": [],
            "budget_entries": entries,
            "entries_asked": None if entries is None else entries * HEADS,
            "measured": "group",
        } | {name: value if ok else None for name, value in answer.items()}
        rows.append(row | (changed if ok else {}))
    return rows


@dataclass
class Example:
    """Collects cells with their scores and answers; becomes frames or a store on disk."""

    cells: list[dict] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)
    responses: list[dict] = field(default_factory=list)
    metrics: list[dict] = field(default_factory=list)

    def add(
        self,
        method: str,
        budget: int | str | None,
        values: Sequence[float | None] | Mapping[str, float | None],
        *,
        answer: dict | None = None,
        sample: dict | None = None,
        **cell,
    ) -> str:
        """One cell, a score per sample; `answer`, `sample` and the rest change columns. Returns its hash."""
        row = cell_row(f"c{len(self.cells):03d}", method, budget, **cell)
        scores = sample_rows(row["cell"], values, row["dataset"], **(sample or {}))
        self.cells.append(row)
        self.samples += scores
        self.responses += response_rows(row, scores, **(answer or {}))
        return row["cell"]

    def rows(self) -> Rows:
        baseline = {cell["cell"] for cell in self.cells if cell["base"] == "full"}
        full = [row for row in self.responses if row["cell"] in baseline]
        return Rows(*(pd.DataFrame(part) for part in (self.cells, self.samples, self.responses, self.metrics, full)))

    def write(self, root: Path) -> Path:
        """Write the rows as a store on disk, through the store's own interface."""
        store = Store(root)
        store.write_cells(self.cells)
        by_sample: dict[tuple[str, str], list[dict]] = {}
        for row in self.responses:
            by_sample.setdefault((row["dataset"], row["sample_id"]), []).append(row)
        with store.writer("test") as writer:
            for rows in by_sample.values():
                writer.commit(rows)
        for cell in {row["cell"] for row in self.samples}:
            scores, metrics = ([row for row in part if row["cell"] == cell] for part in (self.samples, self.metrics))
            write_scores(store, scores, metrics or _counted(scores))
        return root


def _counted(scores: list[dict]) -> list[dict]:
    """Rows of `metrics` that say of a cell's scores how many there are and no more."""
    named: dict[str, list[dict]] = {}
    for row in scores:
        named.setdefault(row["metric"], []).append(row)
    return [
        {
            "cell": rows[0]["cell"],
            "dataset": rows[0]["dataset"],
            "metric": metric,
            "n": len(rows),
            "n_ok": sum(row["value"] is not None for row in rows),
            "interval": "none",
        }
        for metric, rows in named.items()
    ]


def zeros_and_ones(right: int, n: int) -> list[float]:
    """n scores, the first `right` of them 1."""
    return [1.0] * right + [0.0] * (n - right)


def markdown(tables: Sequence[ScoreTable], **how: bool) -> str:
    """Tables of scores with all their notes."""
    return write(tables_of_scores(tables, **how), "md", notes="all")


def latex(tables: Sequence[ScoreTable], **how: bool) -> str:
    return write(tables_of_scores(tables, **how), "latex", notes="all")


def csv_cells(tables: Sequence[ScoreTable]) -> str:
    return write(tables_of_scores(tables), "csv")


def csv_pairs(tables: Sequence[ScoreTable]) -> str:
    return write(tables_of_scores(tables, pairs=True), "csv")


def notes(table: ScoreTable) -> list[str]:
    return [note.text for note in score_notes(table)]


def gather(samples: pd.DataFrame) -> Scores:
    """Scores from the `samples` rows of one metric and of one cell, or of several cells that differ by seed only."""
    cells = list(dict.fromkeys(samples["cell"]))
    return Sheet.of(samples.assign(metric="one"), cells).scores(range(len(cells)), "one")
