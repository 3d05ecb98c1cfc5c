"""Checksums of what a model computes with: weights, configuration and processor files of a folder, the commit of a hub id."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from mmkv_bench.errors import ConfigError
from mmkv_bench.file_state import outlives_the_process, state_of

_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_REPORTS = {"card.json"}  # what was measured of a model does not change what it answers
_BLOCK = 1 << 22
_COMMIT = re.compile(r"[0-9a-f]{40}")


def cache_dir() -> Path:
    """Where checksums are remembered: `$MMKV_BENCH_CACHE`, else `$XDG_CACHE_HOME/mmkv_bench`, else `~/.cache/mmkv_bench`."""
    own = os.environ.get("MMKV_BENCH_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "mmkv_bench"


def model_files(folder: Path) -> list[Path]:
    """The files that decide what the model answers, sorted by name; model cards and optimizer states are not among them.

    Raises:
        ConfigError: no config.json, or no weights in safetensors form.
    """
    found = sorted(
        {file for pattern in _PATTERNS for file in folder.glob(pattern) if file.is_file() and file.name not in _REPORTS}
    )
    names = {file.name for file in found}
    if "config.json" not in names:
        raise ConfigError(f"model folder {folder} has no config.json; give the folder of a Hugging Face checkpoint")
    if not any(name.endswith(".safetensors") for name in names):
        raise ConfigError(
            f"model folder {folder} has no *.safetensors; only safetensors are loaded, never pickled weights; convert it "
            "with model.save_pretrained(folder)"
        )
    return found


def folder_fingerprint(folder: str | Path, cache: Path | None = None) -> str:
    """First 16 hex digits of a sha256 over names and contents of `model_files(folder)`.

    The checksum of a file is remembered with its state (see `file_state`), so that gigabytes of weights are read once and
    replaced ones never taken for the old; a cache that cannot be written costs time only.

    Args:
        folder: model folder; cache: cache folder, `cache_dir()` by default.

    Raises:
        ConfigError: see `model_files`; a file that is written while it is read.
    """
    files = model_files(Path(folder))
    memory = _Memory((cache or cache_dir()) / "checksums.json")
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.name}\0{memory.digest(file)}\n".encode())
    memory.save()
    return whole.hexdigest()[:16]


def hub_fingerprint(path: str, commit: str) -> str:
    """What identifies the weights of a hub id: 16 hex digits of a sha256 over id and commit."""
    return hashlib.sha256(f"{path}@{commit}".encode()).hexdigest()[:16]


def hub_commit(path: str, revision: str | None) -> str:
    """The commit that a revision of a hub id is now, or was when the local cache last saw it: see `hub_folder`."""
    return hub_folder(path, revision).name  # the cache keeps files in snapshots/<commit>/


@functools.cache
def hub_folder(path: str, revision: str | None) -> Path:
    """The folder of the local cache that holds the config.json of a hub id's revision, which is fetched if need be.

    Found out once in a process: everything of a run is read at this commit, so that rows name the weights that made them.

    Raises:
        ConfigError: a repository that cannot be had, or a cache that does not say the commit.
    """
    from huggingface_hub import hf_hub_download

    from mmkv_bench.models.hub_errors import sentence

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
    """As `hub_folder`, of what the local cache has; nobody is asked."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(path, "config.json", revision=revision)
    folder = Path(file).parent if isinstance(file, str) else None
    return folder if folder is not None and _COMMIT.fullmatch(folder.name) else None


class _Memory:
    """Checksums of files seen before, in one JSON file written by rename: path -> the file's state, then its sha256."""

    here: ClassVar[dict[str, list[Any]]] = {}
    """What this process has read itself. It holds what cannot be written down too, so that a look after the weights were
    loaded reads nothing again."""

    def __init__(self, file: Path):
        self.file = file
        self.new: dict[str, list[Any]] = {}
        self.known = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def digest(self, file: Path) -> str:
        path, state = str(file.resolve()), state_of(file)
        for known in (self.here.get(path), self.known.get(path)):
            if isinstance(known, list) and known[:-1] == list(state):
                return known[-1]
        found = _sha256(file)
        if state_of(file) != state:
            raise ConfigError(f"{file} changed while its checksum was made; start the run when it is written")
        if state.settled:
            self.here[path] = [*state, found]
        if outlives_the_process(file, state):
            self.new[path] = [*state, found]
        return found

    def save(self) -> None:
        if not self.new:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=".checksums")
            with os.fdopen(handle, "w") as stream:
                json.dump(self._read() | self.new, stream)
            os.replace(name, self.file)
        except OSError:
            return


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    for block in _blocks(file):
        digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path) -> Iterable[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            yield block
