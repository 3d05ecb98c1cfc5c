"""Locate and check a task's data in local folders, on the hub and in the hub's cache, without importing lmms-eval."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmkv_bench.datasets import fixtures, local_data
from mmkv_bench.datasets.specs import TaskSpec
from mmkv_bench.datasets.task_yaml import plain_config, task_file
from mmkv_bench.errors import MissingDataError

LOCAL_BUILDERS = {"arrow", "csv", "imagefolder", "json", "parquet", "text", "videofolder"}  # for files in the YAML


def reads_itself(config: Mapping[str, Any]) -> Any:
    """Return `metadata.read` of a task's YAML: a loader of data that `datasets` cannot load, or its name in a plain
    configuration. None without one."""
    metadata = config.get("metadata")
    return metadata.get("read") if isinstance(metadata, Mapping) else None


def of_hub(dataset_path: str) -> bool:
    """Tell whether a YAML's `dataset_path` is a repository of the hub."""
    return dataset_path not in LOCAL_BUILDERS and not Path(dataset_path).expanduser().exists()


def preflight(spec: TaskSpec) -> None:
    """Raise an error if a task's data are not available, before lmms-eval or a model is imported.

    Raises:
        MissingDataError: see `source` and `require_upstream`.
        ConfigError: the task does not exist.
    """
    if not spec.is_pages:
        path = task_file(spec)
        source(spec, path)
        require_upstream(spec, path)


def local_rows(spec: TaskSpec) -> int | None:
    """Return the number of rows of a task's split, from parquet footers; None if the data are not local parquet
    files. Raises the errors of `source`."""
    if spec.is_pages or not spec.dataset_path:
        return None
    keys = source(spec, task_file(spec))
    if keys.get("dataset_path") != "parquet":
        return None
    (files,) = keys["dataset_kwargs"]["data_files"].values()
    return local_data.count_rows([Path(file) for file in files])


def source(spec: TaskSpec, path: Path) -> dict[str, Any]:
    """Return the YAML keys with which a task reads the local data in `spec.dataset_path`; {} if no path is set.

    path: the task's YAML file.

    Raises:
        MissingDataError: the data, their split, a column or the videos' folder are missing, a file is truncated, or
            there are no rows.
    """
    if spec.is_pages or not spec.dataset_path:
        return {}
    config = plain_config(path)
    folder = Path(spec.dataset_path).expanduser()
    if not folder.is_dir():
        raise MissingDataError(
            f"datasets.{spec.dataset}.dataset_path={spec.dataset_path} is not a folder; give the folder with the parquet "
            "files, or one made by datasets' save_to_disk"
        )
    if reads_itself(config):
        return {"dataset_path": str(folder)}
    split = str(spec.split or config.get("test_split") or config.get("validation_split"))
    files = local_data.find(folder, config.get("dataset_name"), split)
    if files.files:
        local_data.require_columns(spec.dataset, spec.columns, local_data.columns(files.files))
        local_data.require_rows(files, local_data.count_rows(files.files))
    media = videos(spec.media_root, config.get("dataset_kwargs") or {})
    if media is not None and not media.is_dir():  # a single missing video fails its sample only
        expected_media = Path(str(spec.dataset_path)) / local_data.MEDIA / media.name
        raise MissingDataError(
            f"the folder {media} with the videos of {spec.dataset} is missing; put the videos into {expected_media}, or set "
            "HF_HOME to the folder that contains them"
        )
    return files.source()


def data_files(spec: TaskSpec) -> list[Path]:
    """Return the local files with a task's rows, sorted, without media that the rows name by path.

    The list is empty for embedded pages and for repositories of the hub. Raises the errors of `source`.
    """
    if spec.is_pages:
        return []
    path = task_file(spec)
    config = plain_config(path)
    replacement_keys = source(spec, path)
    if replacement_keys.get("dataset_path") == "parquet":
        return sorted(
            {Path(file) for files in replacement_keys["dataset_kwargs"]["data_files"].values() for file in files}
        )
    config |= replacement_keys
    dataset_path, kwargs = str(config.get("dataset_path")), config.get("dataset_kwargs") or {}
    data_file_patterns = list(_leaves(kwargs.get("data_files"))) if not replacement_keys else []
    folders = [Path(str(part)).expanduser() for part in (dataset_path, kwargs.get("data_dir")) if part]
    if data_file_patterns:
        base = folders[0] if folders[0].is_dir() else Path()
        files = {file for name in data_file_patterns for file in _matching(base, name)}
    else:
        files = {file for folder in folders if folder.is_dir() for file in folder.rglob("*")}
    media_folders = {folder / local_data.MEDIA for folder in folders}
    return sorted(file for file in files if file.is_file() and not media_folders.intersection(file.parents))


def _leaves(value: Any) -> Iterator[str]:
    """Yield all strings in nested lists and mappings."""
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(part)
    elif isinstance(value, str):
        yield value


def _matching(base: Path, name: str) -> list[Path]:
    """Return the files below `base` that match a file name or glob pattern of a task's YAML."""
    pattern = str(base / Path(name).expanduser())
    return [Path(pattern)] if os.path.exists(pattern) else [Path(file) for file in glob.glob(pattern, recursive=True)]


def require_upstream(spec: TaskSpec, path: Path) -> bool:
    """Return True if a task takes its data from the hub, after checking that the data are available.

    path: the task's YAML file.
    Raises MissingDataError: the repository is neither in a cache nor on the hub, or the files must be fetched by hand.
    """
    config = plain_config(path)
    repository = str(config.get("dataset_path"))
    if spec.dataset_path:
        return False
    if reads_itself(config):
        download_instructions = str(config["metadata"].get("obtain") or "").strip()
        if not download_instructions:  # the task makes its data
            return False
        raise MissingDataError(
            f"task {spec.name} reads its data from local folders only: {download_instructions}, or give the folder with "
            f"datasets.{spec.dataset}.dataset_path=<folder>"
        )
    if not of_hub(repository):
        return False
    reason = refusal(repository, spec.offline)
    if reason is not None:
        fixture_hint = ", or try with data=fixture" if spec.dataset in fixtures.names() else ""
        raise MissingDataError(
            f"the data of {spec.dataset} are not available: {reason}; or give them with data.root=<folder>{fixture_hint}"
        )
    return True


def videos(media_root: str | None, kwargs: Mapping[str, Any]) -> Path | None:
    """Return the folder in which a task expects its videos; None if the task has no videos.

    Args:
        media_root: the folder that replaces $HF_HOME; None: $HF_HOME itself.
        kwargs: `dataset_kwargs` of the task's YAML.
    """
    if not kwargs.get("video") or not kwargs.get("cache_dir"):
        return None
    return home(media_root) / str(kwargs["cache_dir"]).strip()


def home(media_root: str | None) -> Path:
    """Return the folder that HF_HOME names while a task runs. media_root: a folder that replaces $HF_HOME, or None."""
    from huggingface_hub import constants

    return Path(media_root or os.environ.get("HF_HOME") or constants.HF_HOME).expanduser()


DOWNLOAD = "with a connection, `hf download --repo-type dataset {}` downloads it into HF_HOME"
TIMEOUT = 20.0  # seconds to wait for the hub


def snapshot(repository: str) -> Path | None:
    """Return the newest snapshot folder of a dataset repository in the hub's cache; None if there is no snapshot."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{repository.replace('/', '--')}" / "snapshots"
    snapshots = sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    return snapshots[-1] if snapshots else None


def converted(repository: str) -> bool:
    """Tell whether the cache of `datasets` has files converted from the repository."""
    from huggingface_hub import constants

    caches = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    return (Path(caches).expanduser() / repository.replace("/", "___")).is_dir()


def refusal(repository: str, offline: bool) -> str | None:
    """Return a clause that explains why a repository's data are not available; None if they are cached or can
    be downloaded.

    If nothing is cached, one request is made to the hub, unless `offline`; libraries would retry for minutes.
    """
    if snapshot(repository) is not None or converted(repository):
        return None
    if offline:
        return (
            f"{repository} is not in the hub cache, and connections are not allowed (offline=false allows them); "
            + DOWNLOAD.format(repository)
        )
    return ask(repository, files=False).get("error")


def ask(repository: str, files: bool = True) -> dict[str, Any]:
    """Ask the hub about a dataset repository. files: also ask for the sizes of the repository's files.

    Returns:
        The keys `commit`, `changed`, `licence`, `gated`, `files` and `bytes`; or the key `error` with one sentence.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        info = HfApi().dataset_info(repository, files_metadata=files, timeout=TIMEOUT)
    except GatedRepoError:
        return {"error": f"{repository} is gated; accept its terms on the hub and log in with `hf auth login`"}
    except RepositoryNotFoundError:
        return {"error": f"{repository} is not on the hub, or private; check the name, or log in with `hf auth login`"}
    except OfflineModeIsEnabled:
        return {"error": f"HF_HUB_OFFLINE is set, so the hub was not asked; {DOWNLOAD.format(repository)}"}
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        return {"error": f"the hub answered {status} for {repository}; try again later"}
    except Exception as error:  # noqa: BLE001 - httpx, sockets, TLS: all mean that the hub cannot be reached
        return {"error": f"the hub cannot be reached ({type(error).__name__}); check the network"}
    listed = info.siblings or []
    return {
        "commit": info.sha,
        "changed": info.last_modified.date().isoformat() if info.last_modified else None,
        "licence": (info.card_data or {}).get("license"),
        "gated": bool(info.gated),
        "files": len(listed),
        "bytes": sum(file.size or 0 for file in listed),
    }
