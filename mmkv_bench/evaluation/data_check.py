"""A check whether a dataset's files are available, for `python -m mmkv_bench data`.

Nothing is downloaded. No task code runs, but a task with its own reader (`metadata.read`) is loaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmkv_bench.datasets import local_data, sources
from mmkv_bench.datasets.drawn_page_tasks import DEFAULT_COUNT
from mmkv_bench.datasets.sources import snapshot
from mmkv_bench.datasets.specs import TaskSpec
from mmkv_bench.datasets.task_yaml import plain_config, task_file
from mmkv_bench.errors import MissingDataError, MMKVError

MEDIA_TEMPLATE = re.compile(r"^(?P<before>[^\s<]*)<(?P<column>\w+)>(?P<ending>\.\w+)?(?P<others>.*)$")
SHOWN = 3  # maximum number of file names in a message


@dataclass
class DataReport:
    """The result of a check.

    place     description of where the data are, or are expected
    config    configuration and split of the upstream repository
    files, bytes, rows, columns    of the evaluated split; None if unknown without loading
    media     the videos that exist; None for tasks without videos
    missing   sentences; empty if a run can start
    notes     further remarks
    """

    place: str
    config: str = ""
    files: int | None = None
    bytes: int | None = None
    rows: int | None = None
    columns: list[str] | None = None
    media: str | None = None
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """True if a run can start without a connection."""
        return not self.missing


def check(spec: TaskSpec, about: Mapping[str, Any]) -> DataReport:
    """Return a report on the data of a task: place, numbers of files and rows, and what is missing.

    Args:
        spec: the task.
        about: the `about` block of the dataset's configuration. Its `media` gives the pattern of video names.

    Raises:
        ConfigError: the task does not exist.
    """
    if spec.is_pages:
        return _pages(spec)
    config = plain_config(task_file(spec))
    split = str(spec.split or config.get("test_split") or config.get("validation_split"))
    config_name = config.get("dataset_name")
    split_text = f"{f'config {config_name}, ' if config_name else ''}split {split}"
    if sources.reads_itself(config):
        return _check_own_reader(spec, config, split_text)
    if spec.dataset_path:
        data_report = DataReport(f"folder {spec.dataset_path}", split_text)
        local_path = Path(spec.dataset_path).expanduser()
        folder: Path | None = local_path
        if not local_path.is_dir():
            data_report.missing.append(
                f"{folder} is not a folder; give an existing folder with data.root=<folder> or dataset_path=<folder>"
            )
            return data_report
    else:
        repository = str(config.get("dataset_path"))
        folder = snapshot(repository)
        data_report = DataReport(f"hub cache {folder}" if folder else f"hub repository {repository}", split_text)
        if folder is None:
            data_report.missing.append(
                f"{repository} is not in the hub cache; let a run download it (offline=false), or give "
                "data.root=<folder>"
            )
    if folder is not None:
        _files(data_report, spec, folder, config_name, split)
    _media(data_report, spec, folder, config_name, split, config, about)
    return data_report


def repository_of(spec: TaskSpec) -> str | None:
    """Return the hub repository named by a task's YAML; None if the task reads local files or makes its data."""
    path = None if spec.is_pages else str(plain_config(task_file(spec)).get("dataset_path"))
    return path if path is not None and sources.of_hub(path) else None


def _pages(spec: TaskSpec) -> DataReport:
    from mmkv_bench.datasets import page_data

    folder = page_data.folder(spec.name, spec.split or "test")
    files = list(folder.rglob("table.arrow")) if folder.is_dir() else []
    report = DataReport(
        "made here at first use", f"split {spec.split}", len(files), sum(f.stat().st_size for f in files)
    )
    report.rows, report.columns = spec.count or DEFAULT_COUNT, [*page_data.TEXT_COLUMNS, "images"]
    report.notes.append(f"{len(files) * page_data.CHUNK} samples are rendered in {folder}; more are as they are needed")
    return report


def _check_own_reader(spec: TaskSpec, config: Mapping[str, Any], where: str) -> DataReport:
    obtain_text = str(config["metadata"].get("obtain") or "").strip()
    if not spec.dataset_path:
        report = DataReport("no local folder" if obtain_text else "written here at each start", where)
    else:
        report = DataReport(f"folder {spec.dataset_path}", where)
        files = [file for file in Path(spec.dataset_path).rglob("*") if file.is_file()]
        report.files, report.bytes = len(files), sum(file.stat().st_size for file in files)
    if obtain_text and not spec.dataset_path:
        report.missing.append(obtain_text.rstrip("."))
        return report
    from mmkv_bench.evaluation.documents import documents, media_columns, paths_without_bytes

    try:
        docs = documents(spec, None)
    except MMKVError as error:
        report.missing.append(str(error))
        return report
    data = docs.full[docs.split]
    report.rows, report.columns = len(docs.refs), list(data.column_names)
    media_paths = {path for column in media_columns(data) for path in paths_without_bytes(data.data.column(column))}
    if absent_paths := sorted(
        os.path.relpath(path, spec.dataset_path) for path in media_paths if not os.path.isfile(path)
    ):
        more_text = f" and {len(absent_paths) - SHOWN} more" if len(absent_paths) > SHOWN else ""
        report.missing.append(f"pictures named by samples do not exist: {', '.join(absent_paths[:SHOWN])}{more_text}")
    return report


def _files(report: DataReport, spec: TaskSpec, folder: Path, name: str | None, split: str) -> None:
    try:
        files = local_data.find(folder, name, split)
        if files.kind == "saved":
            tables, info_file = list((folder / split).glob("*.arrow")), folder / split / "dataset_info.json"
            report.files, report.bytes = len(tables), sum(file.stat().st_size for file in tables)
            report.columns = (
                list(json.loads(info_file.read_text()).get("features") or {}) or None if info_file.is_file() else None
            )
        elif files.kind == "parquet":
            report.columns, report.rows = local_data.columns(files.files), local_data.count_rows(files.files)
            report.files, report.bytes = len(files.files), sum(file.stat().st_size for file in files.files)
        else:
            report.notes.append("`datasets` converts these files itself; their columns are known after loading")
        if report.columns is not None:
            local_data.require_columns(spec.dataset, spec.columns, report.columns)
        local_data.require_rows(files, report.rows)
        local_data.require_readable(files)
    except MissingDataError as error:
        report.missing.append(str(error))


def _media(
    report: DataReport,
    spec: TaskSpec,
    folder: Path | None,
    name: str | None,
    split: str,
    config: Mapping[str, Any],
    about: Mapping[str, Any],
) -> None:
    """Count the split's usable video files, and report missing and empty ones (in `missing` if none is usable, else `notes`)."""
    import pyarrow.parquet as pq

    media_home, videos = (
        sources.home(spec.media_root),
        sources.videos(spec.media_root, config.get("dataset_kwargs") or {}),
    )
    if videos is None:
        return
    if not videos.is_dir():
        report.media = f"none; expected in {videos}"
        report.missing.append(f"the videos are expected in {videos}, which does not exist; put them there")
        return
    template = MEDIA_TEMPLATE.match(str(about.get("media") or ""))
    ids: list[str] = []
    if template and folder is not None:
        with suppress(Exception):  # faults of the files have been reported already
            tables = [
                pq.read_table(file, columns=[template["column"]]) for file in local_data.find(folder, name, split).files
            ]
            ids = sorted({str(value) for table in tables for value in table[template["column"]].to_pylist()})
    if template is None or not ids:
        report.media = f"{sum(1 for file in videos.rglob('*') if file.is_file())} files in {videos}"
        return
    endings = [template["ending"] or "", *re.findall(r"\.\w+", template["others"])]
    paths_of_id = {i: [media_home / f"{template['before']}{i}{end}" for end in endings] for i in ids}
    files = {i: next((path for path in paths if path.is_file()), None) for i, paths in paths_of_id.items()}
    absent_ids = [i for i, path in files.items() if path is None]
    empty_ids = [i for i, path in files.items() if path is not None and path.stat().st_size == 0]
    unusable_count = len(absent_ids) + len(empty_ids)
    report.media = f"{len(ids) - unusable_count} of {len(ids)} videos in {videos}"
    problems = report.missing if unusable_count == len(ids) else report.notes
    for names, state in ((absent_ids, "missing"), (empty_ids, "empty files")):
        if names:
            shown_names = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            problems.append(
                f"{len(names)} of {len(ids)} videos are {state} ({shown_names}); their samples become errors"
            )
