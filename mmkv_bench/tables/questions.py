"""Scores lost when one compressed cache answers several questions on a document, as tables and as a figure.

The baseline compresses anew for each question (`query_aware`). The losses are:

- room: the baseline minus compressing once for all questions (`query_joint`);
- unknown: `query_joint` minus compressing for another question (`query_first`);
- wording: the baseline minus compressing for the same question in other words (`query_paraphrase`);
- generic, agnostic: the baseline minus compressing for a fixed instruction, or for no question;
- turns: the baseline minus asking in a conversation (`turns`), after other questions and answers under the same budget.

Differences are paired by sample. Intervals are of means over documents, the independent units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.statistics.intervals import NO_INTERVAL, Interval, intervals
from mmkv_bench.statistics.metric_kinds import FIDELITY, is_share, lower_is_better
from mmkv_bench.store.store import Store
from mmkv_bench.tables.figure import COLOURS, GREY, Look, canvas, legend_below, plain, point_style, small_print
from mmkv_bench.tables.stored_rows import check_names
from mmkv_bench.tables.table import Grid, GridCell, Note, Rank, Table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KNOWN = ("each", "joint", "other", "paraphrase", "generic", "agnostic", "turns")
"""Columns of scores. `other`: score under `query_first`, where the cache was compressed for another question."""
LOSSES = {
    "room": ("each", "joint"),
    "unknown": ("joint", "other"),
    "wording": ("each", "paraphrase"),
    "generic": ("each", "generic"),
    "agnostic": ("each", "agnostic"),
    "turns": ("each", "turns"),
}
_PROTOCOLS = {"query_aware": "each", "query_joint": "joint", "query_first": "other", "turns": "turns"}
_PROTOCOLS |= {f"query_{name}": name for name in ("paraphrase", "generic", "agnostic")}
MODES = {"first" if name == "other" else name: ["same", "other"] if name == "other" else [name] for name in KNOWN}
"""Mode (which questions the cache was compressed for) -> columns of scores, of which a sample has one. `first`: `query_first`,
with the question that the cache was compressed for."""
LINE = ["model", "dataset", "metric", "method", "reading", "budget", "seed"]
_SAMPLE = [*LINE, "cluster", "sample_id"]

LEAST = 10
"""Smallest number of documents for an interval."""

_BY_TURN = "by turn of the conversation; in brackets the same questions, each compressed for anew"
_NO_SCORES_MESSAGE = (
    "{} has no scores of several questions per document; run dataset=questions_records with "
    "'protocol=[query_aware,query_joint,query_first]', or choose other rows with --dataset and --metric"
)


class NoQuestionsError(StoreError):
    """The store has no scores of several questions per document."""


def tables_with_scores(
    root: Path, datasets: Sequence[str] | None = None, metrics: Sequence[str] | None = None
) -> list[tuple[Table, pd.DataFrame]]:
    """Return (table, its rows of `paired_scores`) per model, dataset and metric of a store.

    Args:
        datasets: names of datasets; None: all.
        metrics: names of metrics; None: all except fidelity.

    Raises:
        NoQuestionsError: the store has no scores of several questions per document.
    """
    scores = paired_scores(root)
    if datasets:
        scores = scores[scores["dataset"].isin(datasets)]
    scores = scores[scores["metric"].isin(metrics) if metrics else ~scores["metric"].isin(list(FIDELITY))]
    if scores.empty:
        raise NoQuestionsError(_NO_SCORES_MESSAGE.format(root))
    return [(_table(names, rows), rows) for names, rows in scores.groupby(LINE[:3], sort=False)]


def paired_scores(root: Path) -> pd.DataFrame:
    """Return one row per question, metric, method, budget and seed, with the scores under all protocols.

    Columns:
    - those of `LINE`, `cluster` (the document) and `sample_id`;
    - those of `KNOWN`: score by the questions that the cache was compressed for, such as `joint` for all; NaN if missing;
    - `same`: score under `query_first` if the cache was compressed for this question;
    - `place`: position of the question, from 1. Position 1 has the question that `query_first` and `turns` ask first.

    Raises:
        NoQuestionsError: the store has no scores of several questions per document.
        StoreError: a row has two scores under a protocol, from methods with different versions or parameters.
    """
    store = Store(root)
    cells = store.cells().to_pandas()
    cells = cells[cells["protocol"].isin(_PROTOCOLS)]
    if cells.empty:
        raise NoQuestionsError(_NO_SCORES_MESSAGE.format(root))
    cells = cells.assign(known=cells["protocol"].map(_PROTOCOLS))
    budget_percents = (cells["budget_fraction"].astype(float) * 100).map("{:g}%".format)
    cells["budget"] = cells["budget_entries"].map("{:g}".format).where(cells["budget_entries"].notna(), budget_percents)
    cells.loc[cells["budget_kind"] == "none", "budget"] = ""
    cells["seed"] = cells["seed"].map("{:g}".format).where(cells["seed"].notna(), "")
    cells["reading"] = cells["reading"].fillna("").astype(str)
    line_columns = ["cell", "model", "method", "reading", "budget", "seed", "known"]
    answers = store.responses(cells["cell"], ["cell", "sample_id", "question_number", "question_known"]).to_pandas()
    answers = answers[answers["question_number"].notna()]
    if answers.empty:
        raise NoQuestionsError(_NO_SCORES_MESSAGE.format(root))
    scores = store.samples(cells["cell"], ["cell", "dataset", "sample_id", "cluster", "metric", "value"]).to_pandas()
    rows = scores.merge(answers, on=["cell", "sample_id"]).merge(cells[line_columns], on="cell")
    question_numbers = rows["question_number"].astype("Int64").astype(str)
    rows.loc[(rows["known"] == "other") & (question_numbers == rows["question_known"]), "known"] = "same"
    duplicates = rows[rows.duplicated([*_SAMPLE, "known"])]
    if len(duplicates):
        line = duplicates.iloc[0]
        raise StoreError(
            f"{root} has two cells of {line['method']} {line['budget']} ({line['known']}) for {line['sample_id']}, with "
            "different versions or parameters; name the method's variants (variants.<name>), or use a folder for each version"
        )
    scores_by_protocol = rows.pivot_table(index=_SAMPLE, columns="known", values="value", aggfunc="first", sort=False)
    scores_by_protocol = scores_by_protocol.reindex(columns=[*KNOWN, "same"]).reset_index()
    return scores_by_protocol.merge(_places(rows), on=["dataset", "sample_id"], how="left")


def _places(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a frame with the `place` of each question. If no row names the question asked first, question 0 has position 1."""
    sample = ["dataset", "sample_id"]
    question_rows = rows.drop_duplicates(sample)
    question_rows = question_rows.assign(
        size=question_rows.groupby(["dataset", "cluster"])["question_number"].transform("max") + 1
    )
    question_rows = question_rows.set_index(sample)[["question_number", "size"]].astype(float)
    first_questions = rows.dropna(subset=["question_known"]).drop_duplicates([*sample, "known"]).set_index(sample)
    listed_sizes = (
        first_questions.loc[first_questions["known"] == "joint", "question_known"].str.count(",").astype(float) + 1
    )
    questions_per_document = listed_sizes.reindex(question_rows.index).fillna(question_rows["size"])
    question_orders = first_questions.loc[first_questions["known"].isin(["same", "other", "turns"]), "question_known"]
    first_numbers = (
        question_orders[~question_orders.index.duplicated()]
        .str.split(",")
        .str[0]
        .astype(float)
        .reindex(question_rows.index)
    )
    positions = (
        question_rows["question_number"] - (first_numbers if len(question_orders) else 0)
    ) % questions_per_document + 1
    return positions.rename("place").reset_index()


def by_place(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the mean score by method, budget, seed (`LINE`), mode of `MODES` and position of the question.

    Args:
        scores: result of `paired_scores`.

    Returns:
        Columns of `LINE`, and:
        label: name of the method. mode, place: mode and position.
        value: mean score. low, high: 95 % interval over documents; NaN for fewer than `LEAST` documents.
        documents: number of documents.
    """
    import pandas as pd

    place_rows = []
    for names, line in sorted(scores.groupby(LINE), key=lambda item: (*item[0][:3], _place(*item[0][3:]))):
        line_identity = dict(zip(LINE, names, strict=True)) | {"label": label(names[3], names[4], names[6])}
        for mode, columns in MODES.items():
            value = line[columns].bfill(axis=1).iloc[:, 0]
            for place, rows in line.assign(value=value).dropna(subset=["value", "place"]).groupby("place"):
                interval, documents = (
                    _interval(
                        rows["value"], rows["cluster"], line_identity["dataset"], is_share(line_identity["metric"])
                    ),
                    rows["cluster"].nunique(),
                )
                interval_columns = {"low": interval.low, "high": interval.high, "documents": documents}
                place_rows.append(
                    line_identity
                    | {"mode": mode, "place": int(place), "value": rows["value"].mean()}
                    | interval_columns
                )
    return pd.DataFrame(place_rows).astype({"low": float, "high": float})


def label(method: str, reading: str, seed: str) -> str:
    """Return the name of a method with reading and seed, such as `h2o (released) seed=1`."""
    return method + (f" ({reading})" if reading == "released" else "") + (f" seed={seed}" if seed else "")


def losses(line: pd.DataFrame, dataset: str, metric: str) -> dict[str, tuple[float, Interval, int]]:
    """Return name of a loss -> (mean over documents, interval, number of documents), for each loss with scores.

    A loss is positive if the second column of `LOSSES` is worse.

    Args:
        line: rows of `paired_scores` for one method, budget and seed.
        dataset: name of the dataset, which seeds the bootstrap.
        metric: name of the metric.
    """
    sign, loss_of = (-1 if lower_is_better(metric) else 1), {}
    for name, (first, second) in LOSSES.items():
        paired_rows = line[line[first].notna() & line[second].notna()]
        if len(paired_rows):
            means = sign * (paired_rows[first] - paired_rows[second]).groupby(paired_rows["cluster"], sort=False).mean()
            loss_of[name] = float(means.mean()), _interval(means, means.index, dataset, False), len(means)
    return loss_of


def _interval(values: pd.Series, clusters: pd.Series | pd.Index, dataset: str, share: bool) -> Interval:
    """Return the interval of the mean of `values`; `NO_INTERVAL` for fewer than `LEAST` documents.

    clusters: document of each value. share: True if the values are shares from 0 to 1.
    """
    if clusters.nunique() < LEAST:
        return NO_INTERVAL
    return intervals([(values.to_numpy(np.float64), clusters.to_numpy(str))], dataset, share=share)[0]


def _table(names: tuple[str, str, str], rows: pd.DataFrame) -> Table:
    model, dataset, metric = names
    present_protocols = [name for name in KNOWN if rows[name].notna().any()]
    loss_names = [name for name in LOSSES if name != "turns" or name in present_protocols]
    turns = sorted(rows.loc[rows["turns"].notna(), "place"].dropna().unique())
    score_rows, loss_rows, turn_rows, has_losses = [], [], [], False
    for (method, reading, budget, seed), line in sorted(rows.groupby(LINE[3:]), key=lambda item: _place(*item[0])):
        name = label(method, reading, seed)
        means = [line[column].mean() for column in present_protocols]
        score_rows.append([name, budget, *(_number(value) for value in means)])
        if line["turns"].notna().any():
            turn_rows.append([name, budget, *(_at_turn(line[line["place"] == turn]) for turn in turns)])
        if not budget:
            continue
        line_losses = losses(line, dataset, metric)
        has_losses = has_losses or bool(line_losses)
        loss_rows.append([name, budget, *(_loss(line_losses.get(cause)) for cause in loss_names)])
    grids = [Grid(["method", "budget", *present_protocols], score_rows, labels=2)]
    if has_losses:
        grids.append(Grid(["method", "budget", *loss_names], loss_rows, heading="losses", labels=2))
    if turns:
        header = ["method", "budget", *(f"turn {turn:g}" for turn in turns)]
        grids.append(Grid(header, turn_rows, heading=_BY_TURN, labels=2))
    documents, questions = rows["cluster"].nunique(), rows["sample_id"].nunique()
    return Table(
        title=f"{dataset}, {metric}: many questions per cache",
        caption=f"model={model}; {_count(documents, 'document')}, {_count(questions, 'question')}",
        grids=grids,
        notes=[*_notes(rows, documents, "turns" in present_protocols, has_losses)],
        records=lambda: rows.astype(object).where(rows.notna(), None).to_dict("records"),
    )


def _notes(rows: pd.DataFrame, documents: int, turns: bool, paired: bool) -> Iterator[Note]:
    """Yield the notes of a table. turns: True if the table has a grid by turn. paired: True if the table has losses."""
    text = (
        "each: compressed anew for every question; joint: once, for all questions of the document; other: once, for "
        "another question of it; paraphrase: for the question in other words; generic: for a fixed instruction; agnostic: for "
        f"none{'; turns: in a conversation, after other questions of the document' * turns}."
    )
    yield Note(text, Rank.MARK)
    losses_text = (
        "Losses, positive where the second is worse: room = each - joint; unknown = joint - other, at questions that were "
        "not known; wording = each - paraphrase; generic, agnostic and turns: each minus these. Paired by sample, means over "
        "documents, 95 % bootstrap intervals over documents, not corrected for their number."
    )
    if paired:
        yield Note(losses_text, Rank.MARK)
    if paired and documents < LEAST:
        yield Note(f"No intervals: {_count(documents, 'document')}, and they take {LEAST} or more.", Rank.WARNING)
    missing = 0
    for _, line in rows.groupby(LINE[3:]):
        missing_modes = [line[columns].isna().all(axis=1) for columns in MODES.values()]
        missing += sum(int(gone.sum()) for gone in missing_modes if not gone.all())  # modes without scores were not run
    if missing:
        yield Note(f"{missing} scores are missing (failed, or not there yet) and left out.", Rank.WARNING)
    same_order_rows = rows.dropna(subset=["same", "each"])
    if len(same_order_rows):
        equal_scores = int((same_order_rows["same"] == same_order_rows["each"]).sum())
        yield Note(
            f"Control: the known question again has the score of `each` in {equal_scores} of {len(same_order_rows)} pairs."
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _place(method: str, reading: str, budget: str, seed: str) -> tuple[object, ...]:
    """Return a sort key: `full` first, then by method, reading, budget and seed."""
    return method != "full", method, reading, float(budget.rstrip("%") or 0), seed


def _at_turn(line: pd.DataFrame) -> GridCell:
    """Return the mean score of one turn's questions; in brackets the mean of the same questions under `query_aware`, if any."""
    paired_rows = line[line["turns"].notna() & line["each"].notna()]
    if paired_rows.empty:
        return _number(line["turns"].mean())
    mean, mean_compressed_anew = float(paired_rows["turns"].mean()), float(paired_rows["each"].mean())
    return GridCell(f"{mean:.2f} ({mean_compressed_anew:.2f})", mean)


def _number(value: float) -> GridCell:
    return GridCell("" if np.isnan(value) else f"{value:.2f}", None if np.isnan(value) else float(value))


def _loss(loss: tuple[float, Interval, int] | None) -> GridCell:
    if loss is None:
        return GridCell("")
    mean, interval, _ = loss
    interval_text = "" if interval.low is None else f"[{interval.low:+.2f}, {interval.high:+.2f}]"
    return GridCell(f"{mean:+.2f}", mean, interval_text)


PLACE = "question, in the order asked"
LOOKS = {
    "each": Look("black", "h"),
    "joint": Look(COLOURS["green"], "s"),
    "first": Look(COLOURS["vermilion"], "D"),
    "paraphrase": Look(COLOURS["pink"], "P"),
    "generic": Look(COLOURS["gold"], "^"),
    "agnostic": Look(COLOURS["blue"], "o"),
    "turns": Look(COLOURS["violet"], "X"),
}
"""Mode -> colour and marker, in figures and in the report."""
_PANELS_ACROSS = 4
_POINT_SHIFT = 0.07
"""Horizontal distance between the points of different modes, so that equal points stay visible."""


def x_shift(mode: str, modes: Sequence[str]) -> float:
    """Return the horizontal shift of the points of `mode`. modes: all drawn modes."""
    return _POINT_SHIFT * (modes.index(mode) - (len(modes) - 1) / 2)


def question_figure(
    points: pd.DataFrame, methods: Sequence[str] | None = None, budgets: Sequence[str] | None = None
) -> Figure:
    """Draw scores against the question's position, one panel per method and budget, with a line per mode of `MODES`.

    The full cache is a dashed line.

    Args:
        points: result of `by_place` for one model, dataset and metric.
        methods, budgets: methods, in this order, and budgets to draw; None: all.

    Raises:
        ConfigError: no row has one of the methods or budgets, or only `full` has rows.
    """
    panels = _panels(points, methods, budgets)
    modes = [mode for mode in MODES if (points["mode"] == mode).any()]
    across = min(_PANELS_ACROSS, len(panels))
    down = -(-len(panels) // across)
    figure, axes = canvas(down, across, (3.0 * max(across, 2), 2.6 * down + 0.8), len(panels), sharey=True)
    full_points = points[(points["method"] == "full") & (points["mode"] == "each")]
    for place, (one, line) in enumerate(zip(axes, panels, strict=False)):
        _draw_panel(one, line, full_points, modes)
        one.set_title(", ".join(filter(None, line[["label", "budget"]].iloc[0])), fontsize=10.5)
        if place % across == 0:
            one.set_ylabel(str(points["metric"].iloc[0]).replace("_", " "), fontsize=10)
        if place >= len(panels) - across:
            one.set_xlabel(PLACE, fontsize=10)
    legend_below(figure, axes)
    title_parts = [*points[["dataset", "model"]].iloc[0], f"{points['documents'].max()} documents"]
    small_print(figure, [*title_parts, "bars: 95 % intervals over documents"], 110)
    return figure


def _panels(points: pd.DataFrame, methods: Sequence[str] | None, budgets: Sequence[str] | None) -> list[pd.DataFrame]:
    lines = points[points["method"] != "full"]
    check_names("budget", budgets or (), {*lines["budget"]})
    lines = lines[lines["budget"].isin(budgets)] if budgets else lines
    check_names("method", methods or (), {*lines["label"], *lines["method"]})
    panel_lines = [lines]
    if methods is not None:
        panel_lines = [lines[(lines["label"] == name) | (lines["method"] == name)] for name in methods]
    panels = [line for part in panel_lines for _, line in part.groupby(["label", "budget"], sort=False)]
    if not panels:
        raise ConfigError("only full has rows with several questions per document; run other methods too")
    return panels


def _draw_panel(axes: Axes, line: pd.DataFrame, full: pd.DataFrame, modes: Sequence[str]) -> None:
    if len(full):
        axes.plot(full["place"], full["value"], color=GREY, linestyle="--", linewidth=1.4, label="full")
    for mode in modes:
        rows = line[line["mode"] == mode]
        if rows.empty:
            continue
        below, above = (rows["value"] - rows["low"]).fillna(0), (rows["high"] - rows["value"]).fillna(0)
        style = point_style(*LOOKS[mode]) | {"markersize": 6, "linewidth": 1.3, "elinewidth": 0.9, "label": mode}
        axes.errorbar(rows["place"] + x_shift(mode, modes), rows["value"], [below.clip(0), above.clip(0)], **style)
    axes.set_xticks(sorted(line["place"].unique()))
    if line["value"].between(0, 1).all():
        axes.set_ylim(-0.03, 1.05)
    plain(axes)
