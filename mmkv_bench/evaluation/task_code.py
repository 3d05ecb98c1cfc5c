"""A task's code: which of its files are part of a cell's identity, and what it may read that nobody hears.

Files that Python opens are heard while a prompt is made (`files_read`). Readers written in C open theirs by themselves, and
environment variables are read without a sound: code that imports the one, or looks at the other under names that it makes up,
has its prompts made again in every run. Values of variables that it names are part of what its prompts are remembered under.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mmkv_bench.datasets.catalog import includes, lmms_eval_folder

C_READERS = {
    *("cv2", "decord", "av", "torchvision", "torchcodec", "torchaudio", "imageio", "skimage", "pyvips", "moviepy"),
    *("simplejpeg", "turbojpeg", "soundfile", "h5py", "lmdb", "pyarrow", "duckdb", "sqlite3", "mmap"),
}
_DYNAMIC = {"importlib", "runpy", "imp"}
_MADE_UP = {f"__{'import'}__", "exec", "eval"}  # calls that import or run what no text of the file says


@dataclass(frozen=True)
class Reading:
    """What the code of some files does: the packages it imports (first words), the environment variables it names, whether it
    reads variables or imports modules under names that are not in its text."""

    imports: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    any_variable: bool = False
    any_import: bool = False

    def __or__(self, other: Reading) -> Reading:
        return Reading(
            self.imports | other.imports,
            self.variables | other.variables,
            self.any_variable or other.any_variable,
            self.any_import or other.any_import,
        )


def digests(path: Path) -> list[str]:
    """Of each Python file that a task's YAML, and those it includes, can reach: beside them, and in packages below that these
    import. None where lmms-eval's version stands for them."""
    names = {(file.relative_to(folder).as_posix(), file) for folder in _folders(path) for file in _reached(folder)}
    return sorted(f"{name}:{hashlib.sha256(file.read_bytes()).hexdigest()}" for name, file in names)


def files(path: Path) -> list[Path]:
    """The YAML and Python files of a task, lmms-eval's own left out, sorted."""
    code = {file for folder in _folders(path) for file in _reached(folder)}
    return sorted(code | {file for file in _yaml(path) if not _shipped(file)})


def remembered(path: Path) -> str | None:
    """Digest of the environment variables that a task's code names, empty where none is set; None: its prompts have to be made
    again in every run. Of lmms-eval's own tasks nothing is asked: what they read is in their rows."""
    reading = Reading()
    for folder in _folders(path):
        for file in _reached(folder):
            reading |= _reading(file, file.stat().st_mtime_ns)
    if reading.any_variable or reading.imports & C_READERS:
        return None
    values = {name: os.environ.get(name) for name in sorted(reading.variables)}
    return (
        hashlib.sha256(repr(values).encode()).hexdigest() if any(value is not None for value in values.values()) else ""
    )


def _yaml(path: Path) -> Iterator[Path]:
    yield path
    for included in includes(path):
        yield from _yaml(included)


def _shipped(file: Path) -> bool:
    return file.resolve().is_relative_to(lmms_eval_folder().resolve())


def _folders(path: Path) -> set[Path]:
    """Folders of a task's YAML and of those it includes, without lmms-eval's own."""
    return {file.resolve().parent for file in _yaml(path) if not _shipped(file)}


def _reached(folder: Path) -> set[Path]:
    beside = set(folder.glob("*.py"))
    reading = Reading()
    for file in beside:
        reading |= _reading(file, file.stat().st_mtime_ns)
    packages = [part for part in folder.iterdir() if part.is_dir()] if beside else []
    below = [part for part in packages if part.name in reading.imports or reading.any_import]
    return beside.union(*(_modules(part) for part in below))


def _modules(folder: Path) -> set[Path]:
    return {file for file in folder.rglob("*.py") if not any(part.startswith(".") for part in file.parts)}


@lru_cache(maxsize=4096)
def _reading(file: Path, changed: int) -> Reading:
    """What one file does; what is no Python does nothing here. changed: its time of modification, which forgets old answers."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return Reading()
    reading = Reading()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            reading |= Reading(imports=frozenset(alias.name.partition(".")[0] for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} if node.module is None else {node.module.partition(".")[0]}
            reading |= Reading(imports=frozenset(names))
        elif isinstance(node, ast.Name) and node.id in _MADE_UP:
            reading |= Reading(any_import=True)
    variables = _variables(tree)
    dynamic = bool(reading.imports & _DYNAMIC)
    return reading | variables | Reading(any_import=dynamic)


def _variables(tree: ast.AST) -> Reading:
    """Environment variables: each mention of `environ` or `getenv` has to come with a name."""
    mentions = sum(_names(node) for node in ast.walk(tree))
    named: list[str] = []
    for node in ast.walk(tree):
        key: ast.AST | None = None
        if isinstance(node, ast.Subscript) and _names(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and node.args:
            of_method = isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "setdefault", "pop")
            if _names(node.func) or (of_method and _names(node.func.value)):  # type: ignore[attr-defined]
                key = node.args[0]
        elif isinstance(node, ast.Compare) and len(node.comparators) == 1 and _names(node.comparators[0]):
            key = node.left
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            named.append(key.value)
    return Reading(variables=frozenset(named), any_variable=mentions > len(named))


def _names(node: ast.AST) -> bool:
    """Whether a node is the environment, or what reads one variable of it."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "getenv", "environb")
    return isinstance(node, ast.Name) and node.id in ("environ", "getenv")
