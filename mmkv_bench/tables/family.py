"""Which lines of a column compete for being the best: one predeclared preset of each method, and no controls."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

from mmkv_bench.tables.line import Line

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
    for name, own in groups.items():
        if len(own) > 1 and len(own) >= _NEARLY_ALL * len(lines):
            return ComparisonFamily(tuple(lines), {}, str(name[0]))
        declared = _declared(own)
        if declared:
            presets |= {line.label: declared[0].label for line in own if line not in declared}
    return ComparisonFamily(tuple(line for line in lines if line.label not in presets), presets)


@cache
def _method(line: Line) -> tuple[Hashable, ...]:
    """What a line is a preset of."""
    name = PRESETS.get(line.base, line.base)
    told = _LOADED.get(line.base, ())
    parameters = json.loads(line.parameters) if told else {}
    return name, *(json.dumps(parameters.get(key)) for key in told)


def _declared(lines: Sequence[Line]) -> list[Line]:
    plain = [line for line in lines if not line.tuned and line.name == line.base and line.base not in PRESETS]
    return [line for line in plain if line.reading == "paper"] or plain
