"""Files of config groups: their folders, the names they offer, and the content of each name.

A full-cache gate compares the score of `full` with a printed one. For each gate, a model's file names a dataset and metric (or a
group of datasets) and the table that prints the score: `{dataset: docvqa, metric: anls, printed: mmshift_table01}`. `as` is the
paper's name of the model if this is ambiguous. A run's configuration has the whole gate: expected, tolerance, scale and source.

Files of a group that differ in a few values are one table (`conf/dataset/tables`). It has these keys: `template`, the common
content of all members; `rows`, member to its own columns; `kinds`, columns that several rows share (a row names its kinds
under `kinds`); and `columns`, defaults of columns. `{column}` in a text of the template, or of another column, stands for the
column's value. If it is the whole text, the value itself is used: a list inside a list is spliced, and for null the key is
left out. `{name}` is the member's name.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mmkv_bench.config.method_parts import expanded
from mmkv_bench.declared import read_yaml
from mmkv_bench.errors import ConfigError

METHOD, MODEL, DATASET = "method", "model", "dataset"

TABLES = "table"
"""Folder of `conf/` with the papers' tables (`mmkv_bench/papers`), which a run cannot choose."""

TABLE_FOLDER = "tables"
"""Folder of a config group with its tables."""


@cache
def conf_dir() -> Path:
    """Return the folder of YAML values: `conf/` of the checkout, or the copy inside an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    checkout_folder = package.parent
    if (checkout_folder / "pyproject.toml").is_file() and (checkout_folder / "conf").is_dir():
        return checkout_folder / "conf"
    return package / "conf"


def reference_dir() -> Path:
    """Return the folder of the papers' printed numbers: `results/reference` of the checkout, or the copy inside a
    wheel."""
    conf_folder = conf_dir()
    checkout_reference = conf_folder.parent / "results" / "reference"
    return checkout_reference if checkout_reference.is_dir() else conf_folder.parent / "reference"


def options(group: str, extra: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the sorted names that a config group offers, in files and in tables. extra: further config folders."""
    folders = [root / group for root in (conf_dir(), *map(Path, extra))]
    option_names = {name for folder in folders for name in members(folder)}
    return tuple(sorted(option_names | {file.stem for folder in folders for file in folder.glob("*.yaml")}))


def groups() -> tuple[str, ...]:
    """Return the config groups of `conf/`, sorted."""
    return _groups(conf_dir())


@cache
def _groups(conf: Path) -> tuple[str, ...]:
    folders = [d for d in conf.iterdir() if d.is_dir() and d.name != TABLES]
    return tuple(sorted(d.name for d in folders if next(d.glob("*.yaml"), None)))


def content(group: str, name: str, folders: Sequence[str | Path] = ()) -> dict[str, Any]:
    """Return the values of `group=name` as plain data, without Hydra. See `method_parts.expanded` for a method.

    Args:
        folders: further config folders, searched after `conf/`.

    Raises:
        ConfigError: no such file, or a method's part that does not exist.
    """
    for root in (conf_dir(), *map(Path, folders)):
        values = read(root / group, name, lambda file: read_yaml(file.read_bytes()) or {})
        if values is not None:
            return values
    raise ConfigError(f"unknown {group} {name!r}")


def read(group: Path, name: str, load: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the content of a name in one group's folder, or None if the folder lacks the name. See `content`.

    load: function that reads a YAML file.
    """
    file = group / f"{name}.yaml"
    if not file.is_file():
        return _member(group, name)
    values = dict(load(file))
    if group.name == MODEL and "gates" in values:
        values["gates"] = filled(name, values["gates"])
    return expanded(name, values) if group.name == METHOD else values


# ---------------------------------------------------------------------- tables of files
_COLUMN = re.compile(r"\{(\w+)\}")
_OMITTED = object()


def members(group: Path) -> set[str]:
    """Return the names of all members of the tables in a group's folder."""
    return {name for table in _tables(group).values() for name in table["rows"]}


def benchmark_members() -> dict[str, tuple[str, ...]]:
    """Map each benchmark of several datasets to their names, in the order of its table in `conf/dataset`."""
    return {name: tuple(table["rows"]) for name, table in _tables(conf_dir() / DATASET).items()}


def _member(group: Path, name: str) -> dict[str, Any] | None:
    """Return the content of a table's member, as if the member had its own file; None if no table has the name."""
    for table in _tables(group).values():
        if name in table["rows"]:
            row = dict(table["rows"][name])
            kind_columns = {key: value for kind in row.pop("kinds", ()) for key, value in table["kinds"][kind].items()}
            columns = {**(table.get("columns") or {}), **kind_columns, **row, "name": name}
            return _substitute_columns(table["template"], columns)
    return None


def _tables(group: Path) -> dict[str, Mapping[str, Any]]:
    files = sorted((group / TABLE_FOLDER).glob("*.yaml"))
    return {file.stem: _table(file, file.stat().st_mtime_ns) for file in files}


@cache
def _table(file: Path, changed: int) -> Mapping[str, Any]:
    table = read_yaml(file.read_bytes())
    if not isinstance(table, Mapping) or not {"template", "rows"} <= set(table):
        raise ConfigError(f"{file} is not a table; a table needs the keys template and rows")
    return table


def _substitute_columns(value: Any, columns: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        expanded_mapping = {key: _substitute_columns(column_value, columns) for key, column_value in value.items()}
        return {key: column_value for key, column_value in expanded_mapping.items() if column_value is not _OMITTED}
    if isinstance(value, list):
        expanded_items = [(item, _substitute_columns(item, columns)) for item in value]
        return [
            part
            for item, column_value in expanded_items
            if column_value is not _OMITTED
            for part in (column_value if isinstance(column_value, list) and isinstance(item, str) else [column_value])
        ]
    if not isinstance(value, str):
        return value
    column_match = _COLUMN.fullmatch(value)
    if column_match:
        column_value = columns[column_match[1]]
        return _OMITTED if column_value is None else _substitute_columns(column_value, columns)
    return _COLUMN.sub(lambda match: str(_substitute_columns(columns[match[1]], columns)), value)


# ---------------------------------------------------------------------- gates
PRINTED = "printed"
TITLES = {
    "mmshift": "MM-ShiftKV",
    "prefixkv": "PrefixKV",
    "flashcache": "FlashCache",
    "hybridkv": "HybridKV",
    "meda": "MEDA",
}


def filled(model: str, gates: Any) -> Any:
    """Fill in the scores that a model's full-cache gates name, from the papers' tables.

    A gate is the score of the full cache on a dataset (or a group of datasets) as a paper prints it.

    gates: a list of gates, in which the key `printed` names the table of a gate. Gates without this key stay unchanged,
    as do values that are no list.

    Raises:
        ConfigError: a table is missing, or has not exactly one score for a gate.
    """
    if not isinstance(gates, list):
        return gates
    return [_fill_gate(model, gate) if isinstance(gate, Mapping) and PRINTED in gate else gate for gate in gates]


def _fill_gate(model: str, gate: Mapping[str, Any]) -> dict[str, Any]:
    table = str(gate[PRINTED])
    score_keys = {key: gate[key] for key in ("group", "dataset", "metric") if key in gate}
    printed_scores = _full_cache(reference_dir(), table)
    paper_model_name, paper_names = gate.get("as"), _yaml(reference_dir(), "names")["models"]
    numbers = [
        table_number
        for name, column, table_number in printed_scores
        if column == score_keys and (name == paper_model_name if paper_model_name else paper_names.get(name) == model)
    ]
    if len(numbers) != 1:
        raise ConfigError(
            f"conf/model/{model}.yaml: {table} prints {len(numbers)} scores of the full cache for {score_keys}; a gate "
            "must name a dataset and metric, or a group, for which its table has one score"
        )
    tolerance_and_scale = _yaml(reference_dir(), "margins")["metrics"][
        "group" if "group" in score_keys else score_keys["metric"]
    ]
    paper, _, table_number = table.partition("_table")
    return score_keys | {
        "expected": numbers[0],
        "tolerance": tolerance_and_scale.get("gate", tolerance_and_scale["margin"]),
        "scale": tolerance_and_scale["scale"],
        "source": f"{TITLES[paper]} Table {int(table_number)}",
    }


@cache
def _full_cache(folder: Path, table: str) -> list[tuple[str, dict[str, Any], float]]:
    """Return the full cache's scores in a paper's table, as (the paper's name of the model, dataset and metric or
    group, score)."""
    file = folder / f"{table}.csv"
    if not file.is_file():
        raise ConfigError(
            f"there are no printed numbers of {table}; allowed: the tables with a file in {folder}; name one of these"
        )
    columns = _yaml(folder, "names")["columns"]
    paper = table.partition("_")[0]
    scores = []
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["method"] != "full" or not row["number"]:
                continue
            key = f"{row['dataset']}{'/' + row['subset'] if row['subset'] else ''}:{row['metric']}"
            column = columns.get(f"{table} {key}") or columns.get(f"{paper} {key}") or columns[key]
            scores.append((row["model"], dict(column), float(row["number"])))
    return scores


@cache
def _yaml(folder: Path, name: str) -> dict[str, Any]:
    document: dict[str, Any] = read_yaml((folder / f"{name}.yaml").read_bytes())
    return document
