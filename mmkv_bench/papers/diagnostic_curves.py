"""Numbers of the papers' figures from `mmkv-bench diagnose`: one per layer, and the mean over layers.

A diagnostic has a curve for each sample, layer and sometimes head. `non_score_metrics.DIAGNOSTICS` says which values of the curve
are added up to a layer's number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv_bench.papers.address import FRACTION, STAND_IN, Address, budget_of, canonical
from mmkv_bench.papers.evidence import OF_DIAGNOSTICS, Evidence, contradictions
from mmkv_bench.papers.measurement import Curve, Measurement, State
from mmkv_bench.papers.non_score_metrics import DIAGNOSTICS, Diagnostic
from mmkv_bench.statistics.intervals import intervals
from mmkv_bench.tables.stored_rows import FIXTURE

if TYPE_CHECKING:
    import pandas as pd

REAL = ("hub", "folder")
"""Sources of weights whose diagnostics are evidence."""
_MODEL = ("model_fingerprint", "dtype", "dataset_fingerprint", "versions")
_EPSILON = 1e-9  # values x of a curve that are closer than this are equal


@dataclass(frozen=True)
class DiagnosticEvidence:
    """Stored diagnostics that may be compared with papers. measurements: one row per measurement, with parsed `settings`."""

    evidence: Evidence
    measurements: pd.DataFrame

    @classmethod
    def of(cls, evidence: Evidence) -> DiagnosticEvidence:
        """Select the diagnostics of real weights and data, or of the embedded model if the evidence is for stand-ins."""
        if not len(evidence.diagnostics):
            return cls(evidence, evidence.diagnostics)
        table = evidence.diagnostics.drop_duplicates("measurement").set_index("measurement")
        table = table.assign(settings=table["settings"].map({text: json.loads(text) for text in {*table["settings"]}}))
        has_pretrained_weights = table["settings"].map(lambda settings: settings.get("weights") in REAL)
        has_pretrained_weights &= table["model"] == STAND_IN if evidence.stand_in else table["model"] != STAND_IN
        return cls(evidence, table[has_pretrained_weights & ~table["dataset"].str.endswith(FIXTURE)])

    def measure(self, address: Address, whole: int) -> Measurement:
        """Return the diagnostic at `address`. Its `value` is the mean over layers of the first line of `curves`.

        whole: number of samples of the data set, 0: unknown. With fewer samples than `address.samples`, or than `whole` if
            that is None, the state is `part`.
        """
        diagnostic, table = DIAGNOSTICS[address.metric], self.measurements
        if not len(table):
            return Measurement(State.NOT_RUN)
        table = table[[_matches(row, diagnostic, address) for row in table.to_dict("records")]]
        table, mismatches = _select_conditions(table, address)
        if not self.evidence.stand_in:
            for settings, dtype in zip(table["settings"], table["dtype"], strict=True):
                facts = {name: settings.get(name) for name in ("weights", "attention")}
                facts |= {**settings["processor"], "dtype": dtype, "commit": None}
                mismatches += contradictions(address, facts, OF_DIAGNOSTICS)
        if len(table) > 1:
            return Measurement(State.AMBIGUOUS, _differences(table))
        rows = self._rows[table.index[0]] if len(table) else self.evidence.diagnostics.iloc[:0]
        curves = tuple(filter(None, (_curve(rows, diagnostic, line, address) for line in diagnostic.lines)))
        if not len(rows) or not curves:
            return Measurement(State.NOT_RUN)
        versions = json.loads(table["versions"].iloc[0])
        made_with = ", ".join([*(f"{name} {version}" for name, version in versions.items()), table["dtype"].iloc[0]])
        source = f"{self.evidence.folder(int(rows['store'].iloc[0]))} {table.index[0]}"
        n, intended_samples, first = int(rows["sample_id"].nunique()), address.samples or whole, curves[0]
        state, why = (
            (State.PART, f"{n:,} of {intended_samples:,}")
            if intended_samples and n < intended_samples
            else (State.MEASURED, "")
        )
        measurement = Measurement(
            state, why, first.value, first.low, first.high, n, intended_samples, tuple(dict.fromkeys(mismatches))
        )
        return replace(measurement, curves=curves, made=made_with, source=source, drawn=rows)

    @cached_property
    def _rows(self) -> Mapping[str, pd.DataFrame]:
        rows = self.evidence.diagnostics
        rows = rows[rows["measurement"].isin(self.measurements.index)]
        return dict(iter(rows.groupby("measurement", sort=False)))


def _matches(row: Mapping[str, Any], diagnostic: Diagnostic, address: Address) -> bool:
    """Return True if a row of `measurements` has the analysis, model, data and method of `address`."""
    if (row["name"], row["model"], row["dataset"]) != (diagnostic.name, address.model, address.dataset):
        return False
    method = row["settings"].get("method")
    if not diagnostic.of_method or address.method.base == "full":
        return method is None
    if method is None or method["base"] != address.method.base or method["reading"] != address.reading:
        return False
    budget_text = method["budget"]
    number = float(budget_text) if method["budget_kind"] == FRACTION else int(budget_text)
    if (address.budget_kind, address.budget) != budget_of(number, {}):
        return False
    parameters = canonical(method["base"], json.dumps(method["parameters"], sort_keys=True))
    return parameters == address.method.parameters(address.reading)


def _select_conditions(table: pd.DataFrame, address: Address) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return (rows of `table` with the answer length and number of frames of `address`, mismatches).

    If no row has a required value, all rows are returned, with a text on the mismatch.
    """
    mismatches = []
    for name, wanted, values in (
        ("max_new_tokens", address.max_new_tokens, table["settings"].map(lambda settings: settings.get("tokens"))),
        ("frames", address.frames, table["settings"].map(lambda settings: settings["processor"].get("frames"))),
    ):
        if wanted is None or values.isna().all():  # the condition does not apply
            continue
        if (values == wanted).any():
            table = table[values == wanted]
        elif len(table):
            other_values = ", ".join(f"{value:g}" for value in sorted(set(values.dropna())))
            mismatches.append(f"{name} {other_values}, the figure has {wanted}")
    return table, tuple(mismatches)


def _differences(table: pd.DataFrame) -> str:
    difference_texts = [
        f"{name} {' | '.join(map(str, table[name].unique()))}" for name in _MODEL if table[name].nunique() > 1
    ]
    for key in sorted({key for settings in table["settings"] for key in settings}):
        values = dict.fromkeys(json.dumps(settings.get(key), sort_keys=True) for settings in table["settings"])
        difference_texts += [f"{key} {' | '.join(values)}"] if len(values) > 1 else []
    return "; ".join(difference_texts)


def _curve(rows: pd.DataFrame, diagnostic: Diagnostic, line: tuple[str, str, str], address: Address) -> Curve | None:
    """Return a line of a figure, averaged over heads; None if the rows have no such values. line: of `Diagnostic.lines`."""
    label, quantity, part = line
    points = rows[(rows["quantity"] == quantity) & ((rows["part"] == part) | (part == "*"))]
    stretch = diagnostic.stretch(address)
    if stretch is not None:
        points = points[(points["x"] >= stretch[0] - _EPSILON) & (points["x"] <= stretch[1] + _EPSILON)]
    if not len(points):
        return None
    by_head = points.assign(layer=points["layer"].fillna(-1), head=points["head"].fillna(-1))
    sums = by_head.groupby(["sample_id", "layer", "head"])["value"].sum() * diagnostic.per
    samples = sums.groupby(level=["sample_id", "layer"]).mean().unstack("layer")
    values_by_layer = samples.to_numpy(np.float64)
    values = values_by_layer.mean(axis=1)
    (interval,) = intervals([(values, samples.index.to_numpy(str))], address.dataset, share=False)
    return Curve(label, float(values.mean()), interval.low, interval.high, tuple(values_by_layer.mean(axis=0).tolist()))
