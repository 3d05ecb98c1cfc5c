"""Rows -> addresses: which cells of which stores hold what stands at an address. By parameters, never by a display name.

Several stores, of several machines, are one body of evidence. Where an address was run several times, a run as the address says
counts before any other, then a fuller one before a shorter one, then a newer one before an older one; scores never choose.
Rows of random weights, of the embedded model and of fixture data are no evidence and match no address, whatever their model is
called, but that times and bytes of made-up prompts are what they are whatever the weights; rows of the embedded model alone are
what stand-ins are made of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmkv_bench.errors import ConfigError
from mmkv_bench.papers import identity
from mmkv_bench.papers.address import STAND_IN, SYNTHETIC, Address, canonical, file_of, samples_of
from mmkv_bench.tables.rows import CONTEXT, FIXTURE, config_of, missing, with_limits

if TYPE_CHECKING:
    import pandas as pd

TINY = "mmkv_bench/tiny/weights"
FOUND, NONE, AMBIGUOUS = "found", "none", "ambiguous"
_OF_CELL = (
    *(name for name in CONTEXT if name not in ("model", "dataset", "protocol")),
    *("method_version", "model_revision", "weights", "git_dirty", "device"),
)
"""Columns in which two cells of one address may differ."""
_SHOWN = 48  # characters of what differs
VERSIONS = ("torch", "transformers", "dtype", "attention")
_LIBRARIES = ("torch", "transformers")
Shared = tuple[tuple[str, str], ...]
"""Names and values of what two numbers that are compared must share."""


class RunFacts(NamedTuple):
    """What rows of one run of an address have in common."""

    other: tuple[str, ...]
    shared: Shared
    version: int
    libraries: tuple[str, ...]


@dataclass(frozen=True)
class Match:
    """What there is at an address.

    Attributes:
        state: found, none or ambiguous; rows: places in the evidence's cells, one for each seed.
        why: of `ambiguous`, what the candidates differ in, of `none`, which rows are none of the address's; missing: seeds
            that were asked for and are not there.
        other: what is other about the rows than the address says, so that they are shown and not judged; unstated: what they
            were made with and nothing states; shared: what a number that is compared with theirs must share; passed: what
            runs of the address that were passed over differ in.
    """

    state: str
    rows: tuple[int, ...] = ()
    why: str = ""
    other: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()
    unstated: tuple[str, ...] = ()
    shared: Shared = ()
    passed: str = ""


@dataclass(frozen=True)
class Evidence:
    """The cells of all stores. `cells` has the columns of that table and `store` (number of its folder in `roots`); stand_in:
    they are those of the embedded model alone."""

    roots: tuple[Path, ...]
    cells: pd.DataFrame
    refused: int = 0
    stand_in: bool = False

    @classmethod
    def of(cls, roots: Sequence[Path], stand_in: bool = False) -> Evidence:
        """The cells below these folders: each is a store, or holds some.

        Args:
            stand_in: the cells of the embedded model and no others, in the place of all that are not.

        Raises:
            ConfigError: a folder that is not there. StoreError: a store of another schema version, with its name.
        """
        import pandas as pd

        from mmkv_bench.store.store import Store

        stores = [store for root in roots for store in _stores(root)]
        frames = [Store(store).cells().to_pandas().assign(store=number) for number, store in enumerate(stores)]
        frames = [frame for frame in frames if len(frame)]
        if not frames:
            return cls(tuple(stores), pd.DataFrame(), stand_in=stand_in)
        every = with_limits(pd.concat(frames, ignore_index=True))
        kept = every["model"] == STAND_IN if stand_in else ~_stand_in(every)
        return cls(tuple(stores), every[kept].reset_index(drop=True), int((~kept).sum()), stand_in)

    @cached_property
    def diagnostics(self) -> pd.DataFrame:
        """The rows of `mmkv-bench diagnose` of all stores, and `store`, the number of theirs; what several hold counts once."""
        import pandas as pd

        from mmkv_bench.store.store import Store

        frames = [
            Store(store).diagnostics(coded=True).to_pandas().assign(store=number)
            for number, store in enumerate(self.roots)
        ]
        frames = [frame for frame in frames if len(frame)]
        if not frames:
            return pd.DataFrame()
        texts = [name for name in frames[0] if isinstance(frames[0][name].dtype, pd.CategoricalDtype)]
        whole = pd.concat([frame.astype(dict.fromkeys(texts, "object")) for frame in frames], ignore_index=True)
        return whole.drop_duplicates(["measurement", "sample_id", "layer", "head", "quantity", "part", "x"])

    def match(self, wanted: Address, like: Shared | None = None) -> Match:
        """What stands at an address; like: of rows that share this alone."""
        rows = self.candidates(wanted)
        if not len(rows):
            return Match(NONE)
        seeds = self._seeds[rows]
        asked = np.isnan(seeds) | np.isin(seeds, wanted.seeds)
        if not asked.any():
            had, of = (", ".join(f"{seed:g}" for seed in sorted({*values})) for values in (seeds, wanted.seeds))
            return Match(NONE, why=f"there are rows of seed {had}, the table has {of}")
        runs = self._runs(rows[asked], wanted)
        if like is not None:
            runs = {key: run for key, run in runs.items() if key.shared == like}
        if not runs:
            return Match(NONE)
        best = max(runs, key=lambda key: self._rank(key, runs[key], wanted)) if len(runs) > 1 else next(iter(runs))
        _, first = np.unique(self.cells["cell"].to_numpy()[runs[best]], return_index=True)
        rows = runs[best][np.sort(first)]
        seeds = self._seeds[rows]
        if len(np.unique(seeds)) < len(rows):  # as of two artefacts, both the model's own: no mean of them is a seed's
            return Match(AMBIGUOUS, tuple(rows.tolist()), self._differences(rows))
        missing = () if np.isnan(seeds).all() else tuple(seed for seed in wanted.seeds if seed not in seeds)
        passed = self._differences(np.concatenate([*runs.values()])) if len(runs) > 1 else ""
        unstated = () if self.stand_in else identity.unstated(wanted, self._facts(rows[0]))
        return Match(FOUND, tuple(rows.tolist()), "", best.other, missing, unstated, best.shared, passed)

    def candidates(self, wanted: Address) -> np.ndarray:
        """Every row of an address, whatever it was made with, int [n]."""
        return self._calibrated(self._groups.get(_key_of(wanted), np.array([], dtype=np.int64)), wanted)

    def _runs(self, rows: np.ndarray, wanted: Address) -> dict[RunFacts, np.ndarray]:
        """The runs that these rows belong to: each was made with one thing, by one version of every library."""
        runs: dict[RunFacts, list[int]] = {}
        for row in rows.tolist():
            had = self._facts(row)
            versions = tuple(str(self._records[row][name]) for name in _LIBRARIES)
            only = identity.CONDITIONS if self.stand_in else None
            key = RunFacts(identity.other(wanted, had, only), identity.shared(had), had["method version"], versions)
            runs.setdefault(key, []).append(row)
        return {key: np.array(run) for key, run in runs.items()}

    def _rank(self, key: RunFacts, rows: np.ndarray, wanted: Address) -> tuple[object, ...]:
        """Of several runs of an address the greatest counts."""
        of = samples_of(file_of(wanted.dataset)) or np.inf if wanted.dataset not in SYNTHETIC else 0
        answers: dict[str, float] = {}
        for row in rows.tolist():
            name, store = self._records[row]["cell"], self._records[row]["store"]
            answers[name] = max(answers.get(name, 0), min(self._answers(store).get(name, 0), of))
        return (
            -len(key.other),
            key.version,
            sum(answers.values()),
            max(self._records[row]["created_at"] for row in rows.tolist()),
        )

    def _facts(self, row: int) -> Mapping[str, Any]:
        if row not in self._known:
            self._known[row] = identity.facts(self._records[row])
        return self._known[row]

    def copies(self, row: int) -> list[int]:
        """The other places of a cell: it may lie in several stores."""
        names = self.cells["cell"].to_numpy()
        return [int(place) for place in np.flatnonzero(names == names[row]) if place != row]

    def source(self, row: int) -> str:
        """Its rows folder, from here where it lies below, and its hash: what `mmkv-bench show` takes."""
        return f"{self.folder(int(self.cells['store'].iloc[row]))} {self.cells['cell'].iloc[row]}"

    def folder(self, store: int) -> Path:
        """The rows folder of a store, from here where it lies below."""
        root = self.roots[store].resolve()
        return root.relative_to(Path.cwd()) if root.is_relative_to(Path.cwd()) else root

    def told(self, rows: Sequence[int]) -> dict[str, tuple[str, ...]]:
        """Versions behind these cells: column -> its values."""
        found = self.cells.iloc[list(rows)] if len(rows) else self.cells.iloc[:0]
        return {name: tuple(sorted({str(value) for value in found[name]})) for name in VERSIONS if name in found}

    def _calibrated(self, rows: np.ndarray, wanted: Address) -> np.ndarray:
        """Of these rows, those whose calibration was made of what the address says: if of nothing, the model's own."""
        asked = wanted.method.calibrated
        return np.array([row for row in rows if self._made_of(row, asked)], dtype=np.int64)

    def _made_of(self, row: int, asked: Mapping[str, Any]) -> bool:
        used = json.loads(self.cells["parameters"].iloc[row]).get("calibration")
        if not isinstance(used, Mapping):
            return not asked
        told = config_of(self.cells["config"].iloc[row])
        if not asked:
            name = self.cells["method"].iloc[row]
            node = (told.get("variants") or {}).get(name) or (told.get("methods") or {}).get(name) or {}
            return node.get("calibration", "auto") in ("auto", None)
        seen = told.get("calibrations") or {}
        artefacts = [seen.get(checksum) or {} for checksum in used.values()]
        return bool(artefacts) and all(
            asked.get("samples") in (None, one.get("samples"))
            and f" of {asked['data']} (" in str(one.get("dataset", ""))
            and asked.get("instruction") == one.get("instruction")
            for one in artefacts
        )

    def _differences(self, rows: np.ndarray) -> str:
        """What cells of one address differ in, and the stores that hold them."""
        found = self.cells.iloc[rows]
        parameters = [json.loads(text) for text in found["parameters"]]
        columns = {name: [str(value) for value in found[name]] for name in _OF_CELL}
        for key in sorted({key for one in parameters for key in one}):
            columns[key] = [json.dumps(one.get(key, "not there"), sort_keys=True) for one in parameters]
        words = [
            f"{name} {' | '.join(value[:_SHOWN] for value in sorted({*values}))}"
            for name, values in columns.items()
            if len({*values}) > 1
        ]
        stores = sorted({int(number) for number in found["store"]})
        return "; ".join([*words, "in " + ", ".join(str(self.roots[number]) for number in stores)])

    @cached_property
    def _groups(self) -> Mapping[str, np.ndarray]:
        """Key of an address -> the rows that have it."""
        if not len(self.cells):
            return {}
        told = self.cells
        pairs = list(zip(told["base"], told["parameters"], strict=True))
        known = {pair: canonical(*pair) for pair in set(pairs)}
        budgets = zip(told["budget_fraction"].astype(object), told["budget_entries"].astype(object), strict=True)
        texts = [" ".join(_budget(value) for value in pair if not missing(value)) for pair in budgets]
        reading = told["reading"].astype(object).where(told["reading"].notna(), "")
        keys = told["model"].astype(str)
        for part in (told["dataset"], told["base"], [known[pair] for pair in pairs], reading, told["protocol"]):
            keys = keys + "|" + np.asarray(part, dtype=object).astype(str)
        keys = keys + "|" + told["budget_kind"].astype(str) + "|" + np.asarray(texts, dtype=object).astype(str)
        return {str(key): np.asarray(rows) for key, rows in keys.groupby(keys).indices.items()}

    @cached_property
    def _records(self) -> list[dict[str, Any]]:
        """The rows of `cells`, null as None."""
        plain = self.cells.astype(object).where(self.cells.notna(), None)
        return plain.to_dict("records")

    @cached_property
    def _known(self) -> dict[int, Mapping[str, Any]]:
        """Facts of the rows that were looked at."""
        return {}

    @cached_property
    def _seeds(self) -> np.ndarray:
        return self.cells["seed"].to_numpy(np.float64, na_value=np.nan)

    def _answers(self, store: int) -> Mapping[str, int]:
        """Cell -> answers of a store, at least as many as count."""
        if store not in self._counted:
            from mmkv_bench.store.store import Store

            self._counted[store] = Store(self.roots[store]).counts("responses")
        return self._counted[store]

    @cached_property
    def _counted(self) -> dict[int, Mapping[str, int]]:
        return {}


def _stores(root: Path) -> list[Path]:
    if not root.is_dir():
        raise ConfigError(
            f"there is no rows folder at '{root}'; name folders that runs printed, or one that holds such"
        )
    found = sorted(mark.parent for mark in root.rglob("store.json"))
    if not found:
        raise ConfigError(f"'{root}' holds no result rows; name folders that runs printed, or one that holds such")
    return found


def _stand_in(cells: pd.DataFrame) -> pd.Series:
    """Mask of the cells that stand in for something: they are evidence of no paper's number."""
    weights = cells["weights"] if "weights" in cells else cells["model"].where(False)
    paths = {text: str((config_of(text).get("model") or {}).get("path") or "") for text in set(cells["config"])}
    own = cells["config"].map({text: TINY in path or path.endswith("tiny/weights") for text, path in paths.items()})
    random = (weights == "random").fillna(False) & ~cells["dataset"].isin(SYNTHETIC)
    return random | (cells["model"] == STAND_IN) | own | cells["dataset"].str.endswith(FIXTURE)


def _key_of(wanted: Address) -> str:
    method = wanted.method
    reading = "" if method.base == "full" else wanted.reading
    parts = (wanted.model, wanted.dataset, method.base, method.parameters(wanted.reading), reading, wanted.protocol)
    return "|".join((*parts, wanted.budget_kind, wanted.budget))


def _budget(value: Any) -> str:
    """As `address.budget_of` writes it."""
    from decimal import Decimal

    return f"{Decimal(value).normalize():f}" if isinstance(value, str) else str(int(value))
