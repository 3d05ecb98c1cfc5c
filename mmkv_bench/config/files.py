"""Content of the files of config groups, wherever they lie and in whichever form, and the gates of models in it.

A model's file names, for each full-cache gate, a dataset and metric (or a group of datasets) and the table that prints its score:
`{dataset: docvqa, metric: anls, printed: mmshift_table01}`; `as` is the paper's name of the model where that leaves open which
it is. A run's configuration holds the whole gate: expected, tolerance, scale and source."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mmkv_bench.config import tables
from mmkv_bench.config.method_parts import expanded
from mmkv_bench.config.schema import conf_dir, reference_dir
from mmkv_bench.errors import ConfigError

METHOD, MODEL = "method", "model"


def content(group: str, name: str, folders: Sequence[str | Path] = ()) -> dict[str, Any]:
    """The values of `group=name` as plain data, a method's with its parts and parameters; needs no Hydra.

    Args:
        folders: further config folders, which are asked after `conf/`.

    Raises:
        ConfigError: no such file, or a method's part that does not exist.
    """
    import yaml

    for root in (conf_dir(), *map(Path, folders)):
        values = read(root / group, name, lambda file: yaml.safe_load(file.read_text(encoding="utf-8")) or {})
        if values is not None:
            return values
    raise ConfigError(f"there is no {group} {name!r}")


def read(group: Path, name: str, load: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any] | None:
    """`content` of one folder, its files read by `load`; None where it has nothing of that name."""
    file = group / f"{name}.yaml"
    if not file.is_file():
        return tables.member(group, name)
    values = dict(load(file))
    if group.name == MODEL and "gates" in values:
        values["gates"] = filled(name, values["gates"])
    return expanded(name, values) if group.name == METHOD else values


PRINTED = "printed"
_TITLES = {
    "mmshift": "MM-ShiftKV",
    "prefixkv": "PrefixKV",
    "flashcache": "FlashCache",
    "hybridkv": "HybridKV",
    "meda": "MEDA",
}


def filled(model: str, gates: Any) -> Any:
    """A model's gates with their numbers; those that bring numbers of their own stay as they are.

    Raises:
        ConfigError: a table that does not print what a gate names.
    """
    if not isinstance(gates, list):
        return gates
    return [_filled(model, gate) if isinstance(gate, Mapping) and PRINTED in gate else gate for gate in gates]


def _filled(model: str, gate: Mapping[str, Any]) -> dict[str, Any]:
    table = str(gate[PRINTED])
    what = {key: gate[key] for key in ("group", "dataset", "metric") if key in gate}
    printed = _full_cache(reference_dir(), table)
    named = gate.get("as")
    numbers = [
        number
        for name, column, number in printed
        if column == what and (name == named if named else _ours(name) == model)
    ]
    if len(numbers) != 1:
        raise ConfigError(
            f"conf/model/{model}.yaml: {table} prints {len(numbers)} scores of the full cache for {what}; a gate names a dataset "
            "and metric, or a group, that its table has once"
        )
    margin = _yaml(reference_dir(), "margins")["metrics"]["group" if "group" in what else what["metric"]]
    paper, _, number = table.partition("_table")
    return what | {
        "expected": numbers[0],
        "tolerance": margin.get("gate", margin["margin"]),
        "scale": margin["scale"],
        "source": f"{_TITLES[paper]} Table {int(number)}",
    }


def _ours(name: str) -> str | None:
    found: str | None = _yaml(reference_dir(), "names")["models"].get(name)
    return found


@cache
def _full_cache(folder: Path, table: str) -> list[tuple[str, dict[str, Any], float]]:
    """(the paper's model, dataset and metric or group, number) of the full cache's scores in a table."""
    file = folder / f"{table}.csv"
    if not file.is_file():
        raise ConfigError(f"there are no printed numbers of {table}; {folder} has a file for every table")
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
    import yaml

    told: dict[str, Any] = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    return told
