"""Planning of stored cells again, from the configuration in the store.

A cell is one (method, budget) setting on one dataset; its hash names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from mmkv_bench import consent
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.run_config import stored_config
from mmkv_bench.config.schema import AnswerConfig, GridConfig, MethodConfig, RunConfig
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods.node import DECODING, flat_parameters, under_reading
from mmkv_bench.plan.cells import Cell, Identity, bases, expand, method_entries
from mmkv_bench.store.schema import CELL_COLUMNS

if TYPE_CHECKING:
    from mmkv_bench.datasets.specs import TaskSpec

Row = Mapping[str, Any]

VERSIONS = ("torch", "transformers")
_LABEL_COLUMNS = ("method", "budget_kind", "budget_entries", "budget_fraction", "protocol", "reading", "seed")
_IDENTITY_COLUMNS = tuple(
    column.name for column in CELL_COLUMNS if column.identity and column.name not in _LABEL_COLUMNS
)
_FIXTURE = "_fixture"


@dataclass(frozen=True)
class ReplannedCells:
    """Stored cells of one dataset, planned with this version.

    Attributes:
        answering, spec: settings and dataset of the run that makes the cells again.
        cells: hash -> cell, for cells whose hash is still the stored one.
        refused: hash -> why a cell cannot be made again.
    """

    answering: AnswerConfig
    spec: TaskSpec
    cells: Mapping[str, Cell]
    refused: Mapping[str, str]


def plan_again(rows: Sequence[Row]) -> ReplannedCells:
    """Plan the stored cells of one dataset of one run again, under the versions of torch and transformers in the rows.

    The caller decides whether the installed versions may differ.

    rows: rows of the table `cells`, all with the same `config`, `dataset`, `torch` and `transformers`.

    Raises:
        MMKVError: the model or dataset is not available.
        CodeOfRowsError: the rows name code of a dataset.
    """
    from mmkv_bench.datasets.sources import preflight
    from mmkv_bench.plan import identity
    from mmkv_bench.plan.planner import stay_offline, tasks_of

    stored = json.loads(rows[0]["config"])
    for folder in stored.get("folders") or ():
        consent.require_folder(str(folder))
    config = run_config(stored, {rows[0]["dataset"]}, {row["method"] for row in rows})
    specs = tasks_of(config.datasets, config.data)
    (spec,) = specs.values()
    config = config.labelled(specs)
    stay_offline(config.model, specs)
    preflight(spec)
    model_facts = replace(identity.gather(config.model, specs), **{name: rows[0][name] for name in VERSIONS})
    cells_now: dict[str, Cell] = {}
    refused: dict[str, str] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        method_rows = [row for row in rows if row["method"] == method]
        try:
            cells = _cells_of_method(config.grid, config.method_config, method, model_facts)
        except consent.CodeOfRowsError as error:
            refused |= {row["cell"]: str(error) for row in method_rows}
            continue
        except ConfigError as error:
            refused |= {row["cell"]: f"identity of an older version ({error})" for row in method_rows}
            continue
        planned_cells = {cell.cell: cell for cell in cells}
        cells_now |= {row["cell"]: planned_cells[row["cell"]] for row in method_rows if row["cell"] in planned_cells}
        refused |= {row["cell"]: reason_of_other(row, cells) for row in method_rows if row["cell"] not in planned_cells}
    return ReplannedCells(config.answering, spec, cells_now, refused)


def run_config(stored: Mapping[str, Any], datasets: Iterable[str], methods: set[str]) -> RunConfig:
    """Return a run's configuration for some datasets and methods of a stored one; newer keys get their defaults.

    Raises ConfigError: this version cannot read the stored configuration.
    """
    from omegaconf.errors import OmegaConfBaseException

    try:
        variants = {name: node for name, node in stored["variants"].items() if name in methods}
        method_names = methods | {str(node["base"]) for node in variants.values()}
        suffix = _FIXTURE if (stored.get("data") or {}).get("source") == "fixture" else ""
        # A cell's configuration also has facts of calibrations, which are not settings.
        names = {field.name for field in fields(RunConfig)}
        config = {key: stored[key] for key in stored if key in names} | {
            "datasets": {name.removesuffix(suffix): stored["datasets"][name] for name in sorted(datasets)},
            "methods": {name: node for name, node in stored["methods"].items() if name in method_names},
            "variants": variants,
            "shard": "0/1",
            "samples": None,
            "stage": "generate",
            "fidelity": "off",
            "retry": [],
            "logger": {"kind": "none"},
        }
        return stored_config(config)
    except (KeyError, TypeError, ValueError, AttributeError, OmegaConfBaseException) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ConfigError(
            f"this version cannot read the configuration of these rows ({problem}); use the version that made the rows"
        ) from error


def _cells_of_method(grid: GridConfig, chosen: MethodConfig, method: str, facts: Identity) -> list[Cell]:
    variants = {name: node for name, node in chosen.variants.items() if name == method}
    base = str(variants[method]["base"]) if variants else method
    methods = {name: node for name, node in chosen.methods.items() if name in (base, method)}
    chosen = replace(chosen, variants=variants, methods=methods)
    cells = cells_again(grid, chosen, facts, method_defaults(bases(methods, variants), chosen.folders))
    return [cell for cell in cells if cell.method == method]


def cells_again(
    grid: GridConfig, chosen: MethodConfig, facts: Identity, defaults: Mapping[str, Mapping[str, Any]]
) -> list[Cell]:
    """Return the planned cells of a stored run, given its grid and its methods.

    A method has the structure of its present file (`defaults`) and the stored values of its parameters. In the stored
    structure references to parameters are resolved, but `reading=released` changes some of these parameters.

    Raises ConfigError: a method no longer has a stored parameter.
    """
    nodes: dict[str, Mapping[str, Any]] = {}
    for name, stored in chosen.methods.items():
        default_parameters, values = under_reading(name, defaults[name], "paper"), flat_parameters(stored)
        unknown_parameters = sorted(set(values) - set(default_parameters))
        if unknown_parameters:
            raise ConfigError(f"{name} has no parameter {unknown_parameters[0]!r} now")
        values |= {key: stored[key] for key in ("reading", "released", DECODING) if key in stored}
        nodes[name] = {
            **defaults[name],
            **{key: value for key, value in values.items() if default_parameters.get(key) != value},
        }
    return expand(grid, facts, method_entries(replace(chosen, methods=nodes), defaults))[0]


def reason_of_other(row: Row, cells: Sequence[Cell]) -> str:
    """Return a text on why no planned cell has the hash of a stored cell: the columns in which they differ."""
    namesakes = [cell.row() for cell in cells if all(getattr(cell, name) == row[name] for name in _LABEL_COLUMNS)]
    if not namesakes:
        return "identity of an older version (its configuration plans no such cell now)"
    values_stored_and_now = {name: (row.get(name), namesakes[0].get(name)) for name in _IDENTITY_COLUMNS}
    structured_columns = {
        name
        for name, pair in values_stored_and_now.items()
        if all(isinstance(one, str) and one.startswith("{") for one in pair)
    }
    values_stored_and_now |= {
        name: (json.loads(str(values_stored_and_now[name][0])), json.loads(str(values_stored_and_now[name][1])))
        for name in structured_columns
    }
    differing_columns = [name for name, (stored, now) in values_stored_and_now.items() if stored != now]
    for name, what in (("model_fingerprint", "model"), ("dataset_fingerprint", "dataset")):
        if name in differing_columns:
            return f"another {what} now ({name} {namesakes[0][name]}, stored {row[name]})"
    return f"identity of an older version ({', '.join(differing_columns) or 'no column says in what'})"
