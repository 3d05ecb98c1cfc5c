"""Inputs of a run that this machine lacks. No network is used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.datasets.sources import preflight
from mmkv_bench.errors import MissingDataError
from mmkv_bench.models.files import cached_folder
from mmkv_bench.models.source import HUB, Source
from mmkv_bench.text_columns import size

if TYPE_CHECKING:
    from mmkv_bench.config.schema import Model
    from mmkv_bench.plan.plan import Coverage, Plan
    from mmkv_bench.store.store import Store

ASSUMED_ROW_BYTES = 4096
"""Assumed bytes per answer with its scores, if the store has no rows to measure."""


@dataclass(frozen=True)
class MissingInput:
    """An input that a run needs and this machine lacks.

    kind: weights, data, calibration, judge or disk.
    what: a sentence for the user.
    """

    kind: str
    what: str


@dataclass(frozen=True)
class Disk:
    """Disk space for a run's missing rows, in bytes.

    rows: for all missing rows.
    row: per row.
    measured: whether `row` was measured on stored rows, not assumed.
    free: free space at the store.
    """

    rows: int
    row: float
    measured: bool
    free: int


def missing_inputs(plan: Plan, disk: Disk) -> list[MissingInput]:
    """List the weights, data, calibrations, judge and disk space that a run without a connection would lack."""
    inputs = missing_weights(plan.model)
    inputs += [MissingInput("data", sentence) for sentence in _data(plan)]
    inputs += [MissingInput("calibration", sentence) for sentence in plan.uncalibrated]
    inputs += [MissingInput("judge", sentence) for sentence in _judges(plan)]
    if disk.free < disk.rows:
        disk_sentence = f"the rows may take {disk.rows:,} bytes, but only {disk.free:,} are free at {plan.out}"
        inputs.append(MissingInput("disk", disk_sentence))
    return inputs


def missing_weights(model: Model) -> list[MissingInput]:
    """Return one entry if weight files of a model on the hub are missing from the local cache, else nothing."""
    source = Source.of(model)
    if source.kind != HUB:
        return []  # planning has read the files of a folder; random weights are generated
    folder = cached_folder(source.place, model.revision)
    fetch_remedy = f"fetch them into HF_HOME with `hf download {source.place}`, or give model.weights=<folder>"
    if folder is None:
        return [MissingInput("weights", f"{source.place} is not in the hub cache; {fetch_remedy}")]
    index_file = folder / "model.safetensors.index.json"
    weight_files = {"model.safetensors"}
    if index_file.exists():
        weight_files = set(json.loads(index_file.read_text())["weight_map"].values())
    missing_files = sorted(name for name in weight_files if not (folder / name).exists())
    if not missing_files:
        return []
    files_clause = f"{len(missing_files)} of {len(weight_files)} files of {source.place}"
    return [MissingInput("weights", f"{files_clause} are not in the hub cache ({missing_files[0]}); {fetch_remedy}")]


def _data(plan: Plan) -> Iterator[str]:
    for part in plan.parts:
        try:
            preflight(replace(part.spec, offline=True))
        except MissingDataError as error:
            yield str(error)


def _judges(plan: Plan) -> Iterator[str]:
    judged_datasets = [part.dataset for part in plan.parts if part.about.get("judge") == "needed"]
    if not judged_datasets:
        return
    if plan.judge.kind == "none":
        yield (
            f"{', '.join(judged_datasets)}: needs a judge, but judge=none is set; give judge=openai, or judge=local "
            "judge.url=..."
        )
    elif plan.judge.key_env and not os.environ.get(plan.judge.key_env):
        yield f"the environment variable {plan.judge.key_env} is not set; it has the judge's key"


def disk_of(plan: Plan, coverage: Coverage, store: Store) -> Disk:
    """Return the disk space that a plan's missing rows need, and the free space at the store."""
    missing_rows = sum(map(coverage.left, plan.parts))
    stored_rows = store.responses(columns=("cell",)).num_rows
    tables = [store.root / name for name in ("responses", "samples", "journal")]
    used_bytes = sum(_bytes(file) for folder in tables if folder.is_dir() for file in folder.iterdir())
    bytes_per_row = used_bytes / stored_rows if stored_rows else float(ASSUMED_ROW_BYTES)
    existing_folder = store.root.absolute()
    while not existing_folder.exists():
        existing_folder = existing_folder.parent
    return Disk(
        int(missing_rows * bytes_per_row), bytes_per_row, stored_rows > 0, shutil.disk_usage(existing_folder).free
    )


def _bytes(file: Path) -> int:
    """Return the size of a file, or 0 if another process has removed it."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def preflight_text(disk: Disk, inputs: list[MissingInput], place: Path) -> str:
    """Return lines for `mmkv-bench plan` about disk space at `place` and missing inputs."""
    row_size_clause = (
        f"measured: {disk.row:,.0f} bytes each"
        if disk.measured
        else f"assumed {ASSUMED_ROW_BYTES:,} bytes each, none is stored"
    )
    lines = [
        f"disk       {size(disk.rows)} for the missing rows ({row_size_clause}); {size(disk.free)} free at {place}"
    ]
    return "\n".join([*lines, *(missing_input_lines(inputs) or ["ready      nothing to download"])])


def missing_input_lines(inputs: list[MissingInput]) -> list[str]:
    return [f"missing    {missing.kind}: {missing.what}" for missing in inputs]
