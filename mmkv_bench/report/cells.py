"""Fields and answers of single cells, and the command that runs a cell again.

A cell is one setting: model, dataset, method, budget, protocol, reading and seed. Its command names these, and the
settings of its run that differ from today's defaults. The hash of a cell also covers versions of torch and
transformers, weights and data, which no command can choose.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mmkv_bench.config.files import options
from mmkv_bench.config.shorthand import words
from mmkv_bench.errors import MMKVError
from mmkv_bench.report.formatting import number, number_words
from mmkv_bench.report.formatting import numbers as rounded
from mmkv_bench.statistics.metric_kinds import FIDELITY, MEASURES
from mmkv_bench.tables.sample_scores import encode, is_text, numbers
from mmkv_bench.tables.stored_rows import config_of, frame

if TYPE_CHECKING:
    import pandas as pd

COUNTED = ("entries_asked", "entries_resident", "n_tokens", "tokens_from_compressed")
"""Columns of `responses` that are counts."""


def cell_fields(cells: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return hash of a cell -> its row of `cells` as JSON values, without nulls, configuration, version and hash."""
    rows = {}
    for row in cells.to_dict("records"):
        shown_fields = {
            key: _plain(value) for key, value in row.items() if key not in ("config", "schema_version", "cell")
        }
        rows[row["cell"]] = {key: value for key, value in shown_fields.items() if value is not None}
    return rows


def _plain(value: Any) -> Any:
    """Return a scalar of a frame as a JSON value. Whole numbers that pandas stored as floats are whole again."""
    if isinstance(value, str | bool):
        return value
    if hasattr(value, "isoformat"):
        return None if value != value else value.isoformat(timespec="seconds")
    return number(value.item() if hasattr(value, "item") else value)


def metric_rows(metrics: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Return hash of a cell -> its rows of `metrics`: the task's metrics first, then those measured in every run."""
    metrics = metrics.sort_values("metric", key=lambda names: names.isin(list(MEASURES)), kind="stable")
    rows: dict[str, list[dict[str, Any]]] = {}
    kept = [name for name in metrics.columns if name not in ("schema_version", "dataset")]
    for row in metrics[kept].to_dict("records"):
        rows.setdefault(row.pop("cell"), []).append({key: _plain(value) for key, value in row.items()})
    return rows


def answer_summary(rows: pa.Table) -> dict[str, Any] | None:
    """Return a summary of a cell's answers; None without answers.

    Number of answers, number per status; of the ok answers (least, mean, most) of each column in `COUNTED`, and the
    number over budget.
    """
    if not len(rows):
        return None
    statuses = rows["status"].to_pylist()
    ok_answers = rows.select(COUNTED).filter([status == "ok" for status in statuses])
    columns = {name: ok_answers[name].to_pandas() for name in COUNTED}
    spans_by_column = {
        name: values.agg(["min", "mean", "max"]) for name, values in columns.items() if values.notna().any()
    }
    return {
        "answers": len(rows),
        "ended": dict(sorted(Counter(statuses).items())),
        **{name: rounded(spans_by_column[name]) if name in spans_by_column else None for name in COUNTED},
        "over": int((columns["entries_resident"] > columns["entries_asked"]).sum()),
    }


def status_counts(ended: Mapping[str, int]) -> str:
    """Return numbers of answers by status as text: `500 ok`, `498 ok, 2 oom`."""
    return ", ".join(f"{n} {status}" for status, n in sorted(ended.items(), key=lambda one: one[0] != "ok")) or "none"


def audit_sentences(counts: Mapping[str, Any] | None) -> list[str]:
    """Return sentences on a cell's answers and kept entries. counts: result of `answer_summary`."""
    if counts is None:
        return ["No answers of this cell are stored."]
    sentences = [f"{counts['answers']} answers: {status_counts(counts['ended'])}."]
    asked_text, resident_text, tokens_text, compressed_text = (counts[name] and _ends(counts[name]) for name in COUNTED)
    if resident_text:
        budget = f"{asked_text} asked" if asked_text else "no budget"
        over = (
            f"{counts['over']} answers keep more than was asked." if counts["over"] else "No answer is over the budget."
        )
        sentences += [f"Entries over all layers and KV heads: {resident_text} kept, {budget}.", over]
    if compressed_text:
        sentences.append(f"Tokens of an answer: {tokens_text}; of these from the compressed cache: {compressed_text}.")
    return sentences


def _ends(values: Sequence[float]) -> str:
    """Return (least, mean, most) as text: `512`, or `496 to 512, 508 on average`."""
    smallest, mean, largest = map(number_words, values)
    return mean if values[0] == values[2] else f"{smallest} to {largest}, {mean} on average"


def shown_configuration(text: str) -> Any:
    """Return a configuration (JSON text) without the entries `about`."""
    config = json.loads(text)
    for nodes in (config.get("methods") or {}, config.get("datasets") or {}):
        for node in nodes.values():
            if isinstance(node, dict):
                node.pop("about", None)
    return config


_ANSWER_COLUMNS = (
    "status",
    "error",
    "answer",
    "token_ids",
    "fallback",
    "prompt_hash",
    "kept",
    "kept_indices",
    "kept_digest",
)
COLUMNS = ("cell", "sample_id", "dataset", "doc_id", *_ANSWER_COLUMNS, *COUNTED)


class AnswerTable:
    """Rows of `responses` by cell. table: from `Store.responses`, sorted by cell and sample, with coded texts."""

    def __init__(self, table: pa.Table) -> None:
        names, cell_codes = encode(frame(table.select(["cell"]))["cell"])
        cell_bounds = np.searchsorted(cell_codes, np.arange(len(names) + 1)).tolist()
        self._none = table.slice(0, 0)
        self._rows = {
            name: table.slice(start, end - start)
            for name, (start, end) in zip(names, pairwise(cell_bounds), strict=True)
        }

    def rows(self, cell: str) -> pa.Table:
        """Return the answers of one cell; an empty table if the cell has none."""
        return self._rows.get(cell, self._none)

    def of_samples(self, cell: str, samples: Sequence[str], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return the given columns of a cell's answers, one dict per sample; all values are None for a sample without
        an answer."""
        rows = self.rows(cell)
        row_of_sample = {sample: at for at, sample in enumerate(rows["sample_id"].to_pylist())}
        return rows.select(columns).take(pa.array(map(row_of_sample.get, samples), pa.int64())).to_pylist()

    def kept(self, cell: str) -> list[list[list[Any]]] | None:
        """Return mean, least and most kept entries over a cell's answers: [3][layers][heads].

        None if no answer recorded kept entries, or if answers differ in the number of layers or heads.
        """
        kept = self.rows(cell)["kept"].combine_chunks()
        layers, rows = kept.drop_null().flatten(), len(kept) - kept.null_count
        if not rows or not len(layers):
            return None
        values = layers.flatten().to_numpy(zero_copy_only=False)
        widths = layers.value_lengths().to_numpy(zero_copy_only=False)
        if len(layers) % rows or len(np.unique(widths)) > 1 or not widths[0]:
            return None
        counts = values.reshape(rows, len(layers) // rows, int(widths[0])).astype(np.float64)
        mean_least_most = (counts.mean(axis=0), counts.min(axis=0), counts.max(axis=0))
        return [[rounded(layer) for layer in kind.tolist()] for kind in mean_least_most]


def sample_scores(
    samples: pd.DataFrame, cells: Collection[str], shown: Collection[str], without: Collection[str] = FIDELITY
) -> dict[tuple[str, str], dict[str, float | None]]:
    """Return (cell, sample id) -> metric -> score for the given cells and samples. without: left-out metrics."""
    is_wanted = samples["cell"].isin(list(cells)).to_numpy() & samples["sample_id"].isin(list(shown)).to_numpy()
    is_wanted &= ~samples["metric"].isin(list(without)).to_numpy()
    wanted_scores = samples.loc[is_wanted, ["cell", "sample_id", "metric", "value", "status"]]
    scores: dict[tuple[str, str], dict[str, float | None]] = {}
    columns = (
        wanted_scores["cell"],
        wanted_scores["sample_id"],
        wanted_scores["metric"],
        numbers(wanted_scores["value"]),
        is_text(wanted_scores["status"], "ok"),
    )
    for cell, sample, metric, value, ok in zip(*columns, strict=True):
        scores.setdefault((cell, sample), {})[metric] = number(value) if ok else None
    return scores


def first_samples(answers: AnswerTable, cells: Sequence[str], most: int) -> tuple[list[str], int]:
    """Return the ids of the first `most` samples that any of the cells answered, in dataset order, and the number of
    all samples."""
    rows = pa.concat_tables([answers.rows(cell).select(["sample_id", "doc_id"]) for cell in cells])
    samples = frame(rows).drop_duplicates("sample_id").astype({"sample_id": str}).sort_values(["doc_id", "sample_id"])
    return samples["sample_id"][:most].tolist(), len(samples)


def first_difference(tokens: Sequence[Any], others: Sequence[Any]) -> int | None:
    """Return the position, from 0, of the first difference between two sequences; None if they are equal."""
    return next((place for place, (a, b) in enumerate(zip_longest(tokens, others)) if a != b), None)


Answer = dict[str, Any]
"""A row of `responses` and its comparison with the full cache (see `compare_with_full`). Status None: no row."""


def compare_with_full(
    row: Answer, full: Answer | None, scores: Mapping[tuple[str, str], Mapping[str, float | None]]
) -> Answer:
    """Return an answer with `scores` (metric -> value), `differs` and `text_differs`.

    `differs` is the position of the first token that differs from the full cache's answer, -1 if no token differs.
    `text_differs` is the first character that differs, None if none does. Without a comparison both are None.

    scores: (cell, sample id) -> metric -> score.
    """
    difference_places: dict[str, int | None] = {"differs": None, "text_differs": None}
    if full is not None and full["cell"] != row["cell"] and full["status"] == row["status"] == "ok":
        first_token_apart = first_difference(row["token_ids"], full["token_ids"])
        difference_places = {
            "differs": -1 if first_token_apart is None else first_token_apart,
            "text_differs": first_difference(row["answer"], full["answer"]),
        }
    return row | difference_places | {"scores": scores.get((row["cell"], row["sample_id"]), {})}


PROGRAM = "mmkv-bench"
_FIXTURE = "_fixture"
_RUN_SETTINGS = ("baseline", "decode", "limit", "reading", "sharing")
"""Settings of a run that change its rows, besides model, dataset and method."""
_NODE_PREFIXES = ("methods.", "datasets.")
_NO_SETTINGS = {"about", "gates", "base", "name", "released", "later"}


class Commands:
    """Commands that run cells again. Today's defaults are composed once per choice of model, datasets and methods."""

    def __init__(self) -> None:
        self._composed: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._differing: dict[str, dict[str, Any] | str] = {}

    def of(self, row: Mapping[str, Any], text: str) -> dict[str, str]:
        """Return {"line": command, "note": sentence}. Without a possible command, the line is "" and the note says why.

        row: the cell's row of `cells`. text: its configuration (JSON).
        """
        config = config_of(text)
        if text not in self._differing:
            try:
                self._differing[text] = self._differences(config)
            except (MMKVError, KeyError, TypeError, AttributeError) as error:
                self._differing[text] = f"The cell's configuration cannot be composed any more: {error}"
        differing_settings = self._differing[text]
        if isinstance(differing_settings, str):
            return {"line": "", "note": differing_settings}
        label = row["dataset"]
        if label not in (config.get("datasets") or {}):
            return {"line": "", "note": f"The cell's configuration has no dataset {label}: another program wrote it."}
        settings = _groups(config, [label]) | {"method": row["method"]}
        if row["method"] in (config.get("variants") or {}):
            settings |= {"method": "full", f"variants.{row['method']}": config["variants"][row["method"]]}
        if row.get("budget_kind") == "entries":
            settings["budget"] = row["budget_entries"]
        elif row.get("budget_kind") == "fraction":
            fraction = row["budget_fraction"]
            settings["budget"] = fraction if "." in fraction else f"{fraction}.0"
        if row["protocol"] != "paper":
            settings["protocol"] = row["protocol"]
        if row.get("seed") is not None:
            settings["seed"] = row["seed"]
        kept_prefixes = (f"methods.{row['method']}.", f"methods.{row['base']}.", f"datasets.{_option(config, label)}.")
        settings |= {
            key: value
            for key, value in differing_settings.items()
            if not key.startswith(_NODE_PREFIXES) or key.startswith(kept_prefixes)
        }
        if row.get("reading") is None:
            settings.pop("reading", None)
        settings["out"] = f"runs/{row['cell'][:12]}"
        versions = f"torch {row['torch']}, transformers {row['transformers']}"
        note = f"The command makes this cell again under {versions} and with the same weights and data."
        return {"line": shlex.join([PROGRAM, *words(settings)]), "note": note}

    def _differences(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in `config` that differ from today's defaults for the same model, datasets and methods."""
        from mmkv_bench.config.compose import compose

        method_names = [name for name in config["methods"] if name not in (config.get("variants") or {})]
        groups = _groups(config, list(config["datasets"])) | {"method": method_names or ["full"]}
        key = tuple(words(groups))
        if key not in self._composed:
            self._composed[key] = dict(compose(list(key)).resolved)
        composed_config = self._composed[key]
        changed_settings = {
            name: config[name] for name in _RUN_SETTINGS if name in config and config[name] != composed_config.get(name)
        }
        changed_settings |= _changed_settings("model", config["model"], composed_config["model"])
        for name in method_names:
            changed_settings |= _changed_settings(
                f"methods.{name}", config["methods"][name], composed_config["methods"][name]
            )
        for label, node in config["datasets"].items():
            option = _option(config, label)
            changed_settings |= _changed_settings(f"datasets.{option}", node, composed_config["datasets"][option])
        return changed_settings


def _groups(config: Mapping[str, Any], labels: list[str]) -> dict[str, Any]:
    """Return the command-line choice of model, datasets and their data. labels: names of the datasets in `config`."""
    names = [_option(config, label) for label in labels]
    model = config["model"]["name"]
    groups: dict[str, Any] = {"model": model if model in options("model") else "hf"}
    groups["dataset"] = names[0] if len(names) == 1 else names
    if any(str(config["datasets"][label].get("task", "")).startswith("pages") for label in labels):
        groups["page_size"] = config["page_size"]
    if (config.get("data") or {}).get("source") == "fixture":
        groups["data"] = "fixture"
    return groups


def _option(config: Mapping[str, Any], label: str) -> str:
    """Return a stored dataset's name on the command line: without the size of its pages, and without `_fixture`."""
    node = config["datasets"][label]
    task_name = str(node.get("task") or "")
    return task_name if task_name.startswith("pages") else label.removesuffix(_FIXTURE)


def _changed_settings(prefix: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in `stored` that differ from today's in `now`, as `prefix.key` -> stored value."""
    changed_values = {}
    for key, value in _leaves(stored):
        composed_value: Any = now
        for part in key.split("."):
            composed_value = composed_value.get(part) if isinstance(composed_value, Mapping) else None
        if value != composed_value and not {*key.split(".")} & _NO_SETTINGS:
            changed_values[f"{prefix}.{key}"] = value
    return changed_values


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            if "_target_" not in value:
                yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
