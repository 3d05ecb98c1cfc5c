"""One sample in a terminal: its question, its reference, and the answers of all cells, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.errors import ConfigError
from mmkv_bench.report import kept_maps, terminal
from mmkv_bench.report.answers import left_at
from mmkv_bench.report.prompts import Prompts
from mmkv_bench.report.show_cells import StoreCells
from mmkv_bench.report.terminal import MARK, KeptMap, cut, marked, pairs, plain, table
from mmkv_bench.statistics.metric_kinds import MEASURES
from mmkv_bench.store.kept_entries import digest, unpacked
from mmkv_bench.store.parts import is_in
from mmkv_bench.tables.rows import BASELINE, context_key, with_limits
from mmkv_bench.tables.text import score

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from mmkv_bench.store.store import Store

Row = Mapping[str, Any]
_COLUMNS = (
    *("cell", "sample_id", "status", "error", "answer", "token_ids", "fallback", "prompt_hash", "entries_resident"),
    *("prompt_tokens", "visual_tokens"),
)


def show_sample(
    console: Console, cells: StoreCells, sample: str, chosen: Sequence[str], remade: bool = False, whole: bool = False
) -> dict[str, list[str]]:
    """Print a sample with the answers of these cells, and what they kept where rows tell it and it is not `remade`.

    whole: with its prompts as models read them.

    Returns:
        Dataset -> the cells that answered it, in the order shown.

    Raises:
        ConfigError: none of them has a row for it.
    """
    import pyarrow as pa

    prompt_rows = cells.store.prompts()
    prompt_rows = prompt_rows.filter(is_in(prompt_rows["sample_id"], pa.array([sample])))
    stored = {row["prompt_hash"]: row for row in prompt_rows.to_pylist()}
    drawn = any(row["visual"] for row in stored.values())  # else nobody could say where what was kept lies
    columns = (*_COLUMNS, "kept_indices", "kept_digest") if drawn else _COLUMNS
    responses = cells.store.responses(None, columns, coded=True)
    responses = responses.filter(is_in(responses["sample_id"], pa.array([sample])))
    rows = {row["cell"]: row for row in responses.to_pylist()}
    named = {*chosen}
    if not rows.keys() & named:
        raise ConfigError(f"none of the {len(chosen)} cells that were named has a row for {sample}; name others")
    values = _values(cells.store, list(rows), sample)
    prompts = Prompts(None, stored)
    console.print(sample, style="bold")
    shown: dict[str, list[str]] = {}
    maps: list[KeptMap] = []
    for dataset, of_dataset in groupby(
        [cell for cell in cells.rows if cell in rows], lambda c: cells.rows[c]["dataset"]
    ):
        every = list(of_dataset)
        if named.isdisjoint(every):
            continue
        _prompt(console, sample, [rows[cell] for cell in every], prompts)
        for context in _contexts(cells, every):
            shown_cells = [cell for cell in context if cell in named]
            if shown_cells:
                one = cells.rows[shown_cells[0]]
                console.print(f"\n{dataset}, {one['model']}, protocol={one['protocol']}", style="bold")
                full = context[0] if cells.rows[context[0]]["base"] == BASELINE else None
                _answers(console, cells, shown_cells, full, rows, values)
                shown.setdefault(dataset, []).extend(shown_cells)
                maps += _maps(cells, shown_cells, rows, prompts)
    console.print(
        f"\n{MARK} stands where an answer leaves that of {BASELINE}, left at: the token that does; kept: entries of all layers "
        "and KV heads."
    )
    if whole:
        _rendered(console, cells, stored)
    if maps and not remade:
        console.print("\nKept, as the rows say (keep=indices)", style="bold")
        terminal.show(console, maps)
    return shown


def _rendered(console: Console, cells: StoreCells, stored: Mapping[str, Row]) -> None:
    """Print the prompt of each model that answered."""
    described = cells.store.cells().select(["model_fingerprint", "model"]).to_pylist()
    models = {row["model_fingerprint"]: row["model"] for row in described}
    texts = {(models.get(row["model_fingerprint"], ""), row["rendered"]) for row in stored.values() if row["rendered"]}
    for model, text in sorted(texts):
        console.print(f"\nThe prompt that {model} read, its media as markers", style="bold")
        console.print(plain(text), soft_wrap=True)  # lines end where the prompt's do
    if not texts:
        console.print("\nThe rows do not hold the prompt's text: they are older than the column `rendered`, or slim.")


def _values(store: Store, names: Sequence[str], sample: str) -> dict[str, dict[str, float | None]]:
    """Cell -> metric of the task -> the sample's value."""
    import pyarrow as pa

    rows = store.samples(names, ("cell", "sample_id", "metric", "value"), coded=True)
    values: dict[str, dict[str, float | None]] = {}
    for row in rows.filter(is_in(rows["sample_id"], pa.array([sample]))).to_pylist():
        if row["metric"] not in MEASURES:
            values.setdefault(row["cell"], {})[row["metric"]] = row["value"]
    return values


def _contexts(cells: StoreCells, own: Sequence[str]) -> list[list[str]]:
    """Cells that may be compared with each other; `full` first."""
    frame = with_limits(cells.store.cells(own).to_pandas())
    key = {row["cell"]: context_key(row) for row in frame.to_dict("records")}
    contexts: dict[tuple[str, ...], list[str]] = {}
    for cell in own:
        contexts.setdefault(key[cell], []).append(cell)
    return list(contexts.values())


def _maps(cells: StoreCells, own: Sequence[str], rows: Mapping[str, Row], prompts: Prompts) -> list[KeptMap]:
    """Maps of the tokens that cells kept, of the cells whose rows tell them."""
    maps = []
    for cell in own:
        text, proof = rows[cell].get("kept_indices"), rows[cell].get("kept_digest")
        visual = prompts.visual(rows[cell]["prompt_hash"])
        if text is None or not visual:
            continue
        bits, told = unpacked(text), np.reshape(np.asarray(visual, float), (-1, kept_maps.WIDTH))
        if told[:, 0].max() < bits.shape[-1]:  # a cell of fewer pixels was answered from another prompt
            proven = (
                [] if proof is None else ["digest the same" if digest(bits) == proof else "NOT what its digest is of"]
            )
            place = told[:, 0].astype(int)
            maps.append(KeptMap(cells.title(cell), proven, bits.mean((0, 1)), place, told[:, 1:]))
    return maps


def _prompt(console: Console, sample: str, rows: Sequence[Row], prompts: Prompts) -> None:
    """Print the question, as far as it is known without a model and without data."""
    hashed = next((row["prompt_hash"] for row in rows if row["prompt_hash"]), None)
    counted = next((row for row in rows if row["prompt_tokens"] is not None), None)
    prompt = prompts.of(sample, hashed)
    lines: list[tuple[str, str]] = []
    if prompt.question is not None:
        lines.append(("question", cut(prompt.question)))
    if prompt.reference is not None:
        lines.append(("reference", cut(prompt.reference)))
    if counted is not None:
        lines.append(("prompt", f"{counted['prompt_tokens']} tokens, {counted['visual_tokens']} of them visual"))
    if prompt.missing:
        lines.append(("missing", prompt.missing))
    pairs(console, lines)


def _answers(
    console: Console,
    cells: StoreCells,
    own: Sequence[str],
    full: str | None,
    rows: Mapping[str, Row],
    values: Mapping[str, Mapping[str, Any]],
) -> None:
    compared = None if full is None or rows[full]["status"] != "ok" else rows[full]
    metrics = list(dict.fromkeys(name for cell in own for name in values.get(cell, {})))
    protocol = cells.rows[own[0]]["protocol"]
    lines = []
    for cell in own:
        row = rows[cell]
        label = " ".join(word for word in cells.label(cell).split(" ") if word != protocol)
        answer, left = _answer(row, None if cell == full else compared)
        scored = [score(values.get(cell, {}).get(name)) for name in metrics]
        resident = "" if row["entries_resident"] is None else f"{row['entries_resident']:,}"
        lines.append([cells.short(cell), label, answer, *scored, left, resident])
    header = ["cell", "method", "answer", *metrics, "left at", "kept"]
    table(console, header, lines, right=(*metrics, "left at", "kept"), wrapped=("answer",))
    for cell in own:
        if rows[cell]["fallback"]:
            console.print(f"{cells.label(cell)}: {', '.join(rows[cell]['fallback'])}")


def _answer(row: Row, full: Row | None) -> tuple[Text | str, str]:
    """(the answer, marked where it leaves that of full; at which token it does)."""
    if row["status"] != "ok":
        return cut(f"{row['status']}: {row['error']}"), ""
    text = row["answer"]
    if full is None:
        return marked(text, None), ""
    place = left_at(row["token_ids"], full["token_ids"])
    if place is None:
        return marked(text, None), "never"
    return marked(text, left_at(text, full["answer"])), str(place + 1)
