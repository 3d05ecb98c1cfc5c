"""The stored settings ("cells") of one context and kind of budget, as lines, budgets and seeds, and the full-cache gate.

The gate compares the full cache's score with the score that a paper prints. If they differ, model, prompts or data are not set up
as the paper's, and measured differences between methods say less about the paper's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import StoreError
from mmkv_bench.tables.score_table import Line, calibration_words, calibrations
from mmkv_bench.tables.stored_rows import BASELINE, CONTEXT, FIXTURE, config_of, context_key, missing

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class FullCacheGate:
    """Score that the full cache should reach, and its tolerance, both in the unit that the paper prints.

    scale: printed value = scale x our value. source: the paper or setting that states the score.
    """

    expected: float
    tolerance: float
    scale: float
    source: str

    def passes(self, value: float) -> bool:
        """Return True if the measured score `value` of `full` is within the tolerance."""
        return abs(self.scale * value - self.expected) <= self.tolerance + 1e-9


def has_expected_score(config: str) -> bool:
    """Return True if a configuration (JSON) has expected full-cache scores: `gates` of the model, or `gate.expected`."""
    values = config_of(config)
    expected_score = (values.get("gate") or {}).get("expected")
    return expected_score is not None or (values.get("model") or {}).get("gates") is not None


def find(config: str, dataset: str, metric: str) -> FullCacheGate | None:
    """Return the score that the full cache should reach on a dataset's metric; None if no score is configured.

    The run's `gate.expected` precedes the `gates` of the model, but applies only to the first metric of a run with one dataset.
    Fixture data have no expected score. config: JSON.
    """
    if dataset.endswith(FIXTURE):
        return None
    values = config_of(config)
    gate_node = values.get("gate") or {}
    printed_gate = _printed(values, dataset=dataset, metric=metric)
    if gate_node.get("expected") is None or (dataset, metric) != _gated_metric(values):
        return printed_gate
    tolerance = gate_node.get("tolerance")
    if tolerance is None:
        tolerance = printed_gate.tolerance / printed_gate.scale if printed_gate else 0.01
    return FullCacheGate(float(gate_node["expected"]), float(tolerance), 1.0, "gate.expected")


def find_group(config: str, group: str) -> FullCacheGate | None:
    """Return the mean score that the full cache should reach on a group of datasets; None if `gates` of the model has none.

    config: JSON. group: benchmark and name, such as `MileBench T-1`.
    """
    return _printed(config_of(config), group=group)


def _printed(values: Mapping[str, Any], **keys: str) -> FullCacheGate | None:
    """Return the first of the model's `gates` whose fields equal `keys`; None without one.

    A tolerance of the run replaces the gate's tolerance.
    """
    gates = (values.get("model") or {}).get("gates") or []
    entry = next((gate for gate in gates if all(gate.get(key) == value for key, value in keys.items())), None)
    if entry is None:
        return None
    scale, tolerance = float(entry.get("scale", 1)), (values.get("gate") or {}).get("tolerance")
    tolerance = float(entry["tolerance"] if tolerance is None else scale * tolerance)
    return FullCacheGate(float(entry["expected"]), tolerance, scale, entry["source"])


def verdict(gate: FullCacheGate | None, value: float | None, n: int, transformers: str) -> str:
    """Return a sentence on whether the full cache reaches its expected score.

    Args:
        value: score of `full`; None if `full` was not run or one of its samples failed.
        n: number of samples behind `value`.
        transformers: version of transformers.
    """
    if gate is None:
        return "Full-cache gate not run: no paper prints a full-cache score for this model, dataset and metric."
    expected_text = f"{gate.expected:g} +- {gate.tolerance:g} ({gate.source})"
    if value is None:
        return f"Full-cache gate not run: full has no score here to compare with {expected_text}."
    word = "passed" if gate.passes(value) else "failed"
    scores_text = f"full scores {gate.scale * value:.4g}, expected {expected_text}"
    return f"Full-cache gate {word}: {scores_text}; n={n}, transformers {transformers}."


def _gated_metric(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the (dataset, metric) of `gate.expected`: the first metric of the only dataset; None with several datasets."""
    datasets = values.get("datasets") or {}
    metrics = [metric for node in datasets.values() for metric in (node.get("metrics") or [])[:1]]
    return (*datasets, *metrics) if len(datasets) == len(metrics) == 1 else None


_COLUMNS_READ = (
    *("place", "cell", "latest", "method", "base", "reading", "parameters", "tuned", "seed", "config"),
    *("budget_kind", "budget_entries", "budget_fraction", "method_version", "cpu", "weights_file"),
)


@dataclass(frozen=True)
class SeedGroup:
    """Stored settings that differ only by seed, behind one table cell: positions among all cells, hashes and seeds."""

    places: tuple[int, ...]
    cells: tuple[str, ...]
    seeds: tuple[int | None, ...]

    def refuse_equal_seeds(self) -> None:
        """Raise StoreError if two cells have the same seed."""
        if len(set(self.seeds)) < len(self.seeds):
            raise StoreError(
                f"Cells {', '.join(sorted(self.cells))} have the same method, parameters, budget and seed, but differ in "
                "something that no table shows (see their `config`); keep them in separate rows folders."
            )


@dataclass(frozen=True)
class Sweep:
    """What the tables of one context and kind of budget have in common, whatever the metric.

    groups: (label, budget) -> cells that differ only by seed.
    config: configuration (JSON) that states scores which `full` should reach, from a cell of `full` if possible; None without.
    full: hashes of the cells of `full`.
    calibrations: label of a calibrated line -> phrases on the calibration files that the method read.
    versions: label -> budget -> versions of the method's code, newest first; only for lines with several versions.
    cpus: kind of CPU -> number of cells run on it; empty if the rows do not record the CPU.
    random_weights: True if the weights of some cells are random.
    weights_files: GGUF files of the weights.
    """

    context: dict[str, str]
    axis: str
    methods: tuple[Line, ...]
    groups: dict[tuple[str, str], SeedGroup]
    config: str | None
    full: tuple[str, ...]
    calibrations: dict[str, tuple[str, ...]]
    versions: dict[str, dict[str, tuple[int, ...]]]
    cpus: dict[str, int]
    random_weights: bool
    weights_files: tuple[str, ...] = ()

    @classmethod
    def of(cls, cells: pd.DataFrame, axis: str) -> Sweep:
        """Make the sweep of a frame of cells of one context. axis: entries, fraction or none."""
        all_rows = cells[[name for name in _COLUMNS_READ if name in cells]].to_dict("records")
        rows = [row for row in all_rows if row["latest"]]
        methods = _methods(rows)
        label_of = {method.variant: method.label for method in methods}
        rows_by_key: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in rows:
            rows_by_key.setdefault((label_of[_variant(row)], _budget(row)), []).append(row)
        groups = {}
        for method in methods:
            for key in sorted(key for key in rows_by_key if key[0] == method.label):
                seeds = tuple(None if missing(row["seed"]) else int(row["seed"]) for row in rows_by_key[key])
                cell_positions, names = (tuple(row[name] for row in rows_by_key[key]) for name in ("place", "cell"))
                groups[key] = SeedGroup(cell_positions, names, seeds)
        configs = [row["config"] for row in sorted(rows, key=lambda row: row["base"] != BASELINE)]
        configs_of: dict[str, dict[str, None]] = {}
        for row in rows:
            configs_of.setdefault(row["parameters"], {})[row["config"]] = None
        calibrated_lines = [line for line in methods if line.calibrated]
        return cls(
            context=dict(zip(CONTEXT, context_key(cells.iloc[0]), strict=True)),
            axis=axis,
            methods=methods,
            groups=groups,
            config=next((config for config in dict.fromkeys(configs) if has_expected_score(config)), None),
            full=tuple(row["cell"] for row in rows if row["base"] == BASELINE),
            calibrations={
                line.label: calibration_words(configs_of[line.parameters], calibrations(line.parameters))
                for line in calibrated_lines
            },
            versions=_versions(all_rows, label_of),
            cpus=dict(Counter(row["cpu"] for row in rows if not missing(row.get("cpu")))),
            random_weights="weights" in cells and bool((cells["weights"] == "random").any()),
            weights_files=tuple(sorted({row["weights_file"] for row in rows if not missing(row.get("weights_file"))})),
        )

    @property
    def places(self) -> list[int]:
        return [place for group in self.groups.values() for place in group.places]


def sweeps(cells: pd.DataFrame) -> Iterator[Sweep]:
    """Yield one `Sweep` per context and kind of budget. Cells without a budget are in every sweep of their context."""
    for _, group in cells.groupby(list(CONTEXT), dropna=False, sort=True):
        for axis in [kind for kind in ("entries", "fraction") if (group["budget_kind"] == kind).any()] or ["none"]:
            yield Sweep.of(group[group["budget_kind"].isin([axis, "none"])], axis)


def _budget(cell: Mapping[str, Any]) -> str:
    """Return the budget as text: "64" entries, "0.2" of the prompt, "" for none."""
    kind = cell["budget_kind"]
    if kind == "entries":
        return str(int(cell["budget_entries"]))
    return str(cell["budget_fraction"]) if kind == "fraction" else ""


def _variant(cell: Mapping[str, Any]) -> tuple[str, str, str | None, str]:
    return (
        cell["method"],
        cell["base"],
        None if missing(cell["reading"]) else cell["reading"],
        "{}" if missing(cell["parameters"]) else cell["parameters"],
    )


def _versions(
    cells: Sequence[Mapping[str, Any]], label_of: Mapping[tuple[str, str, str | None, str], str]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return label -> budget -> versions of the method's code, newest first, for lines with several versions."""
    version_sets: dict[str, dict[str, set[int]]] = {}
    for row in cells:
        version: Any = row.get("method_version")
        if (label := label_of.get(_variant(row))) is not None:
            by_budget = version_sets.setdefault(label, {}).setdefault(_budget(row), set())
            by_budget.add(1 if missing(version) else int(version))
    return {
        label: {budget: tuple(sorted(numbers, reverse=True)) for budget, numbers in version_sets[label].items()}
        for label in label_of.values()
        if label in version_sets and len(set().union(*version_sets[label].values())) > 1
    }


def _methods(cells: Sequence[Mapping[str, Any]]) -> tuple[Line, ...]:
    """Return the lines of a table: `full`, `random`, then the other methods by label.

    The label of a line names the parameters that differ from those of lines with the same name and reading. If the table has both
    readings, the labels of lines with the reading `released` say so.
    """
    variants = {_variant(row): row for row in cells}
    settings_by_variant = {variant: {"base": variant[1], **json.loads(variant[3])} for variant in variants}
    has_several_readings = len({reading for _, _, reading, _ in variants if reading}) > 1
    lines = []
    for variant, row in variants.items():
        name, base, reading, parameters = variant
        own_values = settings_by_variant[variant]
        values_of_namesakes = [
            settings_by_variant[other] for other in variants if (other[0], other[2]) == (name, reading)
        ]
        differing = sorted(
            {
                key
                for other in values_of_namesakes
                for key in other | own_values
                if other.get(key) != own_values.get(key)
            }
        )
        differing_settings = [f"{key}={own_values.get(key)}" for key in differing]
        differing_settings += ["released"] * (has_several_readings and reading == "released")
        label = name + (f" ({', '.join(differing_settings)})" if differing_settings else "")
        lines.append(Line(label, name, base, bool(row["tuned"]), reading, parameters, row["budget_kind"] != "none"))
    return tuple(sorted(lines, key=lambda line: (line.base != BASELINE, line.base != "random", line.label)))
