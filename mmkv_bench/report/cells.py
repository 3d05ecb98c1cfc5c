"""Facts of single cells: the row, the scores, and the audit of the answers by layer and head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.report.formats import number, number_words, numbers
from mmkv_bench.statistics.metric_kinds import MEASURES

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_COUNTED = ("entries_asked", "entries_resident", "n_tokens", "tokens_from_compressed")
_LEFT_OUT = ("config", "schema_version", "cell")  # shown elsewhere


def described(cells: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Cell -> its row as the page shows it, in the order of the schema, without what is null."""
    rows = {}
    for row in cells.to_dict("records"):
        shown = {key: _plain(value) for key, value in row.items() if key not in _LEFT_OUT}
        rows[row["cell"]] = {key: value for key, value in shown.items() if value is not None}
    return rows


def _plain(value: Any) -> Any:
    """A scalar of a frame as JSON has it; whole numbers that a null among them made floats are whole again."""
    if isinstance(value, str | bool):
        return value
    if hasattr(value, "isoformat"):
        return None if value != value else value.isoformat(timespec="seconds")
    return number(value.item() if hasattr(value, "item") else value)


def scores(metrics: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Cell -> its rows of `metrics`, those of the task before what every run measures."""
    metrics = metrics.sort_values("metric", key=lambda names: names.isin(list(MEASURES)), kind="stable")
    rows: dict[str, list[dict[str, Any]]] = {}
    kept = [name for name in metrics.columns if name not in ("schema_version", "dataset")]
    for row in metrics[kept].to_dict("records"):
        rows.setdefault(row.pop("cell"), []).append({key: _plain(value) for key, value in row.items()})
    return rows


def counted(cell: slice, answers: Mapping[str, np.ndarray], statuses: Sequence[str]) -> dict[str, Any]:
    """Sums over all answers of a cell; `answers`: columns of numbers, NaN for null, and `status`, int [rows]."""
    status = answers["status"][cell]
    ends = np.bincount(status, minlength=len(statuses))
    ok = np.flatnonzero(status == statuses.index("ok")) if "ok" in statuses else np.array([], dtype=int)
    counts: dict[str, Any] = {
        "answers": len(status),
        "ended": {word: int(n) for word, n in zip(statuses, ends, strict=True) if n},
    }
    for name in _COUNTED:
        values = answers[name][cell][ok]
        values = values[~np.isnan(values)]
        counts[name] = numbers([values.min(), values.mean(), values.max()]) if len(values) else None
    asked, resident = (answers[name][cell][ok] for name in _COUNTED[:2])
    counts["over"] = int(np.count_nonzero(resident > asked))
    return counts


def endings(ended: Mapping[str, int]) -> str:
    """`500 ok`, `498 ok, 2 oom`."""
    return ", ".join(f"{n} {status}" for status, n in sorted(ended.items(), key=lambda one: one[0] != "ok")) or "none"


def audit_sentences(counts: Mapping[str, Any] | None) -> list[str]:
    """The sums of `counted` in sentences."""
    if counts is None:
        return ["No answers of this cell are stored."]
    sentences = [f"{counts['answers']} answers: {endings(counts['ended'])}."]
    asked, resident = counts["entries_asked"], counts["entries_resident"]
    if resident:
        budget = "no budget" if asked is None else f"{_ends(asked)} asked"
        sentences.append(f"Entries over all layers and KV heads: {_ends(resident)} kept, {budget}.")
        over = counts["over"]
        sentences.append(f"{over} answers keep more than was asked." if over else "No answer is over the budget.")
    if counts["tokens_from_compressed"]:
        own, compressed = _ends(counts["n_tokens"]), _ends(counts["tokens_from_compressed"])
        sentences.append(f"Tokens of an answer: {own}; of these from the compressed cache: {compressed}.")
    return sentences


def _ends(values: Sequence[float]) -> str:
    """least, mean, most -> `512`, or `496 to 512, 508 on average`."""
    least, mean, most = map(number_words, values)
    return mean if values[0] == values[2] else f"{least} to {most}, {mean} on average"


def kept_by_head(kept: pa.ListArray) -> list[list[list[float | int | None]]] | None:
    """Mean, least and most entries of each layer and KV head over the answers of a cell: [3][layers][heads].

    Args:
        kept: of one cell, lists [layers] of lists [KV heads], null where an answer failed. None where no answer has any, or
            where their shapes differ.
    """
    layers = kept.drop_null().flatten()
    rows = len(kept) - kept.null_count
    if not rows or not len(layers):
        return None
    values = layers.flatten().to_numpy(zero_copy_only=False)
    widths = layers.value_lengths().to_numpy(zero_copy_only=False)
    if len(layers) % rows or len(np.unique(widths)) > 1 or not widths[0]:
        return None
    whole = values.reshape(rows, len(layers) // rows, int(widths[0])).astype(np.float64)
    ways = (whole.mean(axis=0), whole.min(axis=0), whole.max(axis=0))
    return [[numbers(layer) for layer in way.tolist()] for way in ways]


def first_difference(tokens: pa.ListArray, others: pa.ListArray) -> list[int | None]:
    """Compare lists of token ids pairwise: place of the first that differs, -1 where none does, None where one is null."""
    left, right = padded(tokens), padded(others)
    width = max(left.shape[1], right.shape[1])
    left, right = (np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1) for each in (left, right))
    differs = left != right
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), -1) if width else np.full(len(left), -1)
    answered = [a and b for a, b in zip(tokens.is_valid().to_pylist(), others.is_valid().to_pylist(), strict=True)]
    return [int(place) if there else None for place, there in zip(first, answered, strict=True)]


def padded(lists: pa.ListArray) -> np.ndarray:
    """int64 [n, longest], -1 behind the end of each."""
    lengths = np.nan_to_num(lists.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    filled = np.full((len(lengths), int(lengths.max(initial=0))), -1, dtype=np.int64)
    filled[np.arange(filled.shape[1]) < lengths[:, None]] = lists.drop_null().flatten().to_numpy(zero_copy_only=False)
    return filled


def parsed(text: str) -> Any:
    """A configuration without what no page shows."""
    config = json.loads(text)
    for nodes in (config.get("methods") or {}, config.get("datasets") or {}):
        for node in nodes.values():
            if isinstance(node, dict):
                node.pop("about", None)
    return config
