"""Rows -> addresses: which cells of which stores hold what stands at an address. By parameters, never by a display name.

Several stores, of several machines, are one body of evidence; nothing is ever chosen among cells that differ. Rows of random
weights, of the embedded model and of fixture data are no evidence and match no address, whatever their model is called, but that
times and bytes of made-up prompts are what they are whatever the weights; rows of the embedded model alone are what stand-ins
are made of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.config.files import content
from mmkv_bench.config.schema import options
from mmkv_bench.errors import ConfigError
from mmkv_bench.papers.address import STAND_IN, SYNTHETIC, Address, canonical, file_of
from mmkv_bench.tables.notes import FIXTURE
from mmkv_bench.tables.rows import CONTEXT, config_of, with_limits

if TYPE_CHECKING:
    import pandas as pd

TINY = "mmkv_bench/tiny/weights"
FOUND, NONE, AMBIGUOUS = "found", "none", "ambiguous"
_OF_CELL = tuple(name for name in CONTEXT if name not in ("model", "dataset", "protocol"))
"""Columns in which two cells of one address may differ."""
_SHOWN = 48  # characters of what differs
VERSIONS = ("torch", "transformers", "dtype", "attention")


@dataclass(frozen=True)
class Match:
    """What there is at an address.

    Attributes:
        state: found, none or ambiguous; rows: places in the evidence's cells, one for each seed.
        why: of `ambiguous`, what the candidates differ in; other: conditions of the rows that are not the address's, so that
            they are shown and not judged; missing: seeds that were asked for and are not there.
    """

    state: str
    rows: tuple[int, ...] = ()
    why: str = ""
    other: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()


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

    def match(self, wanted: Address) -> Match:
        """What stands at an address."""
        rows = self._groups.get(_key_of(wanted), np.array([], dtype=np.int64))
        rows = self._calibrated(rows, wanted)
        if not len(rows):
            return Match(NONE)
        rows, other = self._conditions(rows, wanted)
        rows = rows[self._version[rows] == self._version[rows].max()]
        contexts = np.unique(self._context[rows])
        if len(contexts) > 1:
            return Match(AMBIGUOUS, tuple(rows.tolist()), self._differences(rows))
        twice = self.cells["cell"].to_numpy()[rows]
        _, first = np.unique(twice, return_index=True)
        rows = rows[np.sort(first)]
        seeds = self.cells["seed"].to_numpy(np.float64, na_value=np.nan)[rows]
        if not np.isnan(seeds).all():
            rows, seeds = rows[np.isin(seeds, wanted.seeds)], seeds[np.isin(seeds, wanted.seeds)]
        if not len(rows):
            return Match(NONE)
        if len(np.unique(seeds)) < len(rows):  # as of two artefacts, both the model's own: no mean of them is a seed's
            return Match(AMBIGUOUS, tuple(rows.tolist()), self._differences(rows))
        missing = () if np.isnan(seeds).all() else tuple(seed for seed in wanted.seeds if seed not in seeds)
        return Match(FOUND, tuple(rows.tolist()), other=other, missing=missing)

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

    def _conditions(self, rows: np.ndarray, wanted: Address) -> tuple[np.ndarray, tuple[str, ...]]:
        """Of these rows, those under the conditions of the address, else all, with what is other about them."""
        other = []
        own = {name: default(wanted.dataset, name) for name in ("max_new_tokens", "cut_prompt")}
        for name, asked, had in (
            ("max_new_tokens", wanted.max_new_tokens, self._lengths),
            ("cut_prompt", wanted.cut_prompt, self._cuts),
            ("frames", wanted.frames, self._frames),
        ):
            value = own.get(name) if asked is None else asked
            fits = had[rows] == value
            values = ", ".join(sorted({str(one) for one in had[rows] if one is not None}))
            if fits.any():
                rows = rows[fits]
            elif asked is not None or (values and name in own):
                other.append(f"{name} {values or 'the default'}, the table has {'none' if value is None else value}")
        return rows, tuple(other)

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
        budget = told["budget_fraction"].astype(object).where(told["budget_kind"] == "fraction", told["budget_entries"])
        texts = ["" if value is None or value != value else _budget(value) for value in budget.astype(object)]
        reading = told["reading"].astype(object).where(told["reading"].notna(), "")
        keys = told["model"].astype(str)
        for part in (told["dataset"], told["base"], [known[pair] for pair in pairs], reading, told["protocol"]):
            keys = keys + "|" + np.asarray(part, dtype=object).astype(str)
        keys = keys + "|" + told["budget_kind"].astype(str) + "|" + np.asarray(texts, dtype=object).astype(str)
        return {str(key): np.asarray(rows) for key, rows in keys.groupby(keys).indices.items()}

    @cached_property
    def _context(self) -> np.ndarray:
        """Number of what a cell shares with others of its address, int [cells]."""
        found = self.cells[list(_OF_CELL)].astype(str)
        return found.groupby(list(_OF_CELL), sort=False).ngroup().to_numpy()

    @cached_property
    def _version(self) -> np.ndarray:
        if "method_version" not in self.cells:
            return np.ones(len(self.cells))
        return self.cells["method_version"].astype("float64").fillna(1).to_numpy()

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self._of_json("generation", lambda told: told.get("max_new_tokens"))

    @cached_property
    def _cuts(self) -> np.ndarray:
        return self._of_json("generation", lambda told: told.get("cut_prompt"))

    @cached_property
    def _frames(self) -> np.ndarray:
        return self._of_json("config", lambda told: (told.get("model") or {}).get("frames"))

    def _of_json(self, column: str, read: Callable[[Mapping[str, Any]], Any]) -> np.ndarray:
        """What `read` finds in a column's JSON, None for nothing, object [cells]."""
        known = {text: read(config_of(text)) for text in set(self.cells[column])}
        found = np.empty(len(self.cells), dtype=object)
        found[:] = [known[text] for text in self.cells[column]]
        return found


@cache
def default(dataset: str, name: str) -> Any:
    """A generation setting of a data set's file; None where it has none."""
    if file_of(dataset) not in options("dataset"):
        return None
    return (content("dataset", file_of(dataset)).get("generation") or {}).get(name)


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
