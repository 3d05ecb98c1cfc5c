"""The rows that tables are made from: read from a store, checked, and gathered into per-sample scores.

Frames are those of `store/schema.py`: `cells` (one row per cell), `samples` (one per cell, sample and metric) and
`responses` (one per cell and sample; only the columns of `RESPONSE_COLUMNS`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.errors import ConfigError, StoreError, nearest
from mmkv_bench.tables import free

if TYPE_CHECKING:
    import pandas as pd

BASELINE = "full"

# Two cells may stand in one table, or be compared, only where all of these agree.
CONTEXT = (
    "model",
    "model_fingerprint",
    "dataset",
    "dataset_fingerprint",
    "protocol",
    "dtype",
    "attention",
    "limits",
    "generation",
    "numerics_version",
    "torch",
    "transformers",
)
LIMITS = ("min_pixels", "max_pixels", "video_max_pixels", "frames", "max_prompt_tokens")
"""Settings of `model` that change what a model is shown; the context's `limits` are those that were set."""

RESPONSE_COLUMNS = (
    "cell",
    "sample_id",
    "status",
    "fallback",
    "entries_asked",
    "entries_resident",
    "entries_reachable",
    "budget_entries",
    "context_tokens",
    "bytes_device",
    "bytes_host",
    "bytes_metadata",
    "bytes_full",
    "n_tokens",
    "tokens_from_compressed",
    "finish_reason",
    "question_text_before_cut",
)


@dataclass
class Rows:
    """The frames of one store. `responses` and `metrics` may be empty; then what they would mark is not marked.

    full: the answers of `full` alone, columns of `free.COLUMNS`; None where nobody has read them.
    """

    cells: pd.DataFrame
    samples: pd.DataFrame
    responses: pd.DataFrame
    metrics: pd.DataFrame
    full: pd.DataFrame | None = None


def load(root: Path | str, cells: Collection[str] | None = None) -> Rows:
    """Rows of the store at `root`: of all its cells, or of those named (a run's own).

    Raises ConfigError when there is no such folder, when it holds no rows, or when none of its answers is scored.
    """
    from mmkv_bench.store.store import Store

    root = Path(root)
    if not root.is_dir():
        raise ConfigError(f"There is no rows folder at '{root}': give the folder that a run printed as its rows.")
    store = Store(root)
    samples = store.samples(cells).to_pandas()
    responses = store.responses(cells, RESPONSE_COLUMNS).to_pandas()
    if samples.empty and responses.empty:
        raise ConfigError(f"'{root}' holds no result rows: give the folder that a run printed as its rows.")
    if samples.empty:
        raise ConfigError(
            f"'{root}' holds {len(responses)} answers but no scores: run the same command again with stage=score."
        )
    described = store.cells(cells).to_pandas()
    full = store.responses(described["cell"][described["base"] == BASELINE], free.COLUMNS).to_pandas()
    return Rows(described, samples, responses, store.metrics(cells).to_pandas(), full)


def check(cells: pd.DataFrame, samples: pd.DataFrame) -> None:
    """Raises StoreError for scores of unknown cells, cells described twice, or a sample scored twice in a cell."""
    twice = cells["cell"][cells["cell"].duplicated()].tolist()
    if twice:
        raise StoreError(f"Cell {twice[0]} is described by more than one row of `cells`: the store is damaged.")
    unknown = sorted(set(samples["cell"]) - set(cells["cell"]))
    if unknown:
        raise StoreError(f"Scores of cell {unknown[0]} have no row in `cells`: run the same command again to write it.")
    key = ["cell", "sample_id", "metric"]
    repeated = samples.loc[samples.duplicated(key), key]
    if len(repeated):
        cell, sample, metric = repeated.iloc[0]
        raise StoreError(f"Sample {sample} has more than one {metric} score in cell {cell}: the store is damaged.")


def choose(column: pd.Series, wanted: Sequence[str] | None, what: str) -> pd.Series:
    """Mask of the rows whose value is among `wanted` (all rows when None); unknown values are a ConfigError."""
    if not wanted:
        return column.notna() | column.isna()
    present = {str(value) for value in column.dropna()}
    for name in wanted:
        if name not in present:
            raise ConfigError(f"The rows hold no {what} '{name}': {nearest(name, present)}.")
    return column.isin(list(wanted))


def missing(value: object) -> bool:
    """Whether a scalar of a frame is null (None, NaN or NA)."""
    import pandas as pd

    return bool(pd.isna(value))


def with_limits(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells with the column `limits`, as `frames=32 max_pixels=100352`, read from their configuration; where images stand
    in a prompt is among them."""
    given = zip(cells["config"], cells["dataset"], strict=True)
    return cells.assign(limits=[_limits(json.loads(config), dataset) for config, dataset in given])


def _limits(config: Mapping[str, Any], dataset: str) -> str:
    model, node = config.get("model") or {}, (config.get("datasets") or {}).get(dataset) or {}
    asked = {key: model[key] for key in LIMITS if model.get(key) is not None}
    if node.get("placeholders") not in (None, "keep"):
        asked["placeholders"] = node["placeholders"]
    return " ".join(f"{key}={value}" for key, value in asked.items())


_LINE = ("method", "base", "reading", "parameters", "budget_kind", "budget_entries", "budget_fraction", "seed")


def latest(cells: pd.DataFrame) -> pd.Series:
    """Mask of the cells (with the column `limits`) that no later version of the same method stands beside: its numbers
    were mended, and a table shows a method once. Versions are no part of a table's context."""
    if "method_version" not in cells:
        return cells["cell"].notna()
    version = cells["method_version"].astype("float64").fillna(1)
    newest = version.groupby([cells[name] for name in (*CONTEXT, *_LINE)], dropna=False).transform("max")
    return version == newest


def context_key(row: pd.Series, columns: Sequence[str] = CONTEXT) -> tuple[str, ...]:
    """What a cell shares with every cell that it may be compared with."""
    return tuple("" if missing(row[column]) else str(row[column]) for column in columns)


@dataclass(frozen=True)
class Scores:
    """Scores of one cell, or of the seeds of one cell averaged within each sample; samples in ascending id order.

    sample_ids, clusters: object [n]; values: float64 [n], NaN where the sample is not ok (in any of its seeds).
    parts: float64 [n, k], what a metric that is no mean is aggregated from; None where no sample has any. A sample that
    is not ok has those of an empty answer, or NaN where nobody knows them (no sample of its cell was ok).
    unjudged: how many samples are answered and have no value: a judge did not answer, or a measure was not
    taken while answering, which are no failures of the model.
    """

    sample_ids: np.ndarray
    clusters: np.ndarray
    values: np.ndarray
    parts: np.ndarray | None = None
    unjudged: int = 0

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def ok(self) -> np.ndarray:
        return ~np.isnan(self.values)

    @property
    def n_ok(self) -> int:
        return int(self.ok.sum())

    @property
    def complete(self) -> bool:
        """Whether every sample is ok: only then is there a headline."""
        return self.n > 0 and self.n_ok == self.n

    def among(self, sample_ids: Sequence[str]) -> Scores:
        """The same scores over the samples that are in `sample_ids`."""
        keep = np.isin(self.sample_ids, np.asarray(sample_ids, dtype=object))
        parts = None if self.parts is None else self.parts[keep]
        return Scores(self.sample_ids[keep], self.clusters[keep], self.values[keep], parts)


def gather(samples: pd.DataFrame) -> Scores:
    """Scores from the `samples` rows of one metric and of one cell, or of several cells that differ by seed only.

    A sample counts as ok when each of its rows has status ok and a value; its value is then the mean over its rows.
    """
    answered = samples["status"] == "ok"
    frame = samples.assign(
        good=answered & samples["value"].notna(),
        answered=answered,
        value=samples["value"].astype("float64"),  # a column of nulls alone has no type
        cluster=samples["cluster"].where(samples["cluster"].notna(), samples["sample_id"]),
    )
    by_sample = frame.sort_values(["sample_id", "cell"]).groupby("sample_id", sort=True)
    table = by_sample.agg(
        good=("good", "all"), answered=("answered", "all"), value=("value", "mean"), cluster=("cluster", "first")
    )
    values = table["value"].to_numpy(np.float64, na_value=np.nan)
    values = np.where(table["good"].to_numpy(bool), values, np.nan)
    ids = table.index.to_numpy(object)
    unjudged = int((table["answered"] & ~table["good"]).sum())
    return Scores(ids, table["cluster"].to_numpy(object), values, _parts(frame, ids), unjudged)


def _parts(frame: pd.DataFrame, sample_ids: np.ndarray) -> np.ndarray | None:
    """The parts of the samples [n, k], averaged over seeds, NaN where a row has none; None where no row has any."""
    if "parts" not in frame or frame["parts"].isna().all():
        return None
    known = frame["parts"].notna().to_numpy(bool)
    of_known = np.stack(frame["parts"][known].to_list()).astype(np.float64)
    stacked = np.full((len(frame), of_known.shape[1]), np.nan)
    stacked[known] = of_known
    where = np.searchsorted(sample_ids.astype(str), frame["sample_id"].to_numpy(str))
    sums = np.zeros((len(sample_ids), stacked.shape[1]))
    np.add.at(sums, where, stacked)
    return sums / np.bincount(where, minlength=len(sample_ids))[:, None]


def align(a: Scores, b: Scores, parts: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values of a, values of b, clusters) over the samples that both hold, in ascending id order.

    parts: the samples' parts [m, k] instead of their values, NaN where the sample is not ok or has none.
    """
    _, of_a, of_b = np.intersect1d(a.sample_ids.astype(str), b.sample_ids.astype(str), return_indices=True)
    if not parts:
        return a.values[of_a], b.values[of_b], a.clusters[of_a]
    width = max((scores.parts.shape[1] for scores in (a, b) if scores.parts is not None), default=1)
    ok_only = [
        np.full((scores.n, width), np.nan)
        if scores.parts is None
        else np.where(scores.ok[:, None], scores.parts, np.nan)
        for scores in (a, b)
    ]
    return ok_only[0][of_a], ok_only[1][of_b], a.clusters[of_a]
