"""Find and check a dataset's files in a local folder, for one configuration and split.

The folder may be a clone of the upstream repository (its README.md maps files to splits), a folder written by
`DatasetDict.save_to_disk`, or simply `data/<split>-*.parquet`. Splits keep their upstream names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import MissingDataError

if TYPE_CHECKING:
    import datasets

MEDIA = "media"  # subfolder of a dataset's folder; replaces $HF_HOME, where tasks look for videos
SAVED = "dataset_dict.json"
SYNONYMS = (("validation", "val", "valid", "dev"), ("test", "testing", "eval", "evaluation"), ("train", "training"))
OTHER_FILES = ("*.json", "*.jsonl", "*.csv", "*.arrow", "*.txt")  # left to the builders of `datasets`
OTHER_MEDIA = ("video", "audio")  # words in names of columns whose {bytes, path} are not pictures


@dataclass(frozen=True)
class LocalFiles:
    """Data files of one split in a local folder.

    Attributes:
        kind: `parquet` for parquet parts, `saved` for a folder of `save_to_disk`, `other` for formats that the library
            `datasets` detects itself (JSON, CSV, Arrow, text).
        split: upstream name of the split.
        files: the files of the split; () unless `parquet`.
    """

    folder: Path
    split: str
    kind: str
    files: tuple[Path, ...] = ()

    def source(self) -> dict[str, Any]:
        """Return the keys of a task's YAML with which lmms-eval reads these files."""
        if self.kind == "parquet":
            files = {self.split: [str(file) for file in self.files]}
            return {"dataset_path": "parquet", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
        kwargs = {"load_from_disk": True} if self.kind == "saved" else {}
        return {"dataset_path": str(self.folder), "dataset_name": None, "dataset_kwargs": kwargs}


def media_root(folder: Path) -> str | None:
    """Return the dataset's `media` folder, which replaces $HF_HOME; None without such a folder."""
    return str(folder / MEDIA) if (folder / MEDIA).is_dir() else None


def find(folder: Path, config: str | None, split: str) -> LocalFiles:
    """Find the data files of a split in a dataset's local folder.

    config: the upstream configuration (`dataset_name` of a task); None if the dataset has only one.

    Raises:
        MissingDataError: the folder is empty, or has only other splits.
    """
    if (folder / SAVED).is_file():
        splits = [str(name) for name in json.loads((folder / SAVED).read_text()).get("splits", [])]
        if split not in splits:
            raise MissingDataError(_missing_split_message(folder, split, splits))
        return LocalFiles(folder, split, "saved")
    files = _files_in_readme(folder, config, split) or _files_by_name(folder, config, split)
    if files:
        return LocalFiles(folder, split, "parquet", tuple(sorted(files)))
    parquet = [file for file in folder.rglob("*.parquet") if MEDIA not in file.relative_to(folder).parts]
    if parquet:
        raise MissingDataError(
            _missing_split_message(folder, split, sorted({file.stem.split("-")[0] for file in parquet}))
        )
    if any(next(folder.rglob(pattern), None) for pattern in OTHER_FILES):
        return LocalFiles(folder, split, "other")
    raise MissingDataError(
        f"{folder} has no data files; put data/{split}-00000-of-00001.parquet in the upstream schema there, or a "
        "clone of the upstream repository"
    )


def columns(files: Sequence[Path]) -> list[str]:
    """Return the column names of parquet files.

    Raises:
        MissingDataError: a file is truncated or not parquet, or two files have different columns.
    """
    import pyarrow.parquet as pq

    first_columns: list[str] = []
    for file in files:
        try:
            column_names = list(pq.read_schema(file).names)
        except Exception as error:
            reason = str(error).splitlines()[0].split(". ")[0].rstrip(".")
            raise MissingDataError(
                f"{file} is truncated or not a parquet file ({reason}); copy or download it again"
            ) from error
        first_columns = first_columns or column_names
        if odd := sorted({*column_names} ^ {*first_columns}):
            raise MissingDataError(
                f"{file} and {files[0].name} differ in columns {', '.join(odd)}; give files of the same version"
            )
    return first_columns


def require_columns(dataset: str, wanted: Iterable[str], present: Iterable[str]) -> None:
    """Raise MissingDataError, naming the columns, if columns that the task reads are missing from the data."""
    present = list(present)
    missing = [name for name in wanted if name not in present]
    if missing:
        raise MissingDataError(
            f"the data of {dataset} lack column{'s' * (len(missing) > 1)} {', '.join(missing)}, which the task reads; "
            f"the data have {', '.join(present)}; give data in the upstream schema"
        )


def count_rows(files: Sequence[Path]) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(file).num_rows for file in files)


def require_readable(files: LocalFiles) -> None:
    """Raise MissingDataError if the rows of a file cannot be read.

    This reads the first and last row group of a parquet file, whole JSON files, and the first and last line of JSON
    Lines.
    """
    import pyarrow.parquet as pq

    for file in files.files:
        try:
            parquet_file = pq.ParquetFile(file)
            for group in {0, parquet_file.num_row_groups - 1} if parquet_file.num_row_groups else ():
                parquet_file.read_row_group(group)
        except Exception as error:
            raise _damaged_file_error(file, error) from error
    for file in sorted(files.folder.rglob("*.json")) if files.kind == "other" else ():
        try:
            json.loads(file.read_text())
        except ValueError as error:
            lines = [line for line in file.read_text(errors="replace").split("\n") if line.strip()]
            try:  # may be JSON Lines
                for line in (lines[0], lines[-1]):
                    json.loads(line)
            except (IndexError, ValueError):
                raise _damaged_file_error(file, error) from error


def _damaged_file_error(file: Path, error: Exception) -> MissingDataError:
    reason = str(error).splitlines()[0].rstrip(".")
    return MissingDataError(f"{file} cannot be read ({reason}); copy or download it again")


def require_rows(files: LocalFiles, rows: int | None) -> None:
    """Raise MissingDataError if a split has 0 rows. An unknown number (None) is accepted."""
    if rows == 0:
        raise MissingDataError(f"split {files.split} of {files.folder} has no rows; give the upstream files")


def picture_features(files: Sequence[str]) -> datasets.Features | None:
    """Return `datasets` features in which picture columns are decoded; None if there are no columns to declare.

    Picture columns hold {bytes, path} or lists of {bytes, path}. Only files written by `datasets` declare them, so a
    task would get dicts instead of pictures from files of pandas or pyarrow. The first file's schema is used for all
    files.
    """
    import pyarrow.parquet as pq
    from datasets import Features, Image, List

    features = Features.from_arrow_schema(pq.read_schema(files[0]))
    picture_columns: dict[str, Any] = {}
    for name, feature in features.items():
        if any(word in name.lower() for word in OTHER_MEDIA):
            continue
        if _holds_picture(feature):
            picture_columns[name] = Image()
        elif isinstance(feature, List) and _holds_picture(feature.feature):
            picture_columns[name] = List(Image())
    return Features({**features, **picture_columns}) if picture_columns else None


def _holds_picture(feature: Any) -> bool:
    if not isinstance(feature, dict) or set(feature) != {"bytes", "path"}:
        return False
    kinds = {name: getattr(value, "dtype", None) for name, value in feature.items()}
    return kinds["bytes"] in ("binary", "large_binary") and kinds["path"] in ("string", "large_string", "null")


def _files_in_readme(folder: Path, config: str | None, split: str) -> list[Path]:
    """Return the files that the front matter of README.md lists for the split."""
    import yaml

    readme = folder / "README.md"
    text = readme.read_text(errors="replace") if readme.is_file() else ""
    if not text.startswith("---"):
        return []
    try:
        card = yaml.safe_load(text.split("\n---", 1)[0].removeprefix("---")) or {}
    except yaml.YAMLError:
        return []
    configs = [entry for entry in card.get("configs") or [] if isinstance(entry, dict)]
    matching_configs = [entry for entry in configs if entry.get("config_name") == (config or "default")] or configs[:1]
    if config is not None and matching_configs and matching_configs[0].get("config_name") != config:
        return []
    for entry in matching_configs:
        for part in entry.get("data_files") or []:
            if isinstance(part, dict) and str(part.get("split")) == split:
                patterns = part.get("path")
                patterns = [patterns] if isinstance(patterns, str) else list(patterns or [])
                return [file for p in patterns for file in sorted(folder.glob(str(p))) if file.suffix == ".parquet"]
    return []


def _files_by_name(folder: Path, config: str | None, split: str) -> list[Path]:
    """Return the parquet files named after the split, or else after a synonym; the configuration's folder is tried first."""
    bases = [folder / config, folder / "data" / config] if config else []
    bases += [folder / "data", folder]
    for name in (split, *(word for group in SYNONYMS if split in group for word in group)):
        for base in bases:
            for pattern in (f"{name}-*.parquet", f"{name}.parquet", f"{name}/*.parquet"):
                files = [file for file in base.glob(pattern) if file.is_file()]
                if files:
                    return files
    return []


def _missing_split_message(folder: Path, split: str, others: Sequence[str]) -> str:
    return (
        f"{folder} has no split {split!r}; allowed: {', '.join(others) or 'none'}; choose a split with "
        "datasets.<name>.split=..., or add the files of the split"
    )
