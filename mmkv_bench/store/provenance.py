"""The code, versions and device that made a row. Never host names, user names, paths or environment values."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mmkv_bench import devices
from mmkv_bench.file_state import file_sha256
from mmkv_bench.store.files import canonical_json

PACKAGES = ("torch", "transformers", "lmms_eval", "datasets", "numpy", "pyarrow", "wandb", "hydra-core")
_CODE_FOLDERS = ("mmkv_bench", "conf")  # folders of a checkout whose content can change a number
_ANSWER_ROOMS = (
    "calibrate",
    "compression",
    "datasets",
    "evaluation",
    "families",
    "generation",
    "methods",
    "models",
    "tiny",
)


def collect(device: str = "cpu") -> dict[str, Any]:
    """Return the columns of `cells` about the origin of rows: git state, versions, device, driver and cpu.

    Unknown values are None; unknown torch and transformers are "none". For cpu no heavy package is imported.

    device: where the model runs ("cpu", "cuda", "cuda:1").
    """
    versions = {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
    versions["mmkv_bench"] = source_version()
    git_commit, git_dirty = _git(Path(__file__).resolve().parents[2])
    return {
        "git_commit": git_commit,
        "git_dirty": git_dirty,
        "torch": versions["torch"] or "none",
        "transformers": versions["transformers"] or "none",
        "versions": canonical_json(versions),
        "device": device if device == "cpu" else devices.at(device).name(),
        "driver": None if device == "cpu" else _driver(),
        "cpu": _cpu(),
    }


@cache
def source_files() -> Mapping[str, str]:
    """Map each code file of the package that can affect answers (path in the package) to its sha256.

    Configuration, data and weights are left out, because a cell's hash covers them.
    """
    package = Path(__file__).resolve().parents[1]
    source_paths = (path for room in _ANSWER_ROOMS for path in sorted((package / room).rglob("*.py")))
    return {
        path.relative_to(package).as_posix(): file_sha256(path) for path in (*source_paths, package / "protocols.py")
    }


def source_version() -> str:
    """Return the package's version and 12 digits of a digest of `source_files`: `0.2.0+1a2b3c4d5e6f`."""
    names_and_digests = "".join(f"{name} {digest}\n" for name, digest in source_files().items())
    return f"{version('mmkv-bench') or 'not installed'}+{hashlib.sha256(names_and_digests.encode()).hexdigest()[:12]}"


@cache
def version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def file_in_commit(file: str, commit: str) -> str | None:
    """Return the text of a file in a commit of the package's git checkout, or "" if the commit lacks the file.

    Return None if there is no checkout, no git, or no such commit. file: path in the checkout.
    """
    checkout = Path(__file__).resolve().parents[2]
    try:
        if not _is_checkout(checkout) or not re.fullmatch("[0-9a-f]{7,64}", commit):
            return None
        _run_git(checkout, "cat-file", "-e", f"{commit}^{{commit}}")
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        return _run_git(checkout, "show", f"{commit}:{file}")
    except subprocess.CalledProcessError:
        return ""


def _git(checkout: Path) -> tuple[str | None, bool | None]:
    """Return a checkout's commit, and whether its code has uncommitted changes; (None, None) without a checkout."""
    try:
        if not _is_checkout(checkout):
            return None, None
        commit = _run_git(checkout, "rev-parse", "HEAD")
        return commit, bool(
            _run_git(checkout, "status", "--porcelain", "--untracked-files=normal", "--", *_CODE_FOLDERS)
        )
    except (OSError, subprocess.SubprocessError):
        return None, None


def _is_checkout(folder: Path) -> bool:
    # If the package is installed inside somebody else's repository, that repository's commit would be wrong.
    return Path(_run_git(folder, "rev-parse", "--show-toplevel")).resolve() == folder.resolve()


def _run_git(checkout: Path, *arguments: str) -> str:
    # Inside a git hook the GIT_ variables would point git at another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(checkout), *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=environment)
    return completed.stdout.strip()


def device_name(device: str) -> str:
    """Return the name of the GPU, or of the processor for cpu."""
    return _cpu() or device if device == "cpu" else devices.at(device).name()


def _driver(report: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the NVIDIA kernel driver in `report`, or None."""
    try:
        match = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s", report.read_text(), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else None


def _cpu(report: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the processor's name in `report`, else the kind of machine, else None.

    Family and model are appended if known, because hypervisors shorten names (`AMD EPYC`).
    """
    try:
        cpu_report = report.read_text()
    except OSError:
        cpu_report = ""
    name, family, model = (
        match.group(1).strip() if (match := re.search(rf"^{key}\s*:\s*(.+)$", cpu_report, re.MULTILINE)) else None
        for key in ("model name", "cpu family", "model")
    )
    if name is None:
        return platform.machine() or None
    return name if family is None or model is None else f"{name} (family {family}, model {model})"
