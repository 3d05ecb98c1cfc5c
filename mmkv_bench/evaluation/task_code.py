"""A task's code: which files are part of a cell's identity, which reads go unnoticed, and how its modules are imported.

While a prompt is made, files opened by Python are recorded (audit event `open`, PEP 578). Readers written in C open files
without this event, and environment variables are read without any event. So prompts of a user's task are made again in every
run.

Modules are compiled from the source that the task's digest covers, never from kept bytecode. Python uses the bytecode in
`__pycache__` if the source has the size and modification time for which it was made. A file replaced by another of equal size
and time (cp -p, tar, rsync -t) would run as before. lmms-eval's own tasks keep their bytecode, because its version identifies
them.
"""

from __future__ import annotations

import ast
import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from mmkv_bench.datasets.task_yaml import includes, lmms_eval_folder
from mmkv_bench.errors import DataError, MMKVError
from mmkv_bench.file_state import State, is_installed

_KNOWN_MODULES = sys.stdlib_module_names | {
    *("PIL", "numpy", "datasets", "yaml", "regex", "loguru", "tqdm", "lmms_eval", "mmkv_bench"),
}
"""Modules that belong to no task."""
SUFFIXES = (".py", ".pyc", ".so", ".pyd")  # files that Python imports from a folder
_DYNAMIC_IMPORTERS = {"importlib", "runpy", "imp"}
_CODE_RUNNING_BUILTINS = {f"__{'import'}__", "exec", "eval"}  # calls that import or run something not named in the file


ANY = "*"  # stands for names that are not in the code's text


def digests(path: Path) -> list[str]:
    """Return digests of all code that a task's YAML files (with includes) can reach (see `_reachable_code`); none for
    lmms-eval's tasks."""
    names = {item for folder in folders(path) for item in _reachable_code(folder).items()}
    return sorted(f"{name}:{hashlib.sha256(file.read_bytes()).hexdigest()}" for name, file in names)


def files(path: Path) -> list[Path]:
    """Return the YAML and Python files of a task, sorted, without lmms-eval's own."""
    code = {file for folder in folders(path) for file in _reachable_code(folder).values()}
    return sorted(code | {file for file in _yaml(path) if not shipped(file)})


def _yaml(path: Path) -> Iterator[Path]:
    yield path
    for included in includes(path):
        yield from _yaml(included)


def shipped(file: Path) -> bool:
    """Return True if a file belongs to lmms-eval."""
    return file.resolve().is_relative_to(lmms_eval_folder().resolve())


def folders(path: Path) -> set[Path]:
    """Return the folders of a task's YAML files, included ones too, without lmms-eval's own."""
    return {file.resolve().parent for file in _yaml(path) if not shipped(file)}


def _reachable_code(folder: Path) -> dict[str, Path]:
    """Return name -> code file, for all files that a task in `folder` can reach.

    These are files in the folder, packages below it that they import, and other modules that are not installed packages. Call
    this after the task's import, so that those modules can be found.
    """
    files = {file.name: file for file in folder.iterdir() if file.name.endswith(SUFFIXES) and file.is_file()}
    subfolders = {part.name for part in folder.iterdir() if part.is_dir() and part.name[0] != "."}
    files_to_read, visited_modules = (
        list(files.values()),
        {file.partition(".")[0] for file in files} - subfolders | {ANY},
    )
    while files_to_read:
        imports = _imports(files_to_read.pop().read_bytes())
        names = (imports | (subfolders if ANY in imports else set())) - visited_modules
        visited_modules |= names
        for name in names:
            new_files = _modules(name, folder / name) if name in subfolders else _external_module(name)
            files |= new_files
            files_to_read += new_files.values()
    return files


def _external_module(name: str) -> dict[str, Path]:
    if name in _KNOWN_MODULES:
        return {}
    try:
        module_spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return {}
    origin_path = Path(module_spec.origin or "").resolve() if module_spec else Path()
    if module_spec is None or not origin_path.is_file() or is_installed(origin_path):
        return {}
    return (
        _modules(name, origin_path.parent)
        if module_spec.submodule_search_locations
        else {origin_path.name: origin_path}
    )


def _modules(name: str, package: Path) -> dict[str, Path]:
    """Return the importable files (`SUFFIXES`) of a package by name, without hidden folders and `__pycache__`."""
    modules, visited_folders = dict[str, Path](), set[str]()
    for place, below, names in os.walk(package, followlinks=True):
        if (real_path := os.path.realpath(place)) in visited_folders:
            below.clear()
            continue
        visited_folders.add(real_path)
        below[:] = [part for part in sorted(below) if part[0] != "." and part != "__pycache__"]
        files = [Path(place, file) for file in names if file.endswith(SUFFIXES)]
        modules |= {(Path(name) / file.relative_to(package)).as_posix(): file for file in files}
    return modules


@lru_cache(maxsize=4096)
def _imports(code: bytes) -> frozenset[str]:
    """Return the top-level packages that a file imports, with `ANY` for computed names; empty if the file is not Python."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):
        return frozenset()
    imports = set[str]()
    for node in nodes:
        match node:
            case ast.Import(names=names):
                imports |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=None, names=names):
                imports |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module)):
                imports.add(module.partition(".")[0])
            case ast.Name(id=name) if name in _CODE_RUNNING_BUILTINS:
                imports.add(ANY)
    return frozenset(imports | ({ANY} if imports & _DYNAMIC_IMPORTERS else set()))


_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
_folders: set[Path] = set()


class SourceOnly(SourceFileLoader):
    """A loader that reads and writes no bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return _compiled(self.get_data(path), path)


@lru_cache(maxsize=256)
def _compiled(source: bytes, path: str) -> CodeType:
    """Compile a source. Cached, because a task's module is executed anew for each function that its YAML names."""
    return compile(source, path, "exec", dont_inherit=True)


def executed(name: str, file: Path, source_only: bool) -> ModuleType:
    """Execute a file as a module and return the module, without an entry in `sys.modules`.

    source_only: read and write no bytecode.
    """
    loader = SourceOnly(name, str(file)) if source_only else SourceFileLoader(name, str(file))
    spec = spec_from_file_location(name, file, loader=loader)
    assert spec is not None, "a file with a loader has a spec"
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def import_from_source(folders: Iterable[Path]) -> None:
    """Make this process import modules in or below a task's folders, or elsewhere outside of installed packages, from
    their sources.

    The effect is permanent, because a task's code imports some modules only when a prompt is made.
    """
    new_folders = {folder.resolve() for folder in folders} - _folders
    if not new_folders:
        return
    _folders.update(new_folders)
    if _finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder)
    for place in [place for place in sys.path_importer_cache if _of_task(place)]:
        del sys.path_importer_cache[place]


def _finder(place: str) -> FileFinder:
    """Return a finder that imports a folder's modules from their sources (a hook of `sys.path_hooks`).

    Raises:
        ImportError: the folder contains no task's code, so that Python's own finder is used.
    """
    if not _of_task(place):
        raise ImportError(f"{place} may keep its bytecode", path=place)
    return FileFinder(
        place,
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (SourceOnly, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),  # a module without a source, whose digest covers the bytecode
    )


def _of_task(place: str) -> bool:
    """Return True if modules in a folder may be a task's code, which no version number identifies."""
    path = Path(place).resolve()
    if any(path.is_relative_to(folder) and _outside_packages(path.relative_to(folder)) for folder in _folders):
        return path.is_dir()
    return path.is_dir() and _outside_packages(path) and not is_installed(path)


def _outside_packages(path: Path) -> bool:
    return _PACKAGE_FOLDERS.isdisjoint(path.parts)


_UNTRACEABLE_EVENTS = {
    *("os.listdir", "os.scandir", "glob.glob", "subprocess.Popen", "os.system", "os.posix_spawn", "os.fork"),
    "socket.connect",
}
_KERNEL_FILES = ("/proc/", "/sys/", "/dev/")  # made by the kernel, without a size
_listeners: list[OpenedFiles] = []
_hooked = False


class OpenedFiles:
    """Files that were opened for reading: path to its state before, or None if there was no file.

    `traceable`: whether all paths are absolute (relative paths depend on the working folder) and nothing but files was read.
    """

    def __init__(self) -> None:
        self.files: dict[str, State | None] = {}
        self.traceable = True

    def hear(self, path: object, flags: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # an open descriptor, whose own opening was recorded
        name = os.fsdecode(path)
        is_write = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if is_write or name in self.files or name.endswith(SUFFIXES):
            return  # an import: versions of packages cover it
        self.traceable &= os.path.isabs(name)
        try:
            status = os.stat(name)
        except OSError:
            self.files[name] = None
            return
        if stat.S_ISREG(status.st_mode) and not name.startswith(_KERNEL_FILES):
            self.files[name] = State.of(status)


@contextmanager
def opened() -> Iterator[OpenedFiles]:
    """Context manager that records the files opened inside it, in all threads."""
    global _hooked  # noqa: PLW0603 - the interpreter cannot remove a hook
    if not _hooked:
        sys.addaudithook(_hear)
        _hooked = True
    files = OpenedFiles()
    _listeners.append(files)
    try:
        yield files
    finally:
        _listeners.remove(files)


def _hear(event: str, arguments: tuple) -> None:
    if event == "open" and _listeners:
        path, _, flags = arguments
        for listener in _listeners:
            listener.hear(path, flags)
    elif event in _UNTRACEABLE_EVENTS and _listeners:
        # Searching a folder for a module is no reading.
        is_import = sys._getframe(1).f_code.co_filename.startswith("<frozen importlib")
        for listener in _listeners:
            listener.traceable &= is_import


def of_one_sample(error: BaseException) -> bool:
    """Return True if an exception concerns only the sample that was read or asked, so that others can go on.

    Decoders raise their own exceptions for broken or too large files. Tasks rely on fields that may be empty, and end the
    process for a missing video. A missing package or name stops every sample, and so does an exception of this project other
    than DataError.
    """
    if isinstance(error, MMKVError):
        return isinstance(error, DataError)
    return isinstance(error, (Exception, SystemExit)) and not isinstance(error, (ImportError, NameError))
