"""A task's code: which of its files are part of a cell's identity, what it may read unheard, and its modules as Python sees
them.

Files that Python opens are heard while a prompt is made (audit event `open`, PEP 578). Readers written in C open theirs by
themselves, and environment variables are read without a sound: code that imports a package which may have the one, or looks at
the other under names that it makes up, has its prompts made again in every run. Values of variables that it names are part of
what its prompts are remembered under.

Modules are compiled from the source that the task's digest is of, never from kept bytecode. Python takes the bytecode in
`__pycache__` where a source has the size and the time of modification that it was made of. A file that is replaced by one
of equal size with its time kept (cp -p, tar, rsync -t) would be run as it was before. lmms-eval's own tasks keep their
bytecode: its version stands for them.
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
from typing import NamedTuple

from mmkv_bench.datasets.task_yaml import includes, lmms_eval_folder
from mmkv_bench.errors import DataError, MMKVError
from mmkv_bench.file_state import State, is_installed

_SILENT = {"sqlite3", "dbm", "ctypes", "mmap", "multiprocessing", "concurrent"}
HEARD = (sys.stdlib_module_names - _SILENT) | {
    *("PIL", "numpy", "datasets", "yaml", "regex", "loguru", "tqdm", "lmms_eval", "mmkv_bench")
}
"""Modules whose every opening of a file is heard, but for `UNHEARD`. Of others nobody knows: most that read data do it in C."""
UNHEARD = {
    "ImageFont",
    "load_dataset",
    "load_from_disk",
    "from_parquet",
    "from_file",
    "from_csv",
    "from_json",
    "from_text",
}
SUFFIXES = (".py", ".pyc", ".so", ".pyd")  # of what Python imports from a folder
_DYNAMIC = {"importlib", "runpy", "imp"}
_MADE_UP = {f"__{'import'}__", "exec", "eval"}  # calls that import or run what no text of the file says


ANY = "*"  # in place of names that are not in the text of the code


class Reading(NamedTuple):
    """Names in code: the packages that it imports, by their first words, and the environment variables that it reads."""

    imports: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()


def digests(path: Path) -> list[str]:
    """Digests of the Python files that a task's YAML, and those it includes, can reach: beside them, in packages below that these
    import, and elsewhere outside of installed packages. Empty where lmms-eval's version stands for them."""
    names = {item for folder in folders(path) for item in _reached(folder).items()}
    return sorted(f"{name}:{hashlib.sha256(file.read_bytes()).hexdigest()}" for name, file in names)


def files(path: Path) -> list[Path]:
    """The YAML and Python files of a task, lmms-eval's own left out, sorted."""
    code = {file for folder in folders(path) for file in _reached(folder).values()}
    return sorted(code | {file for file in _yaml(path) if not shipped(file)})


def remembered(path: Path) -> str | None:
    """Digest of the environment variables that a task's code names, empty where none is set; None: its prompts have to be made
    again in every run. Of lmms-eval's own tasks nothing is asked: what they read is in their rows."""
    imports, variables = set[str](), set[str]()
    for folder in folders(path):
        code = _reached(folder)
        modules = {part.partition(".")[0] for name in code for part in name.split("/")}
        for file in code.values():
            reading = _reading(file.read_bytes())
            imports |= reading.imports - modules
            variables |= reading.variables if file.suffix == ".py" else {ANY}
    if ANY in variables or imports - HEARD:
        return None
    values = {name: os.environ.get(name) for name in sorted(variables)}
    return hashlib.sha256(repr(values).encode()).hexdigest() if set(values.values()) - {None} else ""


def _yaml(path: Path) -> Iterator[Path]:
    yield path
    for included in includes(path):
        yield from _yaml(included)


def shipped(file: Path) -> bool:
    """True for lmms-eval's own files."""
    return file.resolve().is_relative_to(lmms_eval_folder().resolve())


def folders(path: Path) -> set[Path]:
    """Folders of a task's YAML and of those it includes, without lmms-eval's own."""
    return {file.resolve().parent for file in _yaml(path) if not shipped(file)}


def _reached(folder: Path) -> dict[str, Path]:
    """Name -> file of the code beside a YAML, of packages below that it imports, and of modules elsewhere that are no installed
    packages; of these as far as this process finds them, as it does once the task was imported."""
    files = {file.name: file for file in folder.iterdir() if file.name.endswith(SUFFIXES) and file.is_file()}
    subfolders = {part.name for part in folder.iterdir() if part.is_dir() and part.name[0] != "."}
    waiting, visited = list(files.values()), {file.partition(".")[0] for file in files} - subfolders | {ANY}
    while waiting:
        reading = _reading(waiting.pop().read_bytes())
        names = (reading.imports | (subfolders if ANY in reading.imports else set())) - visited
        visited |= names
        for name in names:
            new = _modules(name, folder / name) if name in subfolders else _elsewhere(name)
            files |= new
            waiting += new.values()
    return files


def _elsewhere(name: str) -> dict[str, Path]:
    if name in sys.stdlib_module_names or name in HEARD:
        return {}
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return {}
    origin = Path(spec.origin or "").resolve() if spec else Path()
    if spec is None or not origin.is_file() or is_installed(origin):
        return {}
    return _modules(name, origin.parent) if spec.submodule_search_locations else {origin.name: origin}


def _modules(name: str, package: Path) -> dict[str, Path]:
    """The files of a package, links to folders followed; hidden files and Python's own bytecode left out."""
    modules, visited = dict[str, Path](), set[str]()
    for place, below, names in os.walk(package, followlinks=True):
        if (real := os.path.realpath(place)) in visited:
            below.clear()
            continue
        visited.add(real)
        below[:] = [part for part in sorted(below) if part[0] != "." and part != "__pycache__"]
        files = [Path(place, file) for file in names if file.endswith(SUFFIXES)]
        modules |= {(Path(name) / file.relative_to(package)).as_posix(): file for file in files}
    return modules


@lru_cache(maxsize=4096)
def _reading(code: bytes) -> Reading:
    """Summarise one file; a file that is no Python has an empty summary."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):
        return Reading()
    imports, keys = set[str](), list[ast.AST]()
    for node in nodes:
        match node:
            case ast.Import(names=names):
                imports |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=None, names=names):
                imports |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module)):
                imports.add(module.partition(".")[0])
            case ast.Attribute(attr=name) | ast.alias(name=name):
                imports |= UNHEARD & {name.rpartition(".")[2]}
            case ast.Name(id=name) if name in _MADE_UP:
                imports.add(ANY)
            case ast.Subscript(value=value, slice=key) if _is_environment(value):
                keys.append(key)
            case ast.Compare(left=key, comparators=[value]) if _is_environment(value):
                keys.append(key)
            case ast.Call(func=ast.Attribute(value=value, attr="get" | "setdefault" | "pop"), args=[key, *_]) if (
                _is_environment(value)
            ):
                keys.append(key)
            case ast.Call(func=function, args=[key, *_]) if _is_environment(function):
                keys.append(key)
    variables = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    if sum(map(_is_environment, nodes)) > len(variables):  # each mention has to come with a name
        variables.append(ANY)
    return Reading(frozenset(imports | ({ANY} if imports & _DYNAMIC else set())), frozenset(variables))


def _is_environment(node: ast.AST) -> bool:
    """True for a node that is the environment, or reads one variable of it."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "getenv", "environb")
    return isinstance(node, ast.Name) and node.id in ("environ", "getenv")


_PACKAGES = {"site-packages", "dist-packages"}
_folders: set[Path] = set()


class SourceOnly(SourceFileLoader):
    """Reads and writes no bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return _compiled(self.get_data(path), path)


@lru_cache(maxsize=256)
def _compiled(source: bytes, path: str) -> CodeType:
    """Compile equal bytes once: a task's module is run anew for each function that its YAML names."""
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
    """Import modules in and below a task's folders, and elsewhere outside of installed packages, from their sources from now on.

    It holds whoever imports them: a task's code imports some only when a prompt is made.
    """
    new = {folder.resolve() for folder in folders} - _folders
    if not new:
        return
    _folders.update(new)
    if _finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder)
    for place in [place for place in sys.path_importer_cache if _of_task(place)]:
        del sys.path_importer_cache[place]


def _finder(place: str) -> FileFinder:
    """The finder of a folder's modules (a hook of `sys.path_hooks`). Raises ImportError for folders whose bytecode counts."""
    if not _of_task(place):
        raise ImportError(f"{place} may keep its bytecode", path=place)
    return FileFinder(
        place,
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (SourceOnly, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),  # a module without a source, whose digest is of this
    )


def _of_task(place: str) -> bool:
    """True where modules of a folder may be a task's code: no version stands for them."""
    path = Path(place).resolve()
    if any(path.is_relative_to(folder) and _own(path.relative_to(folder)) for folder in _folders):
        return path.is_dir()
    return path.is_dir() and _own(path) and not is_installed(path)


def _own(path: Path) -> bool:
    return _PACKAGES.isdisjoint(path.parts)


_UNTRACEABLE = {
    "os.listdir",
    "os.scandir",
    "glob.glob",
    "subprocess.Popen",
    "os.system",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
}
_KERNEL_FILES = ("/proc/", "/sys/", "/dev/")  # the kernel makes these up; they have no size
_listeners: list[OpenedFiles] = []
_hooked = False


class OpenedFiles:
    """Files that were opened for reading: path -> state before that, None where there was no file.

    `traceable`: whether every path says where its file lies (a relative one depends on the working folder), and nothing but files
    was read.
    """

    def __init__(self) -> None:
        self.files: dict[str, State | None] = {}
        self.traceable = True

    def hear(self, path: object, flags: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # an open descriptor, whose own opening was heard
        name = os.fsdecode(path)
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if writes or name in self.files or name.endswith(SUFFIXES):
            return  # of what is imported on the way the versions of packages tell
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
    """Listen while the block runs, in all threads."""
    global _hooked  # noqa: PLW0603 - the interpreter takes a hook once and for all
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
    elif event in _UNTRACEABLE and _listeners:
        importing = sys._getframe(1).f_code.co_filename.startswith(
            "<frozen importlib"
        )  # it looks for a module in a folder
        for listener in _listeners:
            listener.traceable &= importing


def of_one_sample(error: BaseException) -> bool:
    """True where an exception concerns the one sample that was read or asked, and is no reason to stop.

    Decoders have exceptions of their own for files that are broken or too large, tasks take fields for granted that are
    empty, and end the process for a missing video. What stops every sample alike is a package or a name that is not
    there, and what this project refuses for another reason than its data.
    """
    if isinstance(error, MMKVError):
        return isinstance(error, DataError)
    return isinstance(error, (Exception, SystemExit)) and not isinstance(error, (ImportError, NameError))
