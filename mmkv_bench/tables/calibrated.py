"""What a calibrated method has seen of a model's data before its first prompt, as far as its rows can tell."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mmkv_bench.config.schema import conf_dir
from mmkv_bench.tables.rows import config_of


def artefacts(parameters: str) -> dict[str, str]:
    """Method -> checksum of the calibrations that a line's parameters (JSON) name; empty for a method that read none.

    A word instead (`auto`, a path) or null was never looked up: that variant works without one.
    """
    named = json.loads(parameters).get("calibration")
    return dict(named) if isinstance(named, Mapping) else {}


def seen(configs: Iterable[str], found: Mapping[str, str]) -> tuple[str, ...]:
    """A phrase per artefact of `found` (see `artefacts`): its name, its checksum, and the samples it was made of.

    Rows say it in their configuration (`calibrations`: checksum -> dataset in words, number of samples). Of those that
    are older, the checksum, which covers the samples too, finds the artefact in `conf/calibration`.

    Args:
        configs: of the cells that read them (JSON).
    """
    told: dict[str, Any] = {}
    for config in configs:
        told |= config_of(config).get("calibrations") or {}
    committed = {} if set(found.values()) <= set(told) else _committed(conf_dir())
    phrases = []
    for name, checksum in sorted(found.items()):
        what = told.get(checksum) or committed.get(checksum)
        words = "unknown samples"
        if what:
            words = (f"{what['samples']} samples: " if what["samples"] else "") + what["dataset"]
        phrases.append(f"{name} {checksum} ({words})")
    return tuple(phrases)


@cache
def _committed(folder: Path) -> dict[str, dict[str, Any]]:
    """First 16 digits of the checksum -> what was read, of every artefact below the configuration folder."""
    known = {}
    for path in sorted(folder.glob("calibration/*/*.json")):
        artefact = json.loads(path.read_text())
        known[artefact["checksum"][:16]] = {"samples": len(artefact["samples"]), "dataset": artefact["dataset"]}
    return known
