"""One sample in a terminal: its question, its reference, and the answers of all cells, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError
from mmkv_bench.report import terminal
from mmkv_bench.report.answers import Answer, compared, sample_scores
from mmkv_bench.report.kept_maps import KeptTokens
from mmkv_bench.report.sample_prompts import Prompts
from mmkv_bench.report.show_cells import StoreCells
from mmkv_bench.report.terminal import MARK, KeptMap, cut, marked, pairs, plain, table
from mmkv_bench.statistics.metric_kinds import MEASURES
from mmkv_bench.store.parts import is_in
from mmkv_bench.tables.rows import BASELINE, context_key, frame, with_limits
from mmkv_bench.tables.text import score

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = (
    *("cell", "sample_id", "status", "error", "answer", "token_ids", "fallback", "prompt_hash", "entries_resident"),
    *("prompt_tokens", "visual_tokens"),
)


def show_sample(
    console: Console, cells: StoreCells, sample: str, chosen: Sequence[str], remade: bool = False, prompt: bool = False
) -> dict[str, list[str]]:
    """Print a sample with the answers of the chosen cells, and maps of the entries that they kept if the rows have them.

    Args:
        chosen: hashes of the cells.
        remade: leave out the maps, because the caller prints maps from a new run.
        prompt: also print the prompts as the models read them.

    Returns:
        Dataset -> the cells that answered the sample, in the printed order.

    Raises:
        ConfigError: none of the cells has a row for the sample.
    """
    import pyarrow as pa

    prompt_rows = cells.store.prompts()
    prompt_rows = prompt_rows.filter(is_in(prompt_rows["sample_id"], pa.array([sample])))
    stored = {row["prompt_hash"]: row for row in prompt_rows.to_pylist()}
    drawn = any(row["visual"] for row in stored.values())  # otherwise positions of kept tokens are unknown
    columns = (*_COLUMNS, "kept_indices", "kept_digest") if drawn else _COLUMNS
    responses = cells.store.responses(None, columns, coded=True)
    responses = responses.filter(is_in(responses["sample_id"], pa.array([sample])))
    rows = {row["cell"]: row for row in responses.to_pylist()}
    named = {*chosen}
    if not rows.keys() & named:
        raise ConfigError(f"none of the {len(chosen)} chosen cells has a row for {sample}; choose other cells")
    samples = cells.store.samples(list(rows), ("cell", "sample_id", "metric", "value", "status"), coded=True)
    scores = sample_scores(frame(samples), rows, [sample], MEASURES)
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
                full = rows[context[0]] if cells.rows[context[0]]["base"] == BASELINE else None
                _answers(console, cells, [compared(rows[cell], full, scores) for cell in shown_cells])
                shown.setdefault(dataset, []).extend(shown_cells)
                maps += _maps(cells, shown_cells, rows, prompts)
    console.print(
        f"\n{MARK}: from here on the answer differs from that of {BASELINE}; left at: the first token that differs; kept: "
        "entries of all layers and KV heads."
    )
    if prompt:
        _rendered(console, cells, stored)
    if maps and not remade:
        console.print("\nKept, as the rows say (keep=indices)", style="bold")
        terminal.show(console, maps)
    return shown


def _rendered(console: Console, cells: StoreCells, stored: Mapping[str, Answer]) -> None:
    """Print the prompt of each model that answered the sample."""
    described = cells.store.cells().select(["model_fingerprint", "model"]).to_pylist()
    models = {row["model_fingerprint"]: row["model"] for row in described}
    texts = {(models.get(row["model_fingerprint"], ""), row["rendered"]) for row in stored.values() if row["rendered"]}
    for model, text in sorted(texts):
        console.print(f"\nThe prompt that {model} read, its media as markers", style="bold")
        console.print(plain(text), soft_wrap=True)  # keeps the prompt's line ends
    if not texts:
        console.print("\nThe rows do not have the prompt's text: they are older than the column `rendered`, or slim.")


def _contexts(cells: StoreCells, names: Sequence[str]) -> list[list[str]]:
    """Group cells that may be compared with each other; `full` first."""
    described = with_limits(cells.store.cells(names).to_pandas())
    key = {row["cell"]: context_key(row) for row in described.to_dict("records")}
    contexts: dict[tuple[str, ...], list[str]] = {}
    for cell in names:
        contexts.setdefault(key[cell], []).append(cell)
    return list(contexts.values())


def _maps(cells: StoreCells, names: Sequence[str], rows: Mapping[str, Answer], prompts: Prompts) -> list[KeptMap]:
    """Return maps of the tokens that cells kept, for the cells whose rows have them."""
    maps = []
    for cell in names:
        kept = KeptTokens.of(rows[cell], prompts.visual(rows[cell]["prompt_hash"]))
        if kept is not None:
            proof = {None: [], True: ["digest the same"], False: ["NOT what its digest is of"]}[kept.proven]
            maps.append(KeptMap(cells.title(cell), proof, kept.bits.mean((0, 1)), kept.places, kept.boxes))
    return maps


def _prompt(console: Console, sample: str, rows: Sequence[Answer], prompts: Prompts) -> None:
    """Print the question, as far as it is known without a model and without data."""
    prompt = prompts.of(sample, next((row["prompt_hash"] for row in rows if row["prompt_hash"]), None))
    counts = [
        f"{row['prompt_tokens']} tokens, {row['visual_tokens']} of them visual"
        for row in rows
        if row["prompt_tokens"] is not None
    ]
    texts = {"question": prompt.question, "reference": prompt.reference}
    lines = [(name, cut(text)) for name, text in texts.items() if text is not None]
    pairs(
        console,
        [*lines, *(("prompt", words) for words in counts[:1]), *[("missing", prompt.missing)][: bool(prompt.missing)]],
    )


def _answers(console: Console, cells: StoreCells, rows: Sequence[Answer]) -> None:
    metrics = list(dict.fromkeys(name for row in rows for name in row["scores"]))
    lines: list[list[Any]] = []
    for row in rows:
        ok, differs = row["status"] == "ok", row["differs"]
        answer = marked(row["answer"], row["text_differs"]) if ok else cut(f"{row['status']}: {row['error']}")
        left = "" if differs is None or not ok else "never" if differs < 0 else str(differs + 1)
        resident = "" if row["entries_resident"] is None else f"{row['entries_resident']:,}"
        scored = [score(row["scores"].get(name)) for name in metrics]
        lines.append([cells.short(row["cell"]), cells.brief_label(row["cell"]), answer, *scored, left, resident])
    header = ["cell", "method", "answer", *metrics, "left at", "kept"]
    table(console, header, lines, right=(*metrics, "left at", "kept"), wrapped=("answer",))
    for row in rows:
        if row["fallback"]:
            console.print(f"{cells.label(row['cell'])}: {', '.join(row['fallback'])}")
