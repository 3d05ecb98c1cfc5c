"""Classes of this package as their source has them: fields, defaults and what is said about each.

Nothing is imported for it, since the parts of methods import torch, and composing a configuration answers at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

REQUIRED = object()
"""Default of a parameter that has none, or one that is no value of a configuration."""

PACKAGE = "mmkv_bench"
BASE = "base"
"""Module of a folder of parts that holds what they all extend."""

_ROOT = Path(__file__).parents[1]
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): ")
_ELSEWHERE = re.compile(r"see ``(\w+)``")


@dataclass(frozen=True)
class ClassFields:
    """A class: dotted name, and field -> default (`REQUIRED` where there is none), those of its parents first."""

    target: str
    parameters: Mapping[str, Any]


@cache
def find(target: str) -> ClassFields | None:
    """The class of this dotted name; None where this package has none such."""
    module, _, name = target.rpartition(".")
    if not module.startswith(f"{PACKAGE}.") or not _file(module).is_file() or name not in _module(module)[0]:
        return None
    return ClassFields(target, _fields(module, _module(module)[0][name]))


@cache
def parts(folder: str) -> dict[str, ClassFields]:
    """Module -> its part, for a folder below `compression`: the last class that descends from the folder's base class."""
    found: dict[str, ClassFields] = {}
    for file in sorted((_ROOT / "compression" / folder).glob("*.py")):
        module = f"{PACKAGE}.compression.{folder}.{file.stem}"
        names = [name for name, cls in _module(module)[0].items() if _descends(module, cls)]
        part = find(f"{module}.{names[-1]}") if names else None
        if part is not None:
            found[file.stem] = part
    return found


def meaning(target: str, parameter: str) -> str | None:
    """What the `Args` of a class's docstring say about a parameter, or those of the class that they point to (`see ``TopK```)."""
    module, _, name = target.rpartition(".")
    cls = _module(module)[0][name]
    said = _arguments(ast.get_docstring(cls) or "").get(parameter)
    elsewhere = _ELSEWHERE.match(said or "")
    if said and not elsewhere:
        return said
    return next((text for parent in _parents(module, cls) if (text := meaning(parent, parameter))), said)


def _file(module: str) -> Path:
    return _ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")


@cache
def _module(module: str) -> tuple[dict[str, ast.ClassDef], dict[str, str]]:
    """The classes of a module of this package, and the dotted names of what it imports from it."""
    tree = ast.parse(_file(module).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for alias in node.names
    }
    return classes, imported


def _parents(module: str, cls: ast.ClassDef) -> list[str]:
    """Dotted names of a class's bases that this package defines."""
    classes, imported = _module(module)
    names = [base.id for base in cls.bases if isinstance(base, ast.Name)]
    return [imported.get(name, f"{module}.{name}") for name in names if name in imported or name in classes]


def _descends(module: str, cls: ast.ClassDef) -> bool:
    for parent in _parents(module, cls):
        above, _, name = parent.rpartition(".")
        if above.endswith(f".{BASE}") or _descends(above, _module(above)[0][name]):
            return above.split(".")[2] == module.split(".")[2]
    return False


def _fields(module: str, cls: ast.ClassDef) -> dict[str, Any]:
    """Fields of a dataclass and of those it extends, with their defaults as a configuration holds them."""
    found: dict[str, Any] = {}
    for parent in map(find, reversed(_parents(module, cls))):
        found |= {} if parent is None else parent.parameters
    if not any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
        return found
    for line in cls.body:
        if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation):
            found[ast.unparse(line.target)] = _default(line.value)
    return found


def _default(value: ast.expr | None) -> Any:
    if value is None:
        return REQUIRED
    if isinstance(value, ast.Call):  # field(default=..., default_factory=...)
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in given:
            return {"dict": {}, "list": []}.get(ast.unparse(given["default_factory"]), REQUIRED)
        return _default(given.get("default"))
    default = ast.literal_eval(value)
    return list(default) if isinstance(default, tuple) else default


def _arguments(docstring: str) -> dict[str, str]:
    """Parameter -> its words, of a docstring's section `Args`."""
    section = re.split(r"^Args:\n", docstring, maxsplit=1, flags=re.MULTILINE)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section[1].splitlines() if len(section) > 1 else ():
        if line and not line.startswith("    "):
            break
        entry = _ENTRY.match(line)
        if entry:
            names = entry[1].split(", ")
        for name in names:
            found[name] = f"{found.get(name, '')} {line[entry.end() :] if entry else line.strip()}".strip()
    return found
