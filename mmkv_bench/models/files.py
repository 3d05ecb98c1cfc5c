"""Files of a model in a folder or in the hub's cache: checksums, and error messages for files that cannot be loaded."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mmkv_bench.errors import ConfigError
from mmkv_bench.file_state import digest_of

GGUF = ".gguf"
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_REPORTS = {"card.json"}  # reports of measurements, which do not change a model's answers
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_gguf(path: str | Path) -> bool:
    """Tell whether a path is an existing file with a GGUF name."""
    return str(path).endswith(GGUF) and Path(path).is_file()


def model_files(folder: Path) -> list[Path]:
    """Return the files that determine the model's answers, sorted by name; shards in subfolders are included.

    Raises ConfigError: no config.json, no safetensors weights, two checkpoints, or missing shards of an index.
    """
    if is_gguf(folder):
        return [folder]
    top_level_files = {
        file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file() and file.name not in _REPORTS
    }
    shards = {shard for index in folder.glob("*.safetensors.index.json") for shard in _shards(index)}
    files = sorted(top_level_files | shards)
    names = {file.name for file in files}
    if "config.json" not in names:
        nested = sorted({config.parent for config in folder.glob("*/config.json")} | {*folder.glob(f"*{GGUF}")})
        if nested:
            raise ConfigError(
                f"model folder {folder} has no config.json, but {len(nested)} checkpoints; give one of these folders, such as "
                f"{nested[0]}"
            )
        raise ConfigError(f"model folder {folder} has no config.json; give the folder of a Hugging Face checkpoint")
    single_weights_file = folder / "model.safetensors"
    if shards and single_weights_file in top_level_files - shards:
        raise ConfigError(
            f"model folder {folder} has two checkpoints, model.safetensors and the shards of an index; remove one of the two"
        )
    if not any(name.endswith(".safetensors") for name in names):
        raise ConfigError(
            f"model folder {folder} has no *.safetensors, and pickled weights are never loaded; convert the weights with "
            "model.save_pretrained(folder)"
        )
    return files


def folder_fingerprint(folder: str | Path, cache: Path | None = None) -> str:
    """Return the fingerprint of a model folder: 16 hex digits of a sha256 over names and contents of `model_files(folder)`.

    Checksums of unchanged files (see `file_state`) come from the cache.

    Args:
        folder: model folder, or a GGUF file.
        cache: cache folder; None: `cache_dir()`.

    Raises:
        ConfigError: see `model_files`; or a file is written while it is read.
    """
    root = Path(folder)
    if is_gguf(root):
        return digest_of([("", root)], cache)[:16]  # content only: a renamed file keeps its fingerprint
    return digest_of(((file.relative_to(root).as_posix(), file) for file in model_files(root)), cache)[:16]


def _shards(index: Path) -> set[Path]:
    """Return the weight files that an index file (`*.safetensors.index.json`) names."""
    try:
        shard_names = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index} is not an index of weights; copy or download it again") from None
    shards = {index.parent / name for name in shard_names}
    names_outside_folder = sorted(name for name in shard_names if Path(name).is_absolute() or ".." in Path(name).parts)
    missing = sorted(shard.name for shard in shards if not shard.is_file())
    if names_outside_folder:
        raise ConfigError(
            f"{index} names weights outside its folder ({names_outside_folder[0]}); give a checkpoint that is in one folder"
        )
    if missing:
        raise ConfigError(f"{index.parent} lacks {missing[0]}, one of {len(shards)} shards; copy or download it again")
    return shards


def hub_fingerprint(path: str, commit: str) -> str:
    """Return the fingerprint of a hub id's weights: 16 hex digits of a sha256 over id and commit."""
    return hashlib.sha256(f"{path}@{commit}".encode()).hexdigest()[:16]


@functools.cache
def hub_folder(path: str, revision: str | None) -> Path:
    """Return the folder in the hub's cache with a repository's config.json, fetched if missing; the folder's name is the commit.

    path: the repository's id. revision: a commit, branch or tag; None: the default branch.

    Raises ConfigError: the repository is not available, or the commit is unknown.
    """
    from huggingface_hub import hf_hub_download

    try:
        folder = Path(hf_hub_download(path, "config.json", revision=revision)).parent
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(sentence(path, revision, error)) from error
    if not _COMMIT.fullmatch(folder.name):
        raise ConfigError(
            f"the commit of hub model {path} is unknown; name one with model.revision=<commit>, or give a local folder"
        )
    return folder


def cached_folder(path: str, revision: str | None) -> Path | None:
    """Return the folder of `hub_folder` if it is in the local cache, otherwise None; makes no connection."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(path, "config.json", revision=revision)
    folder = Path(file).parent if isinstance(file, str) else None
    return folder if folder is not None and _COMMIT.fullmatch(folder.name) else None


_LONGEST = 200  # characters of a library's error text in a message


def sentence(path: str, revision: str | None, error: BaseException) -> str:
    """Return the message for a model that cannot be loaded because of an error of transformers or the hub's client."""
    path_setting = f"model.path={path}"
    if path.startswith((".", "/", "~")) or os.path.exists(path):
        if not Path(path).is_dir() and not is_gguf(path):
            return f"{path_setting} does not exist; give the folder of a Hugging Face checkpoint, or a hub id"
    else:
        causes = list(_causes(error))
        reports = [_hub_error_message(path_setting, revision, cause) for cause in causes] + [
            _connection_error_message(path_setting, cause) for cause in causes
        ]
        if reported := next(filter(None, reports), None):
            return reported
    reason = _first_line(error)
    if "trust_remote_code" in str(error):
        reason = "it needs code from the repository, which is never run"
    return f"{path_setting} cannot be loaded ({reason}); give a folder with config.json and *.safetensors, or a hub id"


def _hub_error_message(what: str, revision: str | None, cause: BaseException) -> str | None:
    """Return the message for an error response of the hub; None for other errors. what: the setting that names the model."""
    from huggingface_hub import errors

    if isinstance(cause, errors.GatedRepoError):
        return (
            f"{what} is a gated repository and this machine may not read it; accept its terms on its page, log in with "
            "`hf auth login`, or give a local folder"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{what} has no revision {revision!r}; give a branch, tag or commit with model.revision=<commit>"
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, errors.RepositoryNotFoundError) or status in (401, 403):
        return (
            f"{what} is not a repository of the hub, or a private one that needs a login (`hf auth login`); check the id, "
            "or give a local folder"
        )
    if isinstance(cause, errors.HfHubHTTPError) and status is not None:
        return f"{what}: the hub answered {status} ({_first_line(cause)}); try again later, or give a local folder"
    return None


def _connection_error_message(what: str, cause: BaseException) -> str | None:
    """Return the message for a hub that cannot be reached; None for other errors. what: the setting that names the model."""
    import httpx
    from huggingface_hub import errors

    network = httpx.TransportError, ConnectionError, TimeoutError
    if isinstance(cause, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, *network)):
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        state = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        return (
            f"{what} is not in the local cache, and {state}; connect and run again, or give a local folder with "
            "model.weights=<folder>"
        )
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes, innermost last."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."  # transformers may list all its classes
