"""Numbers of `mmkv-bench diagnose` for cells of figures: which measurement stands at an address, and what it says by layer.

A diagnostic is a curve for each sample, layer and perhaps head; `metrics.DIAGNOSTICS` says at which place or over which stretch
of it a layer's number is taken. A cell shows the mean over layers with its interval over samples, and the layers beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.papers import identity
from mmkv_bench.papers.address import FRACTION, STAND_IN, Address, budget_of, canonical
from mmkv_bench.papers.evidence import AMBIGUOUS, FOUND, NONE, Evidence
from mmkv_bench.papers.identity import OF_DIAGNOSTICS
from mmkv_bench.papers.metrics import DIAGNOSTICS, Diagnostic
from mmkv_bench.statistics.shared_draws import intervals
from mmkv_bench.tables.rows import FIXTURE

if TYPE_CHECKING:
    import pandas as pd

_MODEL = ("model_fingerprint", "dtype", "dataset_fingerprint", "versions")
REAL = ("hub", "folder")
"""Weights whose diagnostics are evidence."""


@dataclass(frozen=True)
class Curve:
    """One line of a figure: its label, mean over layers with the interval over samples, and its number in each layer (one
    number where it is of the whole model)."""

    label: str
    value: float
    low: float | None
    high: float | None
    layers: tuple[float, ...]


@dataclass(frozen=True)
class DiagnosticMatch:
    """What diagnostics hold for an address. state: found, none or ambiguous; why: of the last, what differs; other: conditions
    that are not the address's; n: samples; made: the packages and the precision behind them; source: the rows folder and the
    measurement; rows: what its picture is drawn from."""

    state: str
    why: str = ""
    other: tuple[str, ...] = ()
    n: int = 0
    curves: tuple[Curve, ...] = ()
    made: str = ""
    source: str = ""
    rows: pd.DataFrame | None = None


@dataclass(frozen=True)
class DiagnosticEvidence:
    """The diagnostics of all stores that are evidence; `told` has a row per measurement."""

    evidence: Evidence
    rows: pd.DataFrame
    told: pd.DataFrame

    @classmethod
    def of(cls, evidence: Evidence) -> DiagnosticEvidence:
        """Those that are evidence: of real weights and data; for stand-ins those of the embedded model."""
        rows = evidence.diagnostics
        if not len(rows):
            return cls(evidence, rows, rows)
        told = rows.drop_duplicates("measurement").set_index("measurement")
        settings = {text: json.loads(text) for text in set(told["settings"])}
        told = told.assign(settings=told["settings"].map(settings))
        real = told["settings"].map(lambda own: own.get("weights") in REAL)
        real &= told["model"] == STAND_IN if evidence.stand_in else told["model"] != STAND_IN
        told = told[real & ~told["dataset"].str.endswith(FIXTURE)]
        return cls(evidence, rows[rows["measurement"].isin(told.index)], told)

    def read(self, address: Address) -> DiagnosticMatch:
        """What there is at the address of a diagnostic."""
        wanted = DIAGNOSTICS[address.metric]
        if not len(self.told):
            return DiagnosticMatch(NONE)
        told = self.told[[_is_of(row, wanted, address) for row in self.told.to_dict("records")]]
        told, other = _conditions(told, address)
        if not self.evidence.stand_in:
            each = (identity.other(address, _made(row), OF_DIAGNOSTICS) for row in told.to_dict("records"))
            other += tuple(dict.fromkeys(word for words in each for word in words))
        if len(told) > 1:
            return DiagnosticMatch(AMBIGUOUS, _differences(told))
        if not len(told):
            return DiagnosticMatch(NONE)
        rows = self._of[told.index[0]]
        curves = tuple(filter(None, (_curve(rows, wanted, line, address) for line in wanted.lines)))
        if not curves:
            return DiagnosticMatch(NONE)
        versions = json.loads(told["versions"].iloc[0])
        made = ", ".join([*(f"{name} {version}" for name, version in versions.items()), told["dtype"].iloc[0]])
        source = f"{self.evidence.folder(int(rows['store'].iloc[0]))} {told.index[0]}"
        n = int(rows["sample_id"].nunique())
        return DiagnosticMatch(FOUND, other=other, n=n, curves=curves, made=made, source=source, rows=rows)

    @cached_property
    def _of(self) -> Mapping[str, pd.DataFrame]:
        return dict(iter(self.rows.groupby("measurement", sort=False)))


def _is_of(row: Mapping[str, Any], wanted: Diagnostic, address: Address) -> bool:
    """Whether a measurement is of the analysis, the model and data of an address, and of its method where it has one."""
    if (row["name"], row["model"], row["dataset"]) != (wanted.name, address.model, address.dataset):
        return False
    method = row["settings"].get("method")
    if not wanted.of_method or address.method.base == "full":
        return method is None
    if method is None or method["base"] != address.method.base or method["reading"] != address.reading:
        return False
    text = method["budget"]
    number = float(text) if method["budget_kind"] == FRACTION else int(text)
    if (address.budget_kind, address.budget) != budget_of(number, {}):
        return False
    own = canonical(method["base"], json.dumps(method["parameters"], sort_keys=True))
    return own == address.method.parameters(address.reading)


def _conditions(told: pd.DataFrame, address: Address) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Of these measurements those under the address's conditions, else all, with what is other about them."""
    other = []
    for name, asked, had in (
        ("max_new_tokens", address.max_new_tokens, told["settings"].map(lambda own: own.get("tokens"))),
        ("frames", address.frames, told["settings"].map(lambda own: own["processor"].get("frames"))),
    ):
        if asked is None or had.isna().all():  # it plays no part
            continue
        if (had == asked).any():
            told = told[had == asked]
        elif len(told):
            values = ", ".join(f"{value:g}" for value in sorted(set(had.dropna())))
            other.append(f"{name} {values}, the figure has {asked}")
    return told, tuple(other)


def _made(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a measurement says of what it was made with, as `identity.facts` names it."""
    settings = row["settings"]
    stated = {name: settings.get(name) for name in ("weights", "attention")}
    return {**settings["processor"], **stated, "dtype": row["dtype"], "commit": None}


def _differences(told: pd.DataFrame) -> str:
    words = [f"{name} {' | '.join(map(str, told[name].unique()))}" for name in _MODEL if told[name].nunique() > 1]
    keys = {key for own in told["settings"] for key in own}
    for key in sorted(keys):
        values = dict.fromkeys(json.dumps(own.get(key), sort_keys=True) for own in told["settings"])
        words += [f"{key} {' | '.join(values)}"] if len(values) > 1 else []
    return "; ".join(words)


def _curve(rows: pd.DataFrame, wanted: Diagnostic, line: tuple[str, str, str], address: Address) -> Curve | None:
    """One line: heads are averaged within a layer, layers within a sample."""
    label, quantity, part = line
    own = rows[(rows["quantity"] == quantity) & ((rows["part"] == part) | (part == "*"))]
    places = wanted.stretch(address)
    if places is not None:
        own = own[(own["x"] >= places[0] - 1e-9) & (own["x"] <= places[1] + 1e-9)]
    if not len(own):
        return None
    of_head = own.assign(layer=own["layer"].fillna(-1), head=own["head"].fillna(-1))
    sums = of_head.groupby(["sample_id", "layer", "head"])["value"].sum() * wanted.per
    each = sums.groupby(level=["sample_id", "layer"]).mean().unstack("layer")
    values = each.to_numpy(np.float64).mean(axis=1)
    (found,) = intervals([(values, each.index.to_numpy(str))], address.dataset, share=False)
    layers = tuple(float(value) for value in each.to_numpy(np.float64).mean(axis=0))
    return Curve(label, float(values.mean()), found.low, found.high, layers)
