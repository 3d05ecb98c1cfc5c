"""A task's modules as Python sees them: compiled from the source that the task's digest is of, never from kept bytecode.

Python takes the bytecode in `__pycache__` where a source has the size and the time of modification that it was made of. A file
that is replaced by one of equal size with its time kept (cp -p, tar, rsync -t) would be run as it was before. lmms-eval's own
tasks keep their bytecode: its version stands for them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from mmkv_bench.installed import is_installed

_PACKAGES = {"site-packages", "dist-packages"}
_folders: set[Path] = set()


class SourceOnly(SourceFileLoader):
    """Reads and writes no bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return _compiled(self.get_data(path), path)


@lru_cache(maxsize=256)
def _compiled(source: bytes, path: str) -> CodeType:
    """Of equal bytes once: a task's module is run anew for each function that its YAML names."""
    return compile(source, path, "exec", dont_inherit=True)


def executed(name: str, file: Path, source_only: bool) -> ModuleType:
    """The module of a file, executed anew and not entered in `sys.modules`. Raises what its code raises."""
    loader = SourceOnly(name, str(file)) if source_only else SourceFileLoader(name, str(file))
    spec = spec_from_file_location(name, file, loader=loader)
    assert spec is not None, "a file with a loader has a spec"
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def import_from_source(folders: Iterable[Path]) -> None:
    """Have modules in and below a task's folders, and elsewhere outside of installed packages, imported from their sources from
    now on, whoever imports them: a task's code imports some only when a prompt is made."""
    new = {folder.resolve() for folder in folders} - _folders
    if not new:
        return
    _folders.update(new)
    if _finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder)
    for place in [place for place in sys.path_importer_cache if _of_task(place)]:
        del sys.path_importer_cache[place]


def _finder(place: str) -> FileFinder:
    """What finds the modules of a folder (a hook of `sys.path_hooks`). Raises ImportError for folders whose bytecode counts."""
    if not _of_task(place):
        raise ImportError(f"{place} may keep its bytecode", path=place)
    return FileFinder(
        place,
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (SourceOnly, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),  # a module without a source, whose digest is of this
    )


def _of_task(place: str) -> bool:
    """Whether modules of a folder may be a task's code: no version stands for them."""
    path = Path(place).resolve()
    if any(path.is_relative_to(folder) and _own(path.relative_to(folder)) for folder in _folders):
        return path.is_dir()
    return path.is_dir() and _own(path) and not is_installed(path)


def _own(path: Path) -> bool:
    return _PACKAGES.isdisjoint(path.parts)
