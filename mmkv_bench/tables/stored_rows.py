"""The rows from which tables are made, read from a store and checked.

A "cell" is a stored setting: one model, dataset, method, budget, protocol and seed, named by a hash. `store/schema.py` describes
the columns. Text columns may be categorical to save memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mmkv_bench.errors import ConfigError, StoreError, nearest
from mmkv_bench.statistics.metric_kinds import FIDELITY
from mmkv_bench.store.rows import processor
from mmkv_bench.store.store import Store
from mmkv_bench.store.store_notes import PrimaryEndpoint, primary_of
from mmkv_bench.tables import audit
from mmkv_bench.tables.score_consistency import drop_stale_scores

if TYPE_CHECKING:
    import pandas as pd

BASELINE = "full"
FIXTURE = "_fixture"  # suffix of the labels of fixture datasets

# Two cells are compared, or printed in one table, only if all of these are equal.
CONTEXT = (
    *("model", "model_fingerprint", "dataset", "dataset_fingerprint", "protocol", "dtype", "attention", "limits"),
    *("generation", "numerics_version", "torch", "transformers", "device", "processor", "lmms_eval"),
)
LIMITS = ("min_pixels", "max_pixels", "video_max_pixels", "frames", "max_prompt_tokens")
"""Settings of `model` that change the model's input. The context's `limits` are those that are not null."""

NO_ROWS = "'{}' has no result rows; give the folder that a run printed as its rows."
AT_ONCE = 1 << 18
"""Most answers that are read at once for the audit. In a store with more answers, some cells are read at a time."""

SAMPLE_COLUMNS = ("cell", "sample_id", "cluster", "metric", "value", "status", "parts")
_STATUS_COLUMNS = ("cell", "sample_id", "status")
RESPONSE_COLUMNS = (*_STATUS_COLUMNS, "fallback", "finish_reason", *audit.COLUMNS)


@dataclass
class Rows:
    """The rows of one store as frames. `responses` and `metrics` may be empty; tables then lack the notes made from them.

    responses: columns `RESPONSE_COLUMNS`.
    full: answers of the full cache, columns `audit.FREE_COLUMNS`; None if they were not read.
    held: names of all metrics in the store; None if `samples` has all of them.
    primary: primary endpoint that was declared for the store.
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
        """Names of all metrics in the store."""
        return list(self.samples["metric"].drop_duplicates()) if self.held is None else self.held


class ReadOnce:
    """Reader of a store's rows. Each table is read once, when it is first used.

    In a `large` store, `responses` lacks the columns for audits; `AnswerBlocks` reads these.

    Args:
        cells: hashes of the cells whose rows are read; None: all cells.
        further: columns of `responses` to read in addition.
        fidelity: metrics of fidelity to read in addition to all other metrics; None: all.
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
        """Return a reader that skips, in a large store, the fidelity metrics outside `metrics`. They are most of the scores."""
        fidelity_metrics = set(FIDELITY).intersection(metrics)
        return ReadOnce(self.store, self.names, self._further, fidelity_metrics) if self.large else self

    @cached_property
    def large(self) -> bool:
        """True if the store has more answers than are read at once."""
        return self.store.rows_in_files("responses") > AT_ONCE

    @cached_property
    def responses(self) -> pa.Table:
        columns = _STATUS_COLUMNS if self.large else (*RESPONSE_COLUMNS, audit.CHOSEN)
        return self.store.responses(self.names, list(dict.fromkeys([*columns, *self._further])), coded=True)

    @cached_property
    def held(self) -> list[str] | None:
        """Names of all metrics of the cells; None if `samples` contains all of them."""
        if self._fidelity is None:
            return None
        return sorted(self.store.samples(self.names, ["metric"], coded=True)["metric"].unique().to_pylist())

    @cached_property
    def samples(self) -> pa.Table:
        metric_names = [name for name in self.held or () if name not in FIDELITY or name in (self._fidelity or ())]
        return self.store.samples(self.names, SAMPLE_COLUMNS, coded=True, metrics=metric_names or None)

    @cached_property
    def metrics(self) -> pa.Table:
        return self.store.metrics(self.names)

    @cached_property
    def cells(self) -> pd.DataFrame:
        return cells_of(self.store, self.names)


class AnswerBlocks:
    """Iterable over frames with the answers of some cells each. Each iteration reads the answers anew.

    cells: hashes, in the order in which the cells are read.
    """

    def __init__(self, rows: ReadOnce, cells: Sequence[str]) -> None:
        self._rows, self._cells = rows, cells

    def __len__(self) -> int:
        """Return the number of answers (not of frames)."""
        return self._rows.responses.num_rows

    def __iter__(self) -> Iterator[pd.DataFrame]:
        from mmkv_bench.store.packing import blocks

        store = self._rows.store
        for names in blocks(self._cells, store.counts("responses"), AT_ONCE):
            yield _answers(store, store.responses(names, (*RESPONSE_COLUMNS, audit.CHOSEN), coded=True))


def _answers(store: Store, rows: pa.Table) -> pd.DataFrame:
    """Return `responses` rows as a frame, with the column `chosen` only if `audit.mask_chosen_apart` masks any.

    rows: all answers of some cells.
    """
    is_apart = audit.mask_chosen_apart(store, rows)
    answers = frame(rows.select(RESPONSE_COLUMNS))
    if is_apart is not None:
        answers[audit.CHOSEN] = is_apart
    return answers


def load(root: Path | str, cells: Collection[str] | None = None, fidelity: Collection[str] | None = None) -> Rows:
    """Return the rows of the store at `root`.

    Args:
        cells: hashes of the cells to read; None: all.
        fidelity: metrics of fidelity to read in addition to all other metrics; None: all.

    Raises:
        ConfigError: there is no such folder, or it has no rows or no scores.
    """
    return frames(ReadOnce(open_store(root), cells, fidelity=fidelity))


def open_store(root: Path | str) -> Store:
    """Return the store in a rows folder. Raises ConfigError if the folder does not exist."""
    if not Path(root).is_dir():
        raise ConfigError(f"There is no rows folder at '{root}'; give the folder that a run printed as its rows.")
    return Store(Path(root))


def frames(rows: ReadOnce) -> Rows:
    """Return the tables of `rows` as frames.

    Raises:
        ConfigError: the store has no rows or no scores.
        StoreError: rows contradict each other.
    """
    from mmkv_bench.store.packing import ALIKE

    root = rows.store.root
    samples, described = frame(drop_stale_scores(rows.store, rows.samples, rows.metrics)), rows.cells
    if rows.large:  # in the order of the files
        responses = AnswerBlocks(rows, list(described.sort_values([*ALIKE])["cell"]))
    else:
        responses = _answers(rows.store, rows.responses)
    of_full = set(described["cell"][described["base"] == BASELINE])
    full = rows.store.responses(of_full, audit.FREE_COLUMNS).to_pandas()
    pa.default_memory_pool().release_unused()  # memory that reading took and the frames do not use
    if samples.empty and not len(responses):
        raise ConfigError(NO_ROWS.format(root))
    if samples.empty:
        raise ConfigError(
            f"'{root}' has {len(responses)} answers but no scores: run the same command again with stage=score."
        )
    return Rows(described, samples, responses, rows.metrics.to_pandas(), full, rows.held, primary_of(root))


def cells_of(store: Store, names: Collection[str] | None = None) -> pd.DataFrame:
    """Return the store's table `cells` as a frame. Cells of one run share one (long) string `config` in memory.

    names: hashes of the cells to return; None: all.
    """
    table = store.cells(names, coded=True)
    for number, field in enumerate(table.schema):
        if field.name != "config" and pa.types.is_dictionary(field.type):
            table = table.set_column(number, field.name, table[field.name].cast(pa.string()))
    described = table.to_pandas()
    return described.assign(config=described["config"].astype(object))


def frame(table: pa.Table) -> pd.DataFrame:
    """Convert an arrow table to a frame. Texts become categories and lists stay in arrow, to save memory."""
    import pandas as pd

    def kept(kind: pa.DataType) -> pd.ArrowDtype | None:
        return pd.ArrowDtype(kind) if pa.types.is_list(kind) else None

    for number, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_dictionary(field.type):
            coded = table[field.name].dictionary_encode().unify_dictionaries()
            table = table.set_column(number, field.name, coded)
    return table.to_pandas(types_mapper=kept, split_blocks=True, self_destruct=True)


def check(cells: pd.DataFrame, samples: pd.DataFrame) -> None:
    """Raise StoreError if a cell has two rows in `cells`, or if a cell in `samples` has none."""
    for cell in cells["cell"][cells["cell"].duplicated()]:
        raise StoreError(f"Cell {cell} has more than one row in `cells`: the store is damaged; restore it from a copy.")
    for cell in sorted(set(samples["cell"].unique()) - set(cells["cell"])):
        raise StoreError(f"Cell {cell} has scores but no row in `cells`; run the same command again to write the row.")


def choose(column: pd.Series, wanted: Sequence[str] | None, what: str) -> pd.Series:
    """Mask the rows of `column` whose value is in `wanted`; None selects all rows.

    what: kind of the values for the message, such as `dataset`.

    Raises:
        ConfigError: a value of `wanted` is in no row.
    """
    if not wanted:
        return column.notna() | column.isna()
    check_names(what, wanted, {str(value) for value in column.dropna().unique()})
    return column.isin(list(wanted))


def check_names(what: str, names: Iterable[str], present: Collection[str]) -> None:
    """Raise ConfigError for the first of `names` that is not in `present`. what: kind of the names, such as `method`."""
    for name in names:
        if name not in present:
            raise ConfigError(f"The rows have no {what} '{name}': {nearest(name, present)}.")


def choose_cells(
    cells: pd.DataFrame,
    datasets: Sequence[str] | None,
    protocols: Sequence[str] | None,
    readings: Sequence[str] | None,
) -> pd.Series:
    """Mask the cells with the given datasets, protocols and readings (`paper` or `released` rules of a method); None: all.

    `readings` never excludes a cell without a reading, such as one of `full`.
    """
    keep = choose(cells["dataset"], datasets, "dataset") & choose(cells["protocol"], protocols, "protocol")
    return keep & (choose(cells["reading"], readings, "reading") | cells["reading"].isna())


def missing(value: object) -> bool:
    """Return True if a scalar is None, NaN or NA."""
    import pandas as pd

    return bool(pd.isna(value))


def with_limits(cells: pd.DataFrame) -> pd.DataFrame:
    """Return `cells` with four text columns by which tables are grouped.

    limits: settings that change the model's input, such as `frames=32 max_pixels=100352`.
    device, processor, lmms_eval: device, kind of CPU (if answers depend on it) and lmms-eval's version; "" if not recorded.
    """
    empty = [""] * len(cells)
    device, cpu, versions = (list(cells.get(name, empty)) for name in ("device", "cpu", "versions"))
    versions_of = {
        text: "" if missing(text) or not text else json.loads(text).get("lmms_eval") for text in set(versions)
    }
    kinds = zip(device, cpu, cells["dtype"], strict=True)
    keys = list(zip(cells["config"], cells["dataset"], strict=True))
    limits = {key: _limits(config_of(key[0]), key[1]) for key in set(keys)}  # the cells of a run have one configuration
    return cells.assign(
        limits=[limits[key] for key in keys],
        device=["" if missing(name) else name for name in device],
        processor=[processor(name, None if missing(kind) else kind, dtype) for name, kind, dtype in kinds],
        lmms_eval=[versions_of[text] or "" for text in versions],
    )


@lru_cache(maxsize=256)
def config_of(text: str) -> Mapping[str, Any]:
    """Parse a cell's configuration (JSON). Callers with an equal text get the same object, which they must not change."""
    return json.loads(text)


def dataset_node(config: Mapping[str, Any], dataset: str) -> Mapping[str, Any]:
    """Return the settings of `dataset` in a parsed configuration; empty without any."""
    return (config.get("datasets") or {}).get(dataset) or {}


def _limits(config: Mapping[str, Any], dataset: str) -> str:
    model, node = config.get("model") or {}, dataset_node(config, dataset)
    limits = {key: model[key] for key in LIMITS if model.get(key) is not None}
    if node.get("placeholders") not in (None, "keep"):
        limits["placeholders"] = node["placeholders"]
    return " ".join(f"{key}={value}" for key, value in limits.items())


_LINE_COLUMNS = ("method", "base", "reading", "parameters", "budget_kind", "budget_entries", "budget_fraction", "seed")


def latest(cells: pd.DataFrame) -> pd.Series:
    """Mask the cells with the newest version of the method's code among cells that are otherwise alike.

    cells: frame with the columns that `with_limits` adds.
    """
    if "method_version" not in cells:
        return cells["cell"].notna()
    version = cells["method_version"].astype("float64").fillna(1)
    newest = version.groupby([cells[name] for name in (*CONTEXT, *_LINE_COLUMNS)], dropna=False).transform("max")
    return version == newest


def context_key(row: Mapping[str, Any] | pd.Series, columns: Sequence[str] = CONTEXT) -> tuple[str, ...]:
    """Return a cell's values of `columns` as texts, "" for null. Cells may be compared only if their keys are equal."""
    return tuple("" if missing(row[column]) else str(row[column]) for column in columns)
