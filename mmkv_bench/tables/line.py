"""Lines of a table: a method with its stored parameters, the family of lines that compete, and calibrations."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from mmkv_bench.config.schema import conf_dir
from mmkv_bench.tables.rows import config_of


@dataclass(frozen=True)
class Line:
    """One line of a table. `budgeted` is False for `full` and whatever else takes no budget."""

    label: str
    name: str
    base: str
    tuned: bool
    reading: str | None
    parameters: str
    budgeted: bool

    @property
    def cheats(self) -> bool:
        """True for a ceiling: it was given the full cache's own answer, is not marked best and does not compete."""
        return bool(self._values.get("reads_answer"))

    @cached_property
    def calibrated(self) -> bool:
        """True if built with a calibration: numbers measured on data before the first prompt."""
        return bool(calibrations(self.parameters))

    @property
    def may_exceed(self) -> bool:
        """True if more entries than the budget are no defect: a released code's, or the paper's own formula."""
        return self.reading == "released" or bool(self._values.get("over_budget"))

    @property
    def renamed(self) -> bool:
        """True for a variant that changes nothing but the name."""
        return self.name != self.base and not self.tuned and self.base not in ("custom", "kvpress")

    @property
    def resamples(self) -> bool:
        """True for the control that evicts nothing and shows smaller pictures."""
        return self.base == "pixels"

    @cached_property
    def _values(self) -> dict[str, Any]:
        return json.loads(self.parameters)

    @property
    def variant(self) -> tuple[str, str, str | None, str]:
        """Identity of the line, whatever its label says."""
        return self.name, self.base, self.reading, self.parameters


CONTROLS = ("full", "oracle", "blind")
"""Families (`base`) that are no methods: what the uncompressed cache, the answer's own attention and no image give."""

PRESETS = {"adakv_official": "adakv", "mmshift_llava": "mmshift", "snapkv_kvpress": "snapkv"}
"""Methods of conf/method that are another's parts with other constants -> that other one, which is predeclared."""

_NEARLY_ALL = 0.8  # of a column's lines
_LOADED = {"kvpress": ("press",), "custom": ("path", "name")}
"""Families whose method is what these parameters name."""


@dataclass(frozen=True)
class ComparisonFamily:
    """rivals: the lines that compete; presets: line -> the predeclared line of its method, beside which it does not compete;
    method: of which nearly all lines are presets, so that all of them compete ("" where there is none)."""

    rivals: tuple[Line, ...]
    presets: dict[str, str]
    method: str = ""


def family(methods: Sequence[Line]) -> ComparisonFamily:
    """The family of the lines of one column. It looks at what was asked for alone, never at a score.

    Predeclared is the line that has its method's name and default parameters, in the reading `paper` where both are
    there. Without such a line all presets of the method compete. Where nearly all lines are presets of one method
    (ablations of it), they are what the reader compares, and all lines compete.
    """
    lines = [method for method in methods if method.base not in CONTROLS and not method.cheats]
    groups: dict[tuple[Hashable, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(_method(line), []).append(line)
    presets: dict[str, str] = {}
    for name, group in groups.items():
        if len(group) > 1 and len(group) >= _NEARLY_ALL * len(lines):
            return ComparisonFamily(tuple(lines), {}, str(name[0]))
        declared = _declared(group)
        if declared:
            presets |= {line.label: declared[0].label for line in group if line not in declared}
    return ComparisonFamily(tuple(line for line in lines if line.label not in presets), presets)


@cache
def _method(line: Line) -> tuple[Hashable, ...]:
    """The method that a line is a preset of."""
    keys = _LOADED.get(line.base, ())
    parameters = json.loads(line.parameters) if keys else {}
    return PRESETS.get(line.base, line.base), *(json.dumps(parameters.get(key)) for key in keys)


def _declared(lines: Sequence[Line]) -> list[Line]:
    plain = [line for line in lines if not line.tuned and line.name == line.base and line.base not in PRESETS]
    return [line for line in plain if line.reading == "paper"] or plain


def calibrations(parameters: str) -> dict[str, str]:
    """Method -> checksum of the calibrations that a line's parameters (JSON) name; empty for a method that read none.

    A word instead (`auto`, a path) or null was never looked up: that variant works without one.
    """
    named = json.loads(parameters).get("calibration")
    return dict(named) if isinstance(named, Mapping) else {}


def calibration_words(configs: Iterable[str], checksums: Mapping[str, str]) -> tuple[str, ...]:
    """Name, checksum and samples of each of `calibrations`, as a phrase.

    Rows have the samples in their configuration (`calibrations`: checksum -> dataset in words, number of samples). For
    older rows the checksum, which covers the samples too, finds the artefact in `conf/calibration`.

    Args:
        configs: of the cells that read them (JSON).
    """
    samples: dict[str, Any] = {}
    for config in configs:
        samples |= config_of(config).get("calibrations") or {}
    committed = {} if set(checksums.values()) <= set(samples) else _committed(conf_dir())
    phrases = []
    for name, checksum in sorted(checksums.items()):
        data = samples.get(checksum) or committed.get(checksum)
        count = f"{data['samples']} samples: " if data and data["samples"] else ""
        phrases.append(f"{name} {checksum} ({count + data['dataset'] if data else 'unknown samples'})")
    return tuple(phrases)


@cache
def _committed(folder: Path) -> dict[str, dict[str, Any]]:
    """First 16 digits of the checksum -> samples and dataset of every artefact below the configuration folder."""
    artefacts = [json.loads(path.read_text()) for path in sorted(folder.glob("calibration/*/*.json"))]
    return {
        artefact["checksum"][:16]: {"samples": len(artefact["samples"]), "dataset": artefact["dataset"]}
        for artefact in artefacts
    }
