"""`method=custom`: a user's Python file as a method.

The file defines a subclass of `Scorer` and, if it wants to, of `Allocator`, `Selector`, `Reducer` and `DecodePolicy`.
Naming its path (`methods.custom.path`) is the user's consent to run it; beside it only a task's files are run by path.
What runs is exactly what was hashed: the text is read once, and no bytecode of it is kept.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import CodeType, ModuleType
from typing import Any

from mmkv_bench import consent
from mmkv_bench.errors import ConfigError, MMKVError, nearest, own_line
from mmkv_bench.methods import own_reads, own_text
from mmkv_bench.methods.own_text import CUSTOM, README

ROLES = {
    "scorer": "Scorer",
    "allocator": "Allocator",
    "selector": "Selector",
    "reducer": "Reducer",
    "decoding": "DecodePolicy",
}
"""Part of a method -> the class that it is a subclass of."""

SELECTOR = {"sinks": 0, "recents": 1, "window": 0}
"""Parameters of the selector that a file without one gets, with their defaults."""

SHOWN = 16
"""Digits of a file's checksum that rows and identities hold."""


@dataclass(frozen=True)
class OwnFile:
    """A loaded file: `classes` maps each part that it provides to its class; `where` is how its settings begin."""

    path: str
    sha256: str
    classes: Mapping[str, type]
    where: str = own_text.where(CUSTOM)


def load(path: str | None, name: str | Sequence[str] | None = None, method: str = CUSTOM) -> OwnFile:
    """Load a user's file and choose its classes.

    Args:
        path: a Python file, relative to the working directory.
        name: the class, or classes, to use; None uses all parts that the file defines.
        method: the name of the method that it is in the run.

    Raises:
        ConfigError: no such file, one that cannot be imported, no scorer in it, or several to choose from; also
            CodeOfRowsError.
    """
    file, text = own_text.read(path, method)
    assert path is not None, "it was read"
    digest = hashlib.sha256(text.encode()).hexdigest()
    consent.require(file, digest)
    module = _module(str(file.resolve()), digest, text, path)
    names = (name,) if isinstance(name, str) else tuple(name or ())
    return OwnFile(path, digest, _choose(path, module, names, own_text.where(method)), own_text.where(method))


def effective(source: OwnFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every constructor argument of the file's classes: those given, and the others' defaults as far as they are plain
    values. A whole number given for a real one is real, so that 3 and 3.0 are one cell. One that two classes have with
    different defaults is left out: each has its own, and the file's checksum covers both.

    Raises:
        ConfigError: an argument that no class has, or one that a class needs and nobody gave.
    """
    parameters = [p for cls in source.classes.values() for p in _parameters(cls)]
    known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    unknown = [key for key in given if key not in known]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        classes = ", ".join(cls.__name__ for cls in source.classes.values())
        raise ConfigError(
            f"{source.where}.args: {classes} of {source.path} takes no {unknown[0]!r}; {_allowed(unknown[0], known)}"
        )
    settled = dict(given)
    own: set[str] = set()
    for p in parameters:
        if p.name in given:
            real = isinstance(p.default, float) and isinstance(given[p.name], int)
            settled[p.name] = float(given[p.name]) if real and not isinstance(given[p.name], bool) else given[p.name]
        elif p.default is not p.empty and _plain(p.default):
            own |= {p.name} if settled.get(p.name, p.default) != p.default else set()
            settled[p.name] = p.default
        elif p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            raise ConfigError(
                f"{source.path} needs a value for {p.name}; write {source.where}.args={{{p.name}: <value>}}"
            )
    return {key: value for key, value in settled.items() if key not in own}


def build(source: OwnFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """The file's parts; each is built with those of the arguments that its constructor has.

    Raises:
        ConfigError: see `effective`; also whatever a constructor raises.
    """
    arguments, built = effective(source, given), {}
    for role, cls in source.classes.items():
        parameters = _parameters(cls)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        own = {k: v for k, v in arguments.items() if takes_all or k in {p.name for p in parameters}}
        try:
            built[role] = cls(**own)
        except MMKVError as error:
            raise ConfigError(f"{source.where}.args: {error}") from error
        except Exception as error:  # a user's constructor may raise anything
            raise ConfigError(
                f"{cls.__name__} of {source.path} cannot be built: {_said(error)}; correct {source.where}.args or the file"
            ) from error
    return built


def parts(plain: Mapping[str, Any], method: str = CUSTOM) -> dict[str, Any]:
    """The file's built parts for an effective node of `conf/method/custom.yaml`; method: its name in the run.

    Raises:
        ConfigError: see `load` and `build`; also a selector's parameter for a file that has a selector of its own.
    """
    source = load(plain["path"], plain["name"], method)
    changed = [key for key, value in SELECTOR.items() if plain[key] != value]
    if "selector" in source.classes and changed:
        raise ConfigError(
            f"{source.where}.{changed[0]}={plain[changed[0]]} belongs to the selector of methods that bring none, and "
            f"{source.path} has {source.classes['selector'].__name__}; give the value with {source.where}.args"
        )
    return build(source, plain["args"])


def identity_form(plain: Mapping[str, Any]) -> dict[str, Any]:
    """An effective node with what its answers depend on in place of a path: the file's checksum, its classes' names and
    all their arguments."""
    source = load(plain["path"], plain["name"])
    own = {key: value for key, value in plain.items() if key not in ("path", "name", *source.classes)}
    if "selector" in source.classes:
        own = {key: value for key, value in own.items() if key not in SELECTOR}
    classes = {role: cls.__name__ for role, cls in source.classes.items()}
    return own | {"args": effective(source, plain["args"]), "classes": classes, "sha256": source.sha256[:SHOWN]}


class _Text(InspectLoader):
    """Runs the text that was hashed; the usual loader would read the file again, or bytecode that is older than it."""

    def __init__(self, text: str, file: str):
        self.text, self.file = text, file

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.text, self.file)


@cache
def _module(file: str, digest: str, text: str, path: str) -> ModuleType:
    """The file as a module, run once per content: classes keep their identity, on which shared scores rely."""
    own_text.parsed(file, text, path)
    own_reads.listen()
    name = f"{own_reads.PREFIX}{digest[:16]}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"
    loader = _Text(text, file)
    spec = spec_from_file_location(name, file, loader=loader)
    assert spec is not None, "a file with a loader has a spec"
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    try:
        loader.exec_module(module)
    except KeyboardInterrupt:
        del sys.modules[name]
        raise
    except BaseException as error:  # a user's file may raise anything, SystemExit too
        del sys.modules[name]
        line = own_line(error, file)
        where = f"{path}:{line}" if line else path
        raise ConfigError(f"{where}: the file cannot be imported: {_said(error)}; correct the line") from error
    return module


def _choose(path: str, module: ModuleType, names: tuple[str, ...], where: str) -> dict[str, type]:
    bases = {role: getattr(importlib.import_module(_home(role)), base) for role, base in ROLES.items()}
    own = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    found = {role: [c for c in own if issubclass(c, base)] for role, base in bases.items()}
    for role, classes in found.items():
        abstract = [c for c in classes if inspect.isabstract(c)]
        if abstract and len(abstract) == len(classes):
            missing = sorted(vars(abstract[0])["__abstractmethods__"])
            lines = " and ".join(f"`def {name}{_signature(bases[role], name)}:`" for name in missing)
            raise ConfigError(
                f"{path}: {abstract[0].__name__} lacks {', '.join(missing)}; write {lines}; `mmkv-bench new other.py --part "
                f"{role}` shows a whole one"
            )
        found[role] = [c for c in classes if c not in abstract]
    allowed = [c.__name__ for classes in found.values() for c in classes]
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{where}.name={name} is no part of {path}; {_allowed(name, allowed)}")
    if names:
        found = {role: [c for c in classes if c.__name__ in names] for role, classes in found.items()}
    several = {role: classes for role, classes in found.items() if len(classes) > 1}
    for role, classes in several.items():
        raise ConfigError(
            f"{path} defines several {role} classes ({', '.join(c.__name__ for c in classes)}); name the ones to use with "
            f"{where}.name=<class> or {where}.name=[<class>,<class>]"
        )
    if not found["scorer"]:
        among = f" among {', '.join(names)}" if names else ""
        raise ConfigError(
            f"{path} defines no scorer{among}; write `from mmkv_bench.compression.scorers.base import Scorer` and `class "
            f"Mine(Scorer):`, or subclass a scorer of the package to have its scores; {README}"
        )
    return {role: classes[0] for role, classes in found.items() if classes}


def _signature(base: type, name: str) -> str:
    """The parameters of a base's method as a subclass writes them."""
    return f"({', '.join(inspect.signature(getattr(base, name)).parameters)})"


def _home(role: str) -> str:
    return f"mmkv_bench.compression.{role if role == 'decoding' else role + 's'}.base"


def _parameters(cls: type) -> list[inspect.Parameter]:
    return list(inspect.signature(cls).parameters.values())


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _allowed(name: str, known: Any) -> str:
    return nearest(name, known) if known else "it takes none"


def _said(error: BaseException) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
