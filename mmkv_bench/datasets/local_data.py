"""A dataset's files in a local folder: those of one configuration and split, laid out as hub repositories lay them out.

A folder may be a clone of the upstream repository (its README.md says which files are which split), one written by
`DatasetDict.save_to_disk`, or simply `data/<split>-*.parquet`. Splits keep their upstream names, whatever they are.
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

MEDIA = "media"  # below a dataset's folder; stands for $HF_HOME, where tasks look for videos
SAVED = "dataset_dict.json"
SYNONYMS = (("validation", "val", "valid", "dev"), ("test", "testing", "eval", "evaluation"), ("train", "training"))
OTHER_FILES = ("*.json", "*.jsonl", "*.csv", "*.arrow", "*.txt")  # left to the builders of `datasets`
OTHER_MEDIA = ("video", "audio")  # in the names of columns whose {bytes, path} are no pictures


@dataclass(frozen=True)
class LocalFiles:
    """Files of one split.

    kind    `parquet`: `files` are its parts; `saved`: the folder is of save_to_disk; `other`: `datasets` finds out
    """

    folder: Path
    split: str
    kind: str
    files: tuple[Path, ...] = ()

    def source(self) -> dict[str, Any]:
        """The keys of a task's YAML that make it read these files."""
        if self.kind == "parquet":
            files = {self.split: [str(file) for file in self.files]}
            return {"dataset_path": "parquet", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
        kwargs = {"load_from_disk": True} if self.kind == "saved" else {}
        return {"dataset_path": str(self.folder), "dataset_name": None, "dataset_kwargs": kwargs}


def media_root(folder: Path) -> str | None:
    """The folder that stands for $HF_HOME, if the dataset brings one."""
    return str(folder / MEDIA) if (folder / MEDIA).is_dir() else None


def find(folder: Path, config: str | None, split: str) -> LocalFiles:
    """The files of a split.

    Args:
        config: the upstream configuration (`dataset_name` of a task), None where there is one only.

    Raises:
        MissingDataError: an empty folder, or one with other splits only.
    """
    if (folder / SAVED).is_file():
        splits = [str(name) for name in json.loads((folder / SAVED).read_text()).get("splits", [])]
        if split not in splits:
            raise MissingDataError(_no_split(folder, split, splits))
        return LocalFiles(folder, split, "saved")
    files = _listed(folder, config, split) or _named(folder, config, split)
    if files:
        return LocalFiles(folder, split, "parquet", tuple(sorted(files)))
    parquet = [file for file in folder.rglob("*.parquet") if MEDIA not in file.relative_to(folder).parts]
    if parquet:
        raise MissingDataError(_no_split(folder, split, sorted({file.stem.split("-")[0] for file in parquet})))
    if any(next(folder.rglob(pattern), None) for pattern in OTHER_FILES):
        return LocalFiles(folder, split, "other")
    raise MissingDataError(
        f"{folder} holds no data files; put data/{split}-00000-of-00001.parquet in the upstream schema there, or a "
        "clone of the upstream repository"
    )


def columns(files: Sequence[Path]) -> list[str]:
    """Column names of parquet files, from their footers.

    Raises:
        MissingDataError: a file that is truncated or no parquet file, or files that disagree.
    """
    import pyarrow.parquet as pq

    names_of: dict[Path, list[str]] = {}
    for file in files:
        try:
            names_of[file] = list(pq.read_schema(file).names)
        except Exception as error:
            reason = str(error).splitlines()[0].split(". ")[0].rstrip(".")
            raise MissingDataError(
                f"{file} is truncated or no parquet file ({reason}); copy or download it again"
            ) from error
    first = files[0]
    for file, names in names_of.items():
        if set(names) != set(names_of[first]):
            odd = sorted(set(names) ^ set(names_of[first]))
            raise MissingDataError(
                f"{file} and {first.name} differ in columns {', '.join(odd)}; give files of one version"
            )
    return names_of[first]


def require_columns(dataset: str, wanted: Iterable[str], present: Iterable[str]) -> None:
    """Raise MissingDataError that names the columns which the task reads and the data have not."""
    present = list(present)
    missing = [name for name in wanted if name not in present]
    if missing:
        raise MissingDataError(
            f"the data of {dataset} lack column{'s' * (len(missing) > 1)} {', '.join(missing)}, which its task reads; "
            f"they have {', '.join(present)}; give data in the upstream schema"
        )


def count_rows(files: Sequence[Path]) -> int:
    """Rows of parquet files, from their footers."""
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(file).num_rows for file in files)


def require_readable(files: LocalFiles) -> None:
    """Read what tells a damaged file from a whole one: the first and the last rows of parquet files, all of JSON files.

    Raises:
        MissingDataError: a file whose rows cannot be read.
    """
    import pyarrow.parquet as pq

    for file in files.files:
        try:
            opened = pq.ParquetFile(file)
            for group in {0, opened.num_row_groups - 1} if opened.num_row_groups else ():
                opened.read_row_group(group)
        except Exception as error:
            raise _damaged(file, error) from error
    for file in sorted(files.folder.rglob("*.json")) if files.kind == "other" else ():
        try:
            json.loads(file.read_text())
        except ValueError as error:
            lines = [line for line in file.read_text(errors="replace").split("\n") if line.strip()]
            if not lines or any(_is_damaged(line) for line in (lines[0], lines[-1])):  # JSON Lines under that name
                raise _damaged(file, error) from error


def _is_damaged(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _damaged(file: Path, error: Exception) -> MissingDataError:
    reason = str(error).splitlines()[0].rstrip(".")
    return MissingDataError(f"{file} cannot be read ({reason}); copy or download it again")


def require_rows(files: LocalFiles, rows: int | None) -> None:
    """Raise MissingDataError for a split whose number of `rows` is known to be 0."""
    if rows == 0:
        raise MissingDataError(f"split {files.split} of {files.folder} has no rows; give the upstream files")


def picture_features(files: Sequence[str]) -> datasets.Features | None:
    """Features that make pictures of the columns which hold them as plain {bytes, path}, or as lists of these.

    Files that `datasets` wrote say which columns are pictures; those of pandas or pyarrow do not, and the task would get
    dicts. None where every such column is declared. As in `datasets`, the first file's schema is that of all.
    """
    import pyarrow.parquet as pq
    from datasets import Features, Image, List

    features = Features.from_arrow_schema(pq.read_schema(files[0]))
    pictures: dict[str, Any] = {}
    for name, feature in features.items():
        if any(word in name.lower() for word in OTHER_MEDIA):
            continue
        if _holds_picture(feature):
            pictures[name] = Image()
        elif isinstance(feature, List) and _holds_picture(feature.feature):
            pictures[name] = List(Image())
    return Features({**features, **pictures}) if pictures else None


def _holds_picture(feature: Any) -> bool:
    if not isinstance(feature, dict) or set(feature) != {"bytes", "path"}:
        return False
    kinds = {name: getattr(value, "dtype", None) for name, value in feature.items()}
    return kinds["bytes"] in ("binary", "large_binary") and kinds["path"] in ("string", "large_string", "null")


def _listed(folder: Path, config: str | None, split: str) -> list[Path]:
    """Files that the front matter of README.md names for the split."""
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
    chosen = [entry for entry in configs if entry.get("config_name") == (config or "default")] or configs[:1]
    if config is not None and chosen and chosen[0].get("config_name") != config:
        return []
    for entry in chosen:
        for part in entry.get("data_files") or []:
            if isinstance(part, dict) and str(part.get("split")) == split:
                patterns = part.get("path")
                patterns = [patterns] if isinstance(patterns, str) else list(patterns or [])
                return [file for p in patterns for file in sorted(folder.glob(str(p))) if file.suffix == ".parquet"]
    return []


def _named(folder: Path, config: str | None, split: str) -> list[Path]:
    """Files whose names tell the split; those of the configuration's own folder first, exact names before synonyms."""
    bases = [folder / config, folder / "data" / config] if config else []
    bases += [folder / "data", folder]
    for name in (split, *(word for group in SYNONYMS if split in group for word in group)):
        for base in bases:
            for pattern in (f"{name}-*.parquet", f"{name}.parquet", f"{name}/*.parquet"):
                files = [file for file in base.glob(pattern) if file.is_file()]
                if files:
                    return files
    return []


def _no_split(folder: Path, split: str, others: Sequence[str]) -> str:
    return (
        f"{folder} has no split {split!r}; it has {', '.join(others) or 'none'}; choose one of these with "
        "datasets.<name>.split=..., or add the files of the split"
    )
