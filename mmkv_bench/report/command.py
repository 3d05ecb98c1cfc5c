"""The command that makes a stored cell again: its names, and the settings of its run that differ from the defaults.

Each stored configuration is compared once with the current configuration of the same groups. Versions of torch and transformers,
weights and data are part of a cell's hash too, but a command cannot choose them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from mmkv_bench.config.files import options
from mmkv_bench.config.shorthand import words
from mmkv_bench.errors import MMKVError
from mmkv_bench.tables.rows import config_of

PROGRAM = "mmkv-bench"
_FIXTURE = "_fixture"
_RUN = ("baseline", "decode", "limit", "reading", "sharing")
"""Settings of a run, besides its groups, on which its rows depend."""
_NODES = ("methods.", "datasets.")
_NO_SETTINGS = {"about", "gates", "base", "name", "released", "later"}


class Commands:
    """Commands of the cells of a report. The defaults of a run are composed once for all its cells."""

    def __init__(self) -> None:
        self._composed: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._differing: dict[str, dict[str, Any] | str] = {}

    def of(self, row: Mapping[str, Any], text: str) -> dict[str, str]:
        """Return {"line": command, "note": sentence} for a cell. row: its row of `cells`. text: its configuration (JSON)."""
        config = config_of(text)
        if text not in self._differing:
            try:
                self._differing[text] = self._differences(config)
            except (MMKVError, KeyError, TypeError, AttributeError) as error:
                self._differing[text] = f"The cell's configuration cannot be composed any more: {error}"
        differing = self._differing[text]
        if isinstance(differing, str):
            return {"line": "", "note": differing}
        label = row["dataset"]
        if label not in (config.get("datasets") or {}):
            return {"line": "", "note": f"The cell's configuration has no dataset {label}: another program wrote it."}
        settings = _groups(config, [label]) | {"method": row["method"]}
        if row["method"] in (config.get("variants") or {}):
            settings |= {"method": "full", f"variants.{row['method']}": config["variants"][row["method"]]}
        if row.get("budget_kind") == "entries":
            settings["budget"] = row["budget_entries"]
        elif row.get("budget_kind") == "fraction":
            fraction = row["budget_fraction"]
            settings["budget"] = fraction if "." in fraction else f"{fraction}.0"
        if row["protocol"] != "paper":
            settings["protocol"] = row["protocol"]
        if row.get("seed") is not None:
            settings["seed"] = row["seed"]
        prefixes = (f"methods.{row['method']}.", f"methods.{row['base']}.", f"datasets.{_option(config, label)}.")
        settings |= {
            key: value for key, value in differing.items() if not key.startswith(_NODES) or key.startswith(prefixes)
        }
        if row.get("reading") is None:
            settings.pop("reading", None)
        settings["out"] = f"runs/{row['cell'][:12]}"
        versions = f"torch {row['torch']}, transformers {row['transformers']}"
        note = f"The command makes this cell again under {versions} and with the same weights and data."
        return {"line": shlex.join([PROGRAM, *words(settings)]), "note": note}

    def _differences(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that differ from what the same model, datasets and methods compose to today."""
        from mmkv_bench.config.compose import compose

        named = [name for name in config["methods"] if name not in (config.get("variants") or {})]
        groups = _groups(config, list(config["datasets"])) | {"method": named or ["full"]}
        key = tuple(words(groups))
        if key not in self._composed:
            self._composed[key] = dict(compose(list(key)).resolved)
        now = self._composed[key]
        changed = {name: config[name] for name in _RUN if name in config and config[name] != now.get(name)}
        changed |= _other("model", config["model"], now["model"])
        for name in named:
            changed |= _other(f"methods.{name}", config["methods"][name], now["methods"][name])
        for label, node in config["datasets"].items():
            option = _option(config, label)
            changed |= _other(f"datasets.{option}", node, now["datasets"][option])
        return changed


def _groups(config: Mapping[str, Any], labels: list[str]) -> dict[str, Any]:
    """Return the command-line choices of model and datasets, with the settings that choose the same data under these names
    (`page_size`, `data`). labels: names of the datasets in the stored configuration."""
    names = [_option(config, label) for label in labels]
    model = config["model"]["name"]
    groups: dict[str, Any] = {"model": model if model in options("model") else "hf"}
    groups["dataset"] = names[0] if len(names) == 1 else names
    if any(str(config["datasets"][label].get("task", "")).startswith("pages") for label in labels):
        groups["page_size"] = config["page_size"]
    if (config.get("data") or {}).get("source") == "fixture":
        groups["data"] = "fixture"
    return groups


def _option(config: Mapping[str, Any], label: str) -> str:
    """Return a stored dataset's name on the command line: without the size of page datasets, and without the fixture suffix."""
    node = config["datasets"][label]
    task = str(node.get("task") or "")
    return task if task.startswith("pages") else label.removesuffix(_FIXTURE)


def _other(prefix: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stored node that differ from today's: `prefix.key` -> stored value."""
    changed = {}
    for key, value in _leaves(stored):
        other: Any = now
        for part in key.split("."):
            other = other.get(part) if isinstance(other, Mapping) else None
        if value != other and not {*key.split(".")} & _NO_SETTINGS:
            changed[f"{prefix}.{key}"] = value
    return changed


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            if "_target_" not in value:
                yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
