"""Sources of a task's data, checked without lmms-eval, so that a refusal costs no import of it: folders, the hub, its cache."""

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

LOCAL_BUILDERS = {"arrow", "csv", "imagefolder", "json", "parquet", "text", "videofolder"}  # of files named in the YAML


def reads_itself(config: Mapping[str, Any]) -> Any:
    """The loader of a task of ours whose data `datasets` cannot load: `metadata.read` of its YAML; None for others."""
    metadata = config.get("metadata")
    return metadata.get("read") if isinstance(metadata, Mapping) else None


def of_hub(dataset_path: str) -> bool:
    """Return True where a YAML's `dataset_path` is a repository of the hub."""
    return dataset_path not in LOCAL_BUILDERS and not Path(dataset_path).expanduser().exists()


def preflight(spec: TaskSpec) -> None:
    """Refuse data that cannot be had as they are, before lmms-eval or a model is imported.

    Raises:
        MissingDataError: see `source` and `require_upstream`. ConfigError: a task that does not exist.
    """
    if not spec.is_pages:
        path = task_file(spec)
        source(spec, path)
        require_upstream(spec, path)


def local_rows(spec: TaskSpec) -> int | None:
    """Rows of a task's split where its data are local parquet files, from their footers; None for others.

    Raises:
        MissingDataError: see `source`.
    """
    if spec.is_pages or not spec.dataset_path:
        return None
    keys = source(spec, task_file(spec))
    if keys.get("dataset_path") != "parquet":
        return None
    (files,) = keys["dataset_kwargs"]["data_files"].values()
    return local_data.count_rows([Path(file) for file in files])


def source(spec: TaskSpec, path: Path) -> dict[str, Any]:
    """The keys that make a task's YAML read the data that `spec` names; none where it reads its own.

    Args:
        path: the YAML file.

    Raises:
        MissingDataError: data that are not there, of another split, truncated, without a column, rows or without videos.
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
    if media is not None and not media.is_dir():  # one video that is missing is its sample's
        wanted = Path(str(spec.dataset_path)) / local_data.MEDIA / media.name
        raise MissingDataError(
            f"the videos of {spec.dataset} are expected in {media}, which is not there; put them into {wanted}, or set "
            "HF_HOME to the folder that holds them"
        )
    return files.source()


def data_files(spec: TaskSpec) -> list[Path]:
    """The local files that a task's rows are read from, sorted, media that rows name by path not among them; none for
    embedded pages and repositories of the hub. Raises what `source` raises."""
    if spec.is_pages:
        return []
    path = task_file(spec)
    config = plain_config(path)
    replaced = source(spec, path)
    if replaced.get("dataset_path") == "parquet":
        return sorted({Path(file) for files in replaced["dataset_kwargs"]["data_files"].values() for file in files})
    config |= replaced
    place, kwargs = str(config.get("dataset_path")), config.get("dataset_kwargs") or {}
    named = list(_leaves(kwargs.get("data_files"))) if not replaced else []
    folders = [Path(str(part)).expanduser() for part in (place, kwargs.get("data_dir")) if part]
    if named:
        base = folders[0] if folders[0].is_dir() else Path()
        files = {file for name in named for file in _matching(base, name)}
    else:
        files = {file for folder in folders if folder.is_dir() for file in folder.rglob("*")}
    of_media = {folder / local_data.MEDIA for folder in folders}
    return sorted(file for file in files if file.is_file() and not of_media.intersection(file.parents))


def _leaves(value: Any) -> Iterator[str]:
    """The texts in nested lists and mappings."""
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(part)
    elif isinstance(value, str):
        yield value


def _matching(base: Path, name: str) -> list[Path]:
    """Files that a name or pattern of a YAML means."""
    pattern = str(base / Path(name).expanduser())
    return [Path(pattern)] if os.path.exists(pattern) else [Path(file) for file in glob.glob(pattern, recursive=True)]


def require_upstream(spec: TaskSpec, path: Path) -> bool:
    """Refuse a task without local data whose own cannot be had; return whether it takes them from the hub.

    Raises:
        MissingDataError: a repository that the hub does not give and no cache has, or files that only people can get.
    """
    config = plain_config(path)
    repository = str(config.get("dataset_path"))
    if spec.dataset_path:
        return False
    if reads_itself(config):
        obtain = str(config["metadata"].get("obtain") or "").strip()
        if not obtain:  # it writes its own
            return False
        raise MissingDataError(
            f"task {spec.name} reads its data from local folders only: {obtain}, or "
            f"datasets.{spec.dataset}.dataset_path=<folder>"
        )
    if not of_hub(repository):
        return False
    why = refusal(repository, spec.offline)
    if why is not None:
        trial = ", or take data=fixture for a trial" if spec.dataset in fixtures.names() else ""
        raise MissingDataError(
            f"the data of {spec.dataset} cannot be had: {why}; or give them with data.root=<folder>{trial}"
        )
    return True


def videos(media_root: str | None, kwargs: Mapping[str, Any]) -> Path | None:
    """The folder in which a task looks for its videos, by the `dataset_kwargs` of its YAML; None for tasks without."""
    if not kwargs.get("video") or not kwargs.get("cache_dir"):
        return None
    return home(media_root) / str(kwargs["cache_dir"]).strip()


def home(media_root: str | None) -> Path:
    """The value of HF_HOME while a task runs."""
    from huggingface_hub import constants

    return Path(media_root or os.environ.get("HF_HOME") or constants.HF_HOME).expanduser()


DOWNLOAD = "`hf download --repo-type dataset {}` gets it into HF_HOME where there is a connection"
TIMEOUT = 20.0  # seconds that the hub has for an answer


def snapshot(repository: str) -> Path | None:
    """The newest snapshot of a dataset repository in the hub cache, None where there is none."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{repository.replace('/', '--')}" / "snapshots"
    snapshots = sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    return snapshots[-1] if snapshots else None


def converted(repository: str) -> bool:
    """Return True where `datasets` keeps files that it made of the repository."""
    from huggingface_hub import constants

    caches = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    return (Path(caches).expanduser() / repository.replace("/", "___")).is_dir()


def refusal(repository: str, offline: bool) -> str | None:
    """The reason for which a repository's data cannot be had, as a clause; None when they are cached or the hub gives them.

    Costs one request where nothing is cached; without it, libraries would try for minutes before they say so.
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
    """Facts of a dataset repository, or why there are none.

    Args:
        files: ask for the sizes of its files, too.

    Returns:
        `commit`, `changed`, `licence`, `gated`, `files` and `bytes`; or `error`, one sentence.
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
    except Exception as error:  # noqa: BLE001 - httpx, sockets, TLS: all say that there is no way to the hub
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
