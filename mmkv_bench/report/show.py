"""Printing of stored rows in a terminal: the list of cells, one cell in detail, or one sample with the answers of all
cells.

A cell is one setting: model, dataset, method, budget, protocol, reading and seed. Its hash is its id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from difflib import get_close_matches
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.report.cells import (
    COLUMNS,
    Answer,
    AnswerTable,
    Commands,
    answer_summary,
    audit_sentences,
    compare_with_full,
    first_difference,
    sample_scores,
    status_counts,
)
from mmkv_bench.report.formatting import number_words
from mmkv_bench.report.samples import KeptTokens, Prompts
from mmkv_bench.report.terminal import MARK, KeptMap, marked_text, pairs, plain, shorten, table
from mmkv_bench.report.terminal import show as show_maps
from mmkv_bench.statistics.metric_kinds import MEASURES
from mmkv_bench.store.parts import is_in
from mmkv_bench.store.rows import refuse_malformed
from mmkv_bench.store.store import Store
from mmkv_bench.store.tally import cached_rows, tally
from mmkv_bench.tables.status import label, question_position
from mmkv_bench.tables.stored_rows import BASELINE, config_of, context_key, dataset_node, frame, with_limits
from mmkv_bench.tables.text import interval_text, score, signed_score

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = (
    *("cell", "model", "dataset", "method", "base", "reading", "protocol", "budget_entries", "budget_fraction", "seed"),
    *("generation", "config"),
)
_LEAST_HASH_LETTERS = 8  # letters of a hash, or more if cells share these
_LEAST_TYPED_LETTERS = 4  # fewest letters of a hash that choose a cell
_MOST_IDS_COMPARED = 20_000  # largest number of sample ids that are searched for similar ones


class ChosenCells(NamedTuple):
    """Cells and sample that the arguments of `mmkv-bench show` choose.

    Attributes:
        cells: hashes of the cells.
        sample: id of the sample, or None.
        one: whether words name exactly one cell. False without such words, even if the store has only one cell.
    """

    cells: list[str]
    sample: str | None
    one: bool


class StoreCells:
    """All cells of a store, by dataset, model and protocol; in each `full` first, then by method and budget.

    Raises ConfigError: the store has no cells.
    """

    def __init__(self, store: Store) -> None:
        table = cached_rows(store, "cells", _COLUMNS)
        refuse_malformed(table, store.root)
        rows = table.to_pylist()
        if not rows:
            raise ConfigError(f"{store.root} has no cells; give the folder that a run printed as its rows")
        self.store = store
        self.rows: dict[str, Mapping[str, Any]] = {row["cell"]: row for row in sorted(rows, key=_order)}

    @cached_property
    def digits(self) -> int:
        """Number of leading hash letters that distinguish all cells of the store, at least 8."""
        return max([_LEAST_HASH_LETTERS, *((first_difference(a, b) or 0) + 1 for a, b in pairwise(sorted(self.rows)))])

    def label(self, cell: str) -> str:
        """Return the label of a cell: `snapkv@64 strict seed=1`."""
        return label(self.rows[cell])

    def title(self, cell: str) -> str:
        """Return the label and the shortened hash of a cell: `snapkv@64 (37f7b1d0)`."""
        return f"{self.label(cell)} ({cell[: self.digits]})"

    def names(self, cell: str) -> list[str]:
        """Return the shortened hash of a cell, and its label without the protocol."""
        label_words = self.label(cell).split(" ")
        return [cell[: self.digits], " ".join(word for word in label_words if word != self.rows[cell]["protocol"])]

    def metrics(self, cell: str) -> list[str]:
        """Return the metrics that the configuration of a cell's dataset names."""
        row = self.rows[cell]
        return list(dataset_node(config_of(row["config"]), row["dataset"]).get("metrics") or [])

    def choose(self, words: Sequence[str]) -> ChosenCells:
        """Return the cells and the sample that the arguments of `mmkv-bench show` choose.

        Each word is a method, a budget, `method@budget`, `seed=1`, a value of another column, the beginning of a hash,
        or a sample's id (at most one).
        Words of one kind are alternatives; a cell must match every kind that occurs.

        Raises ConfigError: a word matches nothing, or no cell matches all words.
        """
        chosen: dict[str, set[str]] = {}
        sample = None
        for word in words:
            kind, cells_of_word = self._matching_cells(word)
            if cells_of_word:
                chosen.setdefault(kind, set()).update(cells_of_word)
            elif sample is None and word in self.samples:
                sample = word
            else:
                raise ConfigError(
                    f"{word!r} is neither a cell nor a sample of {self.store.root}; {self._suggestion(word)}"
                )
        cells = [cell for cell in self.rows if all(cell in cells_of_word for cells_of_word in chosen.values())]
        if not cells:
            raise ConfigError(
                f"no cell of {self.store.root} matches {' and '.join(map(repr, words))} together; leave a word out"
            )
        return ChosenCells(cells, sample, len(cells) == 1 and bool(chosen))

    def _matching_cells(self, word: str) -> tuple[str, set[str]]:
        """Return the kind of a word (`method`, ...) and the cells that match it. Unknown words are taken as beginnings
        of hashes."""
        for kind in next(iter(self.words.values())):
            fitting = {cell for cell, words in self.words.items() if word in words[kind]}
            if fitting:
                return kind, fitting
        return "method", {cell for cell in self.rows if len(word) >= _LEAST_TYPED_LETTERS and cell.startswith(word)}

    @cached_property
    def words(self) -> dict[str, dict[str, set[str]]]:
        """Hash of a cell -> kind of word -> words that choose the cell."""
        return {cell: _words(row) for cell, row in self.rows.items()}

    @cached_property
    def samples(self) -> set[str]:
        """Ids of all samples with an answer."""
        return set(self.store.responses(None, ("sample_id",), coded=True)["sample_id"].unique().to_pylist())

    def _suggestion(self, word: str) -> str:
        all_words = {name for words in self.words.values() for kind in words.values() for name in kind}
        close_samples = (
            get_close_matches(word, self.samples, n=3, cutoff=0.8) if len(self.samples) <= _MOST_IDS_COMPARED else []
        )
        if close_samples:
            return f"did you mean {' or '.join(map(repr, close_samples))}?"
        return f"{nearest(word, all_words)}; ids of samples look like {min(self.samples, default='no one')!r}"


def _budgets(row: Mapping[str, Any]) -> set[str]:
    """Return the spellings of a cell's budget that a user may type: `64`, or both `0.2` and `20%`."""
    if row["budget_fraction"] is not None:
        fraction = Decimal(row["budget_fraction"])
        return {row["budget_fraction"], f"{fraction.normalize():f}", f"{(fraction * 100).normalize():f}%"}
    return {str(row["budget_entries"])} if row["budget_entries"] is not None else set()


def _words(row: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return kind of word -> words that choose a cell. row: the cell's row of `cells`."""
    budgets = _budgets(row)
    return {
        "method": {name + end for name in (row["method"], row["base"]) for end in ("", *(f"@{b}" for b in budgets))},
        "budget": budgets,
        **{name: {row[name]} - {None} for name in ("dataset", "model", "protocol", "reading")},
        "seed": set() if row["seed"] is None else {f"seed={row['seed']}"},
        "place": set(question_position(row)),
    }


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    budget = row["budget_entries"] if row["budget_entries"] is not None else row["budget_fraction"]
    sort_key: tuple[Any, ...] = (row["dataset"], row["model"], row["protocol"], row["base"] != BASELINE, row["method"])
    sort_key += (row["budget_fraction"] is not None, float(budget or 0), row["seed"] or 0, row["reading"] or "")
    return *sort_key, question_position(row)


MOST = 200
"""Largest number of cells in a list."""
_METRIC_COLUMNS = ("cell", "metric", "n", "n_ok", "value", "value_failures_zero", "low", "high")

_CONFIGURATION_COLUMNS = (
    *("model", "model_fingerprint", "weights", "model_revision", "dataset", "dataset_fingerprint", "method", "base"),
    *("reading", "protocol", "seed", "parameters", "allocation_scope", "dtype", "attention", "generation"),
    *("numerics_version", "method_version"),
)
_PROVENANCE_COLUMNS = (
    "created_at",
    "git_commit",
    "git_dirty",
    "torch",
    "transformers",
    "device",
    "driver",
    "cpu",
    "versions",
)


def show_store(console: Console, cells: StoreCells, chosen: Sequence[str]) -> None:
    """Print one line for each of the first `MOST` chosen cells: score, interval, and number of answers by status.

    chosen: hashes of the cells.
    """
    counts = tally(cells.store).counts.select(["cell", "status", "n"]).to_pandas()
    answers_by_status = counts.groupby(["cell", "status"], observed=True)["n"].sum().to_dict()
    endings_of: dict[str, dict[str, int]] = {}
    for (cell, status), n in answers_by_status.items():
        endings_of.setdefault(cell, {})[status] = n
    metrics: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in cached_rows(cells.store, "metrics", _METRIC_COLUMNS).to_pylist():
        metrics.setdefault(row["cell"], {})[row["metric"]] = row
    console.print(f"{cells.store.root}: {len(cells.rows):,} cells, {sum(answers_by_status.values()):,} answers")
    dataset_model_protocol = itemgetter("dataset", "model", "protocol")
    for (dataset, model, protocol), group in groupby(
        chosen[:MOST], lambda cell: dataset_model_protocol(cells.rows[cell])
    ):
        members = list(group)
        scored_metrics = {name for cell in members for name in metrics.get(cell, {})}
        configured = [name for name in cells.metrics(members[0]) if name in scored_metrics]
        metric = next(iter(configured or sorted(scored_metrics - MEASURES) or sorted(scored_metrics)), "")
        console.print(f"\n{dataset}, {model}, protocol={protocol}", style="bold")
        header = ["cell", "method", "n", metric or "score", "95% interval", "answers"]
        lines = []
        for cell in members:
            scores = _score_fields(metrics.get(cell, {}).get(metric))
            lines.append([*cells.names(cell), *scores, status_counts(endings_of.get(cell, {}))])
        table(console, header, lines, right=("n", metric or "score"))
    if len(chosen) > MOST:
        more_text = f"{len(chosen) - MOST:,} more cells"
        console.print(f"\n{more_text}: choose with words, such as method@budget, or with several words")
        for what in ("dataset", "model", "protocol", "reading", "method"):
            names = dict.fromkeys(cells.rows[cell][what] for cell in chosen)
            console.print(plain(f"{what}: {' '.join(sorted(filter(None, names)))}"))


def _score_fields(metric: Mapping[str, Any] | None) -> list[str]:
    """Return number of samples, score (in brackets: failed answers count as zero) and interval. metric: row of
    `metrics`."""
    if metric is None:
        return ["", "-", ""]
    score_failures_zero, value = metric["value_failures_zero"], score(metric["value"])
    score_text = (
        f"({score(score_failures_zero)})" if metric["value"] is None and score_failures_zero is not None else value
    )
    return [str(metric["n"]), score_text, interval_text(metric["low"], metric["high"])]


def show_cell(console: Console, cells: StoreCells, cell: str) -> None:
    """Print the configuration, provenance, scores and answers of one cell, and the command that runs it again."""
    (row,) = cells.store.cells([cell]).to_pylist()
    console.print(f"{cells.label(cell)} on {row['dataset']}", style="bold")
    console.print(f"cell {cell}")
    for title, names in {"Configuration": _CONFIGURATION_COLUMNS, "Where it comes from": _PROVENANCE_COLUMNS}.items():
        console.print(f"\n{title}", style="bold")
        pairs(console, [(name, _value_words(row[name])) for name in names if row[name] is not None])
    console.print("\nScores", style="bold")
    _scores(console, cells, cell)
    answers = AnswerTable(cells.store.responses([cell], COLUMNS, coded=True))
    console.print("\nAnswers", style="bold")
    for sentence in audit_sentences(answer_summary(answers.rows(cell))):
        console.print(sentence)
    if (kept := answers.kept(cell)) is not None:
        _heads(console, kept)
    console.print("\nAgain", style="bold")
    command = Commands().of({key: value for key, value in row.items() if value is not None}, row["config"])
    if command["line"]:
        console.print(command["line"], soft_wrap=True)
    console.print(command["note"])


def _value_words(value: Any) -> str:
    text = value.isoformat(timespec="seconds") if hasattr(value, "isoformat") else str(value)
    if text[:1] == "{":
        text = ", ".join(f"{key}={json.dumps(part)}" for key, part in json.loads(text).items())
    return plain(text)


def _scores(console: Console, cells: StoreCells, cell: str) -> None:
    rows = cells.store.metrics([cell]).to_pylist()
    if not rows:
        console.print("none: the answers are not scored; run mmkv-bench score")
        return
    headline_metrics = cells.metrics(cell)
    rows.sort(
        key=lambda row: (
            headline_metrics.index(row["metric"]) if row["metric"] in headline_metrics else len(headline_metrics),
            row["metric"],
        )
    )
    lines = []
    for row in rows:
        difference_text = "" if row["difference"] is None else signed_score(row["difference"])
        difference_interval = " ".join(
            filter(None, (difference_text, interval_text(row["difference_low"], row["difference_high"])))
        )
        interval_words = interval_text(row["low"], row["high"])
        lines.append(
            [row["metric"], f"{row['n_ok']} of {row['n']}", score(row["value"]), interval_words, difference_interval]
        )
    table(console, ["metric", "ok", "value", "95% interval", "minus full"], lines, right=("ok", "value"))


def _heads(console: Console, kept: Sequence[Sequence[Sequence[float]]]) -> None:
    """Print kept entries (result of `AnswerTable.kept`) by layer and KV head; in a narrow terminal mean, least and most
    over heads."""
    mean_kept, least_kept, most_kept = kept
    heads = len(mean_kept[0])
    console.print("\nentries kept by layer and KV head, mean over answers (least to most where they differ):")
    if heads * 8 + 8 > console.width:
        header = ["layer", f"mean of {heads} heads", "least", "most"]
        values = [
            (sum(row) / heads, min(low), max(high))
            for row, low, high in zip(mean_kept, least_kept, most_kept, strict=True)
        ]
        fields = [list(map(number_words, layer)) for layer in values]
    else:
        header = ["layer", *(f"head {head}" for head in range(heads))]
        fields = [list(map(_spread, *layer)) for layer in zip(mean_kept, least_kept, most_kept, strict=True)]
    table(console, header, [[str(layer), *words] for layer, words in enumerate(fields)], right=header)


def _spread(mean: float, least: float, most: float) -> str:
    return number_words(mean) if least == most else f"{number_words(mean)} ({number_words(least)}-{number_words(most)})"


_ANSWER_COLUMNS = (
    *("cell", "sample_id", "status", "error", "answer", "token_ids", "fallback", "prompt_hash", "entries_resident"),
    *("prompt_tokens", "visual_tokens"),
)


def show_sample(
    console: Console, cells: StoreCells, sample: str, chosen: Sequence[str], remade: bool = False, prompt: bool = False
) -> dict[str, list[str]]:
    """Print a sample with the answers of the chosen cells, and maps of the kept entries if the rows store them.

    Args:
        chosen: hashes of the cells.
        remade: leave out the maps, because the caller prints maps from a new run.
        prompt: also print the prompts as the models read them.

    Returns:
        Dataset -> chosen cells that answered the sample, in the printed order.

    Raises:
        ConfigError: no chosen cell answered the sample.
    """
    import pyarrow as pa

    prompt_rows = cells.store.prompts()
    prompt_rows = prompt_rows.filter(is_in(prompt_rows["sample_id"], pa.array([sample])))
    prompts_by_hash = {row["prompt_hash"]: row for row in prompt_rows.to_pylist()}
    # Without visual tokens the positions of kept tokens are unknown.
    has_visual_tokens = any(row["visual"] for row in prompts_by_hash.values())
    columns = (*_ANSWER_COLUMNS, "kept_indices", "kept_digest") if has_visual_tokens else _ANSWER_COLUMNS
    responses = cells.store.responses(None, columns, coded=True)
    responses = responses.filter(is_in(responses["sample_id"], pa.array([sample])))
    rows = {row["cell"]: row for row in responses.to_pylist()}
    chosen_cells = {*chosen}
    if not rows.keys() & chosen_cells:
        raise ConfigError(f"none of the {len(chosen)} chosen cells has a row for {sample}; choose other cells")
    samples = cells.store.samples(list(rows), ("cell", "sample_id", "metric", "value", "status"), coded=True)
    scores = sample_scores(frame(samples), rows, [sample], MEASURES)
    prompts = Prompts(None, prompts_by_hash)
    console.print(sample, style="bold")
    answer_lines: dict[str, list[str]] = {}
    maps: list[KeptMap] = []
    for dataset, of_dataset in groupby(
        [cell for cell in cells.rows if cell in rows], lambda c: cells.rows[c]["dataset"]
    ):
        cells_of_dataset = list(of_dataset)
        if chosen_cells.isdisjoint(cells_of_dataset):
            continue
        _prompt(console, sample, [rows[cell] for cell in cells_of_dataset], prompts)
        for context in _contexts(cells, cells_of_dataset):
            shown_cells = [cell for cell in context if cell in chosen_cells]
            if shown_cells:
                first_cell = cells.rows[shown_cells[0]]
                console.print(f"\n{dataset}, {first_cell['model']}, protocol={first_cell['protocol']}", style="bold")
                full = rows[context[0]] if cells.rows[context[0]]["base"] == BASELINE else None
                _answers(console, cells, [compare_with_full(rows[cell], full, scores) for cell in shown_cells])
                answer_lines.setdefault(dataset, []).extend(shown_cells)
                maps += _maps(cells, shown_cells, rows, prompts)
    console.print(
        f"\n{MARK}: from here on the answer differs from that of {BASELINE}; left at: the first token that differs; kept: "
        "entries of all layers and KV heads."
    )
    if prompt:
        _print_prompts(console, cells, prompts_by_hash)
    if maps and not remade:
        console.print("\nKept, as the rows say (keep=indices)", style="bold")
        show_maps(console, maps)
    return answer_lines


def _print_prompts(console: Console, cells: StoreCells, stored: Mapping[str, Answer]) -> None:
    described = cells.store.cells().select(["model_fingerprint", "model"]).to_pylist()
    models = {row["model_fingerprint"]: row["model"] for row in described}
    texts = {(models.get(row["model_fingerprint"], ""), row["rendered"]) for row in stored.values() if row["rendered"]}
    for model, text in sorted(texts):
        console.print(f"\nThe prompt that {model} read, its media as markers", style="bold")
        console.print(plain(text), soft_wrap=True)  # keeps the prompt's line ends
    if not texts:
        console.print("\nThe rows do not have the prompt's text: they are older than the column `rendered`, or slim.")


def _contexts(cells: StoreCells, names: Sequence[str]) -> list[list[str]]:
    """Group cells that can be compared: equal model, dataset, protocol and so on. Groups keep the order of `names`."""
    cell_table = with_limits(cells.store.cells(names).to_pandas())
    context_of_cell = {row["cell"]: context_key(row) for row in cell_table.to_dict("records")}
    contexts: dict[tuple[str, ...], list[str]] = {}
    for cell in names:
        contexts.setdefault(context_of_cell[cell], []).append(cell)
    return list(contexts.values())


def _maps(cells: StoreCells, names: Sequence[str], rows: Mapping[str, Answer], prompts: Prompts) -> list[KeptMap]:
    maps = []
    for cell in names:
        kept = KeptTokens.of(rows[cell], prompts.visual(rows[cell]["prompt_hash"]))
        if kept is not None:
            proof_texts = {None: [], True: ["digest the same"], False: ["NOT what its digest is of"]}[kept.proven]
            maps.append(KeptMap(cells.title(cell), proof_texts, kept.bits.mean((0, 1)), kept.places, kept.boxes))
    return maps


def _prompt(console: Console, sample: str, rows: Sequence[Answer], prompts: Prompts) -> None:
    prompt = prompts.of(sample, next((row["prompt_hash"] for row in rows if row["prompt_hash"]), None))
    counts = [
        f"{row['prompt_tokens']} tokens, {row['visual_tokens']} of them visual"
        for row in rows
        if row["prompt_tokens"] is not None
    ]
    texts = {"question": prompt.question, "reference": prompt.reference}
    lines = [(name, shorten(text)) for name, text in texts.items() if text is not None]
    lines += [("prompt", words) for words in counts[:1]]
    lines += [("missing", prompt.missing)] if prompt.missing else []
    pairs(console, lines)


def _answers(console: Console, cells: StoreCells, rows: Sequence[Answer]) -> None:
    metrics = list(dict.fromkeys(name for row in rows for name in row["scores"]))
    lines: list[list[Any]] = []
    for row in rows:
        ok, differs = row["status"] == "ok", row["differs"]
        answer = marked_text(row["answer"], row["text_differs"]) if ok else shorten(f"{row['status']}: {row['error']}")
        first_token_apart = "" if differs is None or not ok else "never" if differs < 0 else str(differs + 1)
        resident = "" if row["entries_resident"] is None else f"{row['entries_resident']:,}"
        score_texts = [score(row["scores"].get(name)) for name in metrics]
        lines.append([*cells.names(row["cell"]), answer, *score_texts, first_token_apart, resident])
    header = ["cell", "method", "answer", *metrics, "left at", "kept"]
    table(console, header, lines, right=(*metrics, "left at", "kept"), wrapped=("answer",))
    for row in rows:
        if row["fallback"]:
            console.print(f"{cells.label(row['cell'])}: {', '.join(row['fallback'])}")
