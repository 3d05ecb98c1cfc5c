"""Checksums of what a model computes with: weights, configuration and processor files of a folder, the commit of a hub id."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmkv_bench.errors import ConfigError

_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_REPORTS = {"card.json"}  # what was measured of a model does not change what it answers
_BLOCK = 1 << 22


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

    The checksum of a file is remembered by its path, size and modification time, so that gigabytes of weights are read
    once; a cache that cannot be written costs time only.

    Args:
        folder: model folder; cache: cache folder, `cache_dir()` by default.
    """
    files = model_files(Path(folder))
    memory = _Memory((cache or cache_dir()) / "fingerprints.json")
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.name}\0{memory.digest(file)}\n".encode())
    memory.save()
    return whole.hexdigest()[:16]


def model_fingerprint(path: str, hf_config: Any) -> tuple[str, str | None]:
    """What identifies a model's weights: rows of a run and calibration artefacts carry the same one.

    Args:
        path: local folder or hub id; hf_config: its configuration, which knows the commit that a hub id resolved to.

    Returns:
        The fingerprint, 16 hex digits, and the commit (None for a folder).

    Raises:
        ConfigError: see `model_files` and `hub_commit`.
    """
    if Path(path).is_dir():
        return folder_fingerprint(path), None
    commit = hub_commit(path, hf_config)
    return hashlib.sha256(f"{path}@{commit}".encode()).hexdigest()[:16], commit


def hub_commit(path: str, hf_config: Any) -> str:
    """The commit that a hub id resolved to when its configuration was read.

    Raises:
        ConfigError: transformers did not say, so rows could not tell which weights made them.
    """
    commit = getattr(hf_config, "_commit_hash", None)
    if not commit:
        raise ConfigError(
            f"the commit of hub model {path} is unknown; name one with model.revision=<commit>, or give a local folder"
        )
    return commit


class _Memory:
    """Checksums of files seen before, in one JSON file written by rename."""

    def __init__(self, file: Path):
        self.file, self.new = file, {}
        try:
            known = json.loads(file.read_text())
        except (OSError, ValueError):
            known = {}
        self.known: dict[str, str] = known if isinstance(known, dict) else {}

    def digest(self, file: Path) -> str:
        stat = file.stat()
        key = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in self.known:
            self.known[key] = self.new[key] = _sha256(file)
        return self.known[key]

    def save(self) -> None:
        if not self.new:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=".fingerprints")
            with os.fdopen(handle, "w") as stream:
                json.dump(self.known, stream)
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
