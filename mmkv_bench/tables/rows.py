"""The rows that tables are made from: read from a store, and checked.

Frames are those of `store/schema.py`: `cells` (one row per cell), `samples` (one per cell, sample and metric) and
`responses` (one per cell and sample; only the columns of `RESPONSE_COLUMNS`). Texts may be categories, which is how `load`
reads them: each name once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mmkv_bench.errors import ConfigError, StoreError, nearest
from mmkv_bench.statistics.metric_kinds import FIDELITY
from mmkv_bench.store.rows import processor
from mmkv_bench.store.study import PrimaryEndpoint, primary_of
from mmkv_bench.tables import audit
from mmkv_bench.tables.agreement import agreeing

if TYPE_CHECKING:
    import pandas as pd

    from mmkv_bench.store.store import Store

BASELINE = "full"
FIXTURE = "_fixture"  # how labels of datasets of our own making end

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
    "device",
    "processor",
    "lmms_eval",
)
LIMITS = ("min_pixels", "max_pixels", "video_max_pixels", "frames", "max_prompt_tokens")
"""Settings of `model` that change what a model is shown; the context's `limits` are those that were set."""

NO_ROWS = "'{}' holds no result rows: give the folder that a run printed as its rows."
AT_ONCE = 1 << 18
"""Answers of a store above which those of some cells at a time are read for the audit, and of a cell never a part."""

SAMPLE_COLUMNS = ("cell", "sample_id", "cluster", "metric", "value", "status", "parts")
_FEW = ("cell", "sample_id", "status")
RESPONSE_COLUMNS = (*_FEW, "fallback", "finish_reason", *audit.COLUMNS)


@dataclass
class Rows:
    """The frames of one store. `responses` and `metrics` may be empty; then what they would mark is not marked.

    responses: of a large store they are read anew, some cells after the other, whenever they are gone through (`AnswerBlocks`).
    full: the answers of `full` alone, with `audit.FREE_COLUMNS`; None where nobody has read them.
    held: the metrics that the store has rows of, where `samples` are not those of all; primary: the study's primary endpoint.
    """

    cells: pd.DataFrame
    samples: pd.DataFrame
    responses: pd.DataFrame | AnswerBlocks
    metrics: pd.DataFrame
    full: pd.DataFrame | None = None
    held: Sequence[str] | None = None
    primary: PrimaryEndpoint | None = None

    @property
    def names(self) -> Sequence[str]:
        """The metrics that the store has rows of."""
        return list(self.samples["metric"].drop_duplicates()) if self.held is None else self.held


class ReadOnce:
    """The rows of a store's cells (None: of all), each table read when it is first asked for and never again, but for the
    answers of a `large` store: `responses` are then without what an audit counts, which `blocks` read.

    further: columns of `responses` beside those that tables read. fidelity: the metrics of fidelity whose scores are read
    beside those of all others; None: all of them.
    """

    def __init__(
        self,
        store: Store,
        cells: Collection[str] | None = None,
        further: Sequence[str] = (),
        fidelity: Collection[str] | None = None,
    ) -> None:
        self.store, self.names, self._further, self._fidelity = store, cells, further, fidelity

    def of_metrics(self, metrics: Collection[str]) -> ReadOnce:
        """Rows for tables of these metrics, or of all but those of fidelity: of a large store without the scores of other
        metrics of fidelity, which are most."""
        wanted = set(FIDELITY).intersection(metrics)
        return ReadOnce(self.store, self.names, self._further, wanted) if self.large else self

    @cached_property
    def large(self) -> bool:
        """True if the answers of all cells are more than memory should hold in all columns."""
        return self.store.rows_in_files("responses") > AT_ONCE

    @cached_property
    def responses(self) -> pa.Table:
        columns = _FEW if self.large else (*RESPONSE_COLUMNS, audit.CHOSEN)
        return self.store.responses(self.names, list(dict.fromkeys([*columns, *self._further])), coded=True)

    def blocks(self, cells: Sequence[str]) -> Iterator[pa.Table]:
        """The answers of these cells as `responses` of a small store has them, some cells after the other."""
        from mmkv_bench.store.packing import blocks

        for own in blocks(cells, self.store.counts("responses"), AT_ONCE):
            yield self.store.responses(own, (*RESPONSE_COLUMNS, audit.CHOSEN), coded=True)

    @cached_property
    def held(self) -> list[str] | None:
        """The metrics that there are scores of, where not all scores are read."""
        if self._fidelity is None:
            return None
        return sorted(self.store.samples(self.names, ["metric"], coded=True)["metric"].unique().to_pylist())

    @cached_property
    def samples(self) -> pa.Table:
        wanted = [name for name in self.held or () if name not in FIDELITY or name in (self._fidelity or ())]
        return self.store.samples(self.names, SAMPLE_COLUMNS, coded=True, metrics=wanted or None)

    def full(self, cells: Collection[str]) -> pa.Table:
        """Answers of these cells, which are of `full`."""
        return self.store.responses(cells, audit.FREE_COLUMNS)

    @cached_property
    def metrics(self) -> pa.Table:
        return self.store.metrics(self.names)

    @cached_property
    def cells(self) -> pd.DataFrame:
        return cells_of(self.store, self.names)


class AnswerBlocks:
    """The frames of answers of some cells after the other; each time they are gone through they are read.

    cells: whose, in their order.
    """

    def __init__(self, rows: ReadOnce, cells: Sequence[str]) -> None:
        self._rows, self._cells = rows, cells

    def __len__(self) -> int:
        """Number of answers."""
        return self._rows.responses.num_rows

    def __iter__(self) -> Iterator[pd.DataFrame]:
        for block in self._rows.blocks(self._cells):
            yield _answers(self._rows.store, block)


def _answers(store: Store, rows: pa.Table) -> pd.DataFrame:
    """The frame of answers, of whole cells; `chosen` only where some lie apart."""
    apart = audit.chosen_apart(store, rows)
    answers = frame(rows.select(RESPONSE_COLUMNS))
    if apart is not None:
        answers[audit.CHOSEN] = apart
    return answers


def load(root: Path | str, cells: Collection[str] | None = None, fidelity: Collection[str] | None = None) -> Rows:
    """Rows of the store at `root`: of all its cells, or of those named (a run's own). fidelity: see `ReadOnce`; six of every
    seven scores are of fidelity, and most tables show none.

    Raises ConfigError when there is no such folder, when it holds no rows, or when none of its answers is scored.
    """
    return frames(ReadOnce(open_store(root), cells, fidelity=fidelity))


def open_store(root: Path | str) -> Store:
    """The store in a rows folder. Raises ConfigError when there is no such folder."""
    from mmkv_bench.store.store import Store

    if not Path(root).is_dir():
        raise ConfigError(f"There is no rows folder at '{root}': give the folder that a run printed as its rows.")
    return Store(Path(root))


def frames(rows: ReadOnce) -> Rows:
    """The frames of rows that are read, or are read now; errors as of `load`."""
    from mmkv_bench.store.packing import ALIKE

    root = rows.store.root
    samples, described = frame(agreeing(rows.store, rows.samples, rows.metrics)), rows.cells
    if rows.large:  # read as they lie in files
        responses = AnswerBlocks(rows, list(described.sort_values([*ALIKE])["cell"]))
    else:
        responses = _answers(rows.store, rows.responses)
    full = rows.full(set(described["cell"][described["base"] == BASELINE])).to_pandas()
    pa.default_memory_pool().release_unused()  # what reading took and these frames do not hold
    if samples.empty and not len(responses):
        raise ConfigError(NO_ROWS.format(root))
    if samples.empty:
        raise ConfigError(
            f"'{root}' holds {len(responses)} answers but no scores: run the same command again with stage=score."
        )
    return Rows(described, samples, responses, rows.metrics.to_pandas(), full, rows.held, primary_of(root))


def cells_of(store: Store, names: Collection[str] | None = None) -> pd.DataFrame:
    """The frame of `cells`. Configurations, which are long and the same for all cells of a run, are in memory once each."""
    table = store.cells(names, coded=True)
    for number, field in enumerate(table.schema):
        if field.name != "config" and pa.types.is_dictionary(field.type):
            table = table.set_column(number, field.name, table[field.name].cast(pa.string()))
    described = table.to_pandas()
    return described.assign(config=described["config"].astype(object))


def frame(table: pa.Table) -> pd.DataFrame:
    """Texts as categories and lists as they are in arrow: no Python object for each row."""
    import pandas as pd

    def kept(kind: pa.DataType) -> pd.ArrowDtype | None:
        return pd.ArrowDtype(kind) if pa.types.is_list(kind) else None

    for number, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_dictionary(field.type):
            coded = table[field.name].dictionary_encode().unify_dictionaries()
            table = table.set_column(number, field.name, coded)
    return table.to_pandas(types_mapper=kept, split_blocks=True, self_destruct=True)


def check(cells: pd.DataFrame, samples: pd.DataFrame) -> None:
    """Raises StoreError for scores of unknown cells and cells described twice."""
    twice = cells["cell"][cells["cell"].duplicated()].tolist()
    if twice:
        raise StoreError(f"Cell {twice[0]} is described by more than one row of `cells`: the store is damaged.")
    unknown = sorted(set(samples["cell"].unique()) - set(cells["cell"]))
    if unknown:
        raise StoreError(f"Scores of cell {unknown[0]} have no row in `cells`: run the same command again to write it.")


def choose(column: pd.Series, wanted: Sequence[str] | None, what: str) -> pd.Series:
    """Mask of the rows whose value is among `wanted` (all rows when None); unknown values are a ConfigError."""
    if not wanted:
        return column.notna() | column.isna()
    present = {str(value) for value in column.dropna().unique()}
    for name in wanted:
        if name not in present:
            raise ConfigError(f"The rows hold no {what} '{name}': {nearest(name, present)}.")
    return column.isin(list(wanted))


def choose_cells(
    cells: pd.DataFrame,
    datasets: Sequence[str] | None,
    protocols: Sequence[str] | None,
    readings: Sequence[str] | None,
) -> pd.Series:
    """Mask of the cells that the filters name; cells without a reading, as those of `full`, pass that filter."""
    keep = choose(cells["dataset"], datasets, "dataset") & choose(cells["protocol"], protocols, "protocol")
    return keep & (choose(cells["reading"], readings, "reading") | cells["reading"].isna())


def missing(value: object) -> bool:
    """True for a null scalar of a frame (None, NaN or NA)."""
    import pandas as pd

    return bool(pd.isna(value))


def with_limits(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells with what the context reads from longer columns: `limits`, as `frames=32 max_pixels=100352`, from their
    configuration (where images stand in a prompt is among them); `device`, `processor` (the kind of CPU where answers hang on
    it) and `lmms_eval`'s version, "" where rows do not tell."""
    empty = [""] * len(cells)
    device, cpu, versions = (list(cells.get(name, empty)) for name in ("device", "cpu", "versions"))
    versions_of = {text: {} if missing(text) or not text else json.loads(text) for text in set(versions)}
    kinds = zip(device, cpu, cells["dtype"], strict=True)
    keys = list(zip(cells["config"], cells["dataset"], strict=True))
    limits = {key: _limits(config_of(key[0]), key[1]) for key in set(keys)}  # the cells of a run have one configuration
    return cells.assign(
        limits=[limits[key] for key in keys],
        device=["" if missing(name) else name for name in device],
        processor=[processor(name, None if missing(kind) else kind, dtype) for name, kind, dtype in kinds],
        lmms_eval=[versions_of[text].get("lmms_eval") or "" for text in versions],
    )


@lru_cache(maxsize=256)
def config_of(text: str) -> Mapping[str, Any]:
    """A cell's configuration, read once for all cells that have it: nobody changes it."""
    return json.loads(text)


def _limits(config: Mapping[str, Any], dataset: str) -> str:
    model, node = config.get("model") or {}, (config.get("datasets") or {}).get(dataset) or {}
    limits = {key: model[key] for key in LIMITS if model.get(key) is not None}
    if node.get("placeholders") not in (None, "keep"):
        limits["placeholders"] = node["placeholders"]
    return " ".join(f"{key}={value}" for key, value in limits.items())


_LINE = ("method", "base", "reading", "parameters", "budget_kind", "budget_entries", "budget_fraction", "seed")


def latest(cells: pd.DataFrame) -> pd.Series:
    """Mask of the cells (with the column `limits`) that no later version of the same method stands beside: its numbers
    were mended, and a table shows a method once. Versions are no part of a table's context."""
    if "method_version" not in cells:
        return cells["cell"].notna()
    version = cells["method_version"].astype("float64").fillna(1)
    newest = version.groupby([cells[name] for name in (*CONTEXT, *_LINE)], dropna=False).transform("max")
    return version == newest


def context_key(row: Mapping[str, Any] | pd.Series, columns: Sequence[str] = CONTEXT) -> tuple[str, ...]:
    """Values that a cell shares with every cell that it may be compared with."""
    return tuple("" if missing(row[column]) else str(row[column]) for column in columns)
