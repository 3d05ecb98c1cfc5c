"""Python files that a version stands for: those of the standard library and of installed packages."""

from __future__ import annotations

import site
import sysconfig
from functools import cache
from pathlib import Path


@cache
def installed() -> tuple[Path, ...]:
    """Folders of the standard library, of installed packages, and this package."""
    paths = sysconfig.get_paths()
    names = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {*site.getsitepackages()}
    names |= {site.getusersitepackages(), str(Path(__file__).parent)}
    return tuple(dict.fromkeys(Path(name).resolve() for name in names))


def is_installed(file: Path) -> bool:
    """True for a resolved path in one of these folders."""
    return any(file.is_relative_to(folder) for folder in installed())
