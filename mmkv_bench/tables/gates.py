"""The full-cache gate: whether `full` scores what a paper prints for it. Where it does not, the model, its prompts or the
data are set up differently, and differences between methods say less about the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmkv_bench.tables.rows import FIXTURE, config_of


@dataclass(frozen=True)
class FullCacheGate:
    """Score that is expected of `full`. `scale`: printed value = scale x ours; source: where it is printed."""

    expected: float
    tolerance: float
    scale: float
    source: str

    def passes(self, value: float) -> bool:
        """True if the headline `value` is within the tolerance, both in the printed unit (rounding errors aside)."""
        return abs(self.scale * value - self.expected) <= self.tolerance + 1e-9


def gates_of(config: str) -> bool:
    """True if a cell's configuration (JSON) has gates: the model's file has a list, or gate.expected is given."""
    values = config_of(config)
    return (values.get("model") or {}).get("gates") is not None or _asked(values).get("expected") is not None


def find(config: str, dataset: str, metric: str) -> FullCacheGate | None:
    """The gate of a dataset's metric: `gate.expected` of the run, else the entry of the model's file, else None.

    `gate.expected` is one number, so it is of one table: the first headline metric of a run with one dataset. Fixture data
    have no gate.
    """
    if dataset.endswith(FIXTURE):
        return None
    values = config_of(config)
    asked = _asked(values)
    printed = next(
        (
            entry
            for entry in (values.get("model") or {}).get("gates") or []
            if (entry.get("dataset"), entry.get("metric")) == (dataset, metric)
        ),
        None,
    )
    if asked.get("expected") is not None and (dataset, metric) == _of_expected(values):
        tolerance = asked.get("tolerance")
        if tolerance is None:
            tolerance = printed["tolerance"] / printed.get("scale", 1) if printed else 0.01
        return FullCacheGate(float(asked["expected"]), float(tolerance), 1.0, "gate.expected")
    return None if printed is None else _printed(printed, asked)


def find_group(config: str, group: str) -> FullCacheGate | None:
    """The gate of a group of datasets (`MileBench T-1`): the mean that the model's file has for it, else None."""
    values = config_of(config)
    gates = (values.get("model") or {}).get("gates") or []
    printed = next((entry for entry in gates if entry.get("group") == group), None)
    return None if printed is None else _printed(printed, _asked(values))


def _printed(entry: Mapping[str, Any], asked: Mapping[str, Any]) -> FullCacheGate:
    """The paper's, in its unit; a tolerance of the run is in the run's own, whichever number it is of."""
    scale = float(entry.get("scale", 1))
    tolerance = entry["tolerance"] if asked.get("tolerance") is None else scale * asked["tolerance"]
    return FullCacheGate(float(entry["expected"]), float(tolerance), scale, entry["source"])


def verdict(gate: FullCacheGate | None, value: float | None, n: int, transformers: str) -> str:
    """One sentence for a table: passed, failed or not run, and on what.

    Args:
        value: headline of `full`; None when it has none (no `full` in the table, or not every sample is ok).
        n: its samples; transformers: the version it ran under.
    """
    if gate is None:
        return "Full-cache gate not run: no paper prints a full-cache score for this model, dataset and metric."
    goal = f"{gate.expected:g} +- {gate.tolerance:g} ({gate.source})"
    if value is None:
        return f"Full-cache gate not run: full has no score here to compare with {goal}."
    word = "passed" if gate.passes(value) else "failed"
    return f"Full-cache gate {word}: full scores {gate.scale * value:.4g}, expected {goal}; n={n}, transformers {transformers}."


def _of_expected(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """(dataset, metric) that `gate.expected` is of; None where the configuration leaves it open."""
    datasets = values.get("datasets") or {}
    metrics = [metric for node in datasets.values() for metric in (node.get("metrics") or [])[:1]]
    return (*datasets, *metrics) if len(datasets) == len(metrics) == 1 else None


def _asked(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return values.get("gate") or {}
