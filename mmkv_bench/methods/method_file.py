"""`method=custom`: a user's Python file as a method.

The file defines a subclass of `Scorer` and, optionally, of `Allocator`, `Selector`, `Reducer` and `DecodePolicy`. By
naming its path (`methods.custom.path`) the user consents to running it. The text that runs is the text that was hashed:
the file is read once, and its bytecode is not stored.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.abc import InspectLoader
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from mmkv_bench import consent
from mmkv_bench.config.method_parts import FOLDERS, base_class
from mmkv_bench.config.shorthand import CUSTOM, OBSERVATION, README, check_name
from mmkv_bench.errors import ConfigError, MMKVError, first_line, nearest, traceback_line
from mmkv_bench.methods.method_file_checks import PREFIX, check_text, read, refuse_openings, settings_prefix

SELECTOR = {"sinks": 0, "recents": 1, "window": 0}
"""Parameters, with their defaults, of the default selector, which a file without a selector gets."""

_PURPOSES = {
    "key": ", which returns the tuple of all parameters that a score depends on, because equal keys share one score",
    "score": f", which returns a number for each KV head and token, higher = keep ({OBSERVATION})",
}
"""Method that a class lacks -> its purpose, if its name does not say it."""

SHOWN = 16
"""Digits of a file's checksum that rows and identities store."""


@dataclass(frozen=True)
class MethodFile:
    """A loaded method file."""

    path: str
    sha256: str
    classes: Mapping[str, type]  # part that the file defines (`scorer`, `selector`, ...) -> its class
    prefix: str  # common prefix of the file's settings on the command line


def load(path: str | None, name: str | Sequence[str] | None = None, method: str = CUSTOM) -> MethodFile:
    """Load a user's method file and choose its classes.

    Args:
        path: a Python file, relative to the working directory.
        name: the class, or classes, to use; None uses all parts that the file defines.
        method: the method's name in the run.

    Raises:
        ConfigError: the file does not exist, cannot be imported, has no scorer, or has several classes to choose from; also
            CodeOfRowsError.
    """
    file, text = read(path, method)
    assert path is not None, "it was read"
    digest = hashlib.sha256(text.encode()).hexdigest()
    consent.require(file, digest)
    module = _module(str(file.resolve()), digest, text, path)
    names = (name,) if isinstance(name, str) else tuple(name or ())
    return MethodFile(path, digest, _choose(path, module, names, settings_prefix(method)), settings_prefix(method))


def effective(source: MethodFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all constructor arguments of a method file's classes: the given ones, and the defaults of the others.

    An integer given for a float argument becomes a float, so that 3 and 3.0 give the same hash. Two kinds of defaults are left
    out: those that are no plain values, and those in which two classes differ (each class then uses its own default).

    Raises:
        ConfigError: no class has a given argument, or a required argument is not given.
    """
    parameters = [p for cls in source.classes.values() for p in _parameters(cls)]
    allowed = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    unknown = [key for key in given if key not in allowed]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        classes = ", ".join(cls.__name__ for cls in source.classes.values())
        raise ConfigError(
            f"{source.prefix}.args: {classes} of {source.path} takes no {unknown[0]!r}; {nearest(unknown[0], allowed)}"
        )
    arguments = dict(given)
    ambiguous: set[str] = set()
    for p in parameters:
        if p.name in given:
            is_whole_number = isinstance(given[p.name], int) and not isinstance(given[p.name], bool)
            arguments[p.name] = (
                float(given[p.name]) if is_whole_number and isinstance(p.default, float) else given[p.name]
            )
        elif p.default is not p.empty and _is_plain(p.default):
            ambiguous |= {p.name} if arguments.get(p.name, p.default) != p.default else set()
            arguments[p.name] = p.default
        elif p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            raise ConfigError(
                f"{source.path} needs a value for {p.name}; write {source.prefix}.args={{{p.name}: <value>}}"
            )
    return {key: value for key, value in arguments.items() if key not in ambiguous}


def build(source: MethodFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """Build the parts of a method file: `scorer`, `selector`, ... -> an object of the file's class.

    given: constructor arguments. Each class gets those that its constructor accepts.

    Raises:
        ConfigError: see `effective`; also for any error of a constructor.
    """
    arguments, built = effective(source, given), {}
    for part, cls in source.classes.items():
        parameters = _parameters(cls)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = arguments if takes_all else {p.name for p in parameters}
        try:
            built[part] = cls(**{key: value for key, value in arguments.items() if key in names})
        except MMKVError as error:
            raise ConfigError(f"{source.prefix}.args: {error}") from error
        except Exception as error:  # a user's constructor may raise anything
            raise ConfigError(
                f"{cls.__name__} of {source.path} cannot be built: {first_line(error)}; correct {source.prefix}.args or "
                "the file"
            ) from error
    return built


def parts(node: Mapping[str, Any], method: str = CUSTOM) -> dict[str, Any]:
    """Build the parts that a user's method file defines: `scorer`, `selector`, ... -> object.

    node: the node of `conf/method/custom.yaml` with all values resolved. method: the method's name in the run.

    Raises:
        ConfigError: see `load` and `build`; also for a parameter of the default selector if the file defines a selector.
    """
    source = load(node["path"], node["name"], method)
    changed = [key for key, value in SELECTOR.items() if node[key] != value]
    if "selector" in source.classes and changed:
        raise ConfigError(
            f"{source.prefix}.{changed[0]}={node[changed[0]]} sets the default selector, but {source.path} "
            f"defines its own ({source.classes['selector'].__name__}); give the value in {source.prefix}.args"
        )
    return build(source, node["args"])


def identity_form(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node of `method=custom` with the file's checksum, class names and all arguments in place of its path."""
    source = load(node["path"], node["name"])
    dropped_keys = {"path", "name", *source.classes, *(SELECTOR if "selector" in source.classes else ())}
    classes = {part: cls.__name__ for part, cls in source.classes.items()}
    form = {key: value for key, value in node.items() if key not in dropped_keys}
    return form | {"args": effective(source, node["args"]), "classes": classes, "sha256": source.sha256[:SHOWN]}


def write(path: str, part: str = "scorer") -> None:
    """Write a new method file with one part that runs unchanged; a scorer is added if the part is not a scorer.

    Args:
        path: a .py file that does not exist, in an existing folder.
        part: scorer, allocator, selector, reducer or decoding.

    Raises:
        ConfigError: the name is not allowed, the file exists, the folder is missing, or there is no such part.
    """
    file = Path(path).expanduser()
    if part not in FOLDERS:
        raise ConfigError(f"--part {part}: {nearest(part, FOLDERS)}")
    if file.suffix != ".py":
        raise ConfigError(
            f"{path} is not the name of a Python file; allowed: <name>.py; write {file.stem or 'mine'}.py"
        )
    check_name(file.stem, path)
    title = "".join(word[:1].upper() + word[1:] for word in re.split(r"[_-]+", file.stem))
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(_skeleton(part).replace("Skeleton", title))
    except FileExistsError:
        raise ConfigError(
            f"{path} exists and was not changed; name a new file, or run `mmkv-bench check {path}`"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); name a file in a folder that you can write to"
        ) from None


def _skeleton(part: str) -> str:
    """Return the text of a method file: imports, and one part of `skeletons.py`, after a scorer if it is not one."""
    text = (files("mmkv_bench.methods") / "skeletons.py").read_text(encoding="utf-8")
    head, *sections = re.split(r"^# ---- ", text, flags=re.MULTILINE)
    titled = {
        title.partition(":")[0]: (title, code.strip()) for title, _, code in (one.partition("\n") for one in sections)
    }
    title, code = titled[part]
    if part != "scorer":
        code = f"{titled['beside'][1].replace('SkeletonWindow', 'Skeleton')}\n\n\n{code}"
    runtime_imports, _, type_imports = head.split('"""', 2)[2].partition("if TYPE_CHECKING:\n")
    type_imports = _used_imports(type_imports, code)
    imports = _used_imports(runtime_imports, f"{code} annotations{' TYPE_CHECKING' if type_imports else ''}")
    type_checking_block = f"\n\nif TYPE_CHECKING:\n{type_imports}" if type_imports else ""
    return f'"""Skeleton: {title.partition(": ")[2]}"""\n\n{imports}{type_checking_block}\n\n\n{code}\n'


def _used_imports(imports: str, code: str) -> str:
    """Return import lines without the names that the code does not use."""

    def keep(line: re.Match[str]) -> str:
        names = [name for name in line[2].split(", ") if re.search(rf"\b{name}\b", code)]
        return f"{line[1]}{', '.join(names)}\n" if names else ""

    lines = re.sub(r"^( *from \S+ import )(.+)\n", keep, imports, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


class _HashedText(InspectLoader):
    """A module loader that runs the text whose checksum was taken, and neither reads the file again nor runs older bytecode."""

    def __init__(self, text: str, file: str):
        self.text, self.file = text, file

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.text, self.file)


@cache
def _module(file: str, digest: str, text: str, path: str) -> ModuleType:
    """Return the method file as a module. A file's text runs only once per process: equal scorers have one class object.

    file: absolute path, part of the module's name. digest: sha256 of the text. path: as given by the user, for messages.
    """
    check_text(file, text, path)
    refuse_openings()
    name = f"{PREFIX}{digest[:16]}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"
    loader = _HashedText(text, file)
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
        line = traceback_line(error, file)
        file_and_line = f"{path}:{line}" if line else path
        raise ConfigError(
            f"{file_and_line}: the file cannot be imported: {first_line(error)}; correct this line"
        ) from error
    return module


def _choose(path: str, module: ModuleType, names: tuple[str, ...], prefix: str) -> dict[str, type]:
    defined = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    candidates = {part: [c for c in defined if issubclass(c, base_class(part))] for part in FOLDERS}
    for part, classes in candidates.items():
        abstract = [c for c in classes if inspect.isabstract(c)]
        if abstract and len(abstract) == len(classes):
            missing = sorted(vars(abstract[0])["__abstractmethods__"])
            signatures = {name: inspect.signature(getattr(base_class(part), name)).parameters for name in missing}
            lines = " and ".join(
                f"`def {name}({', '.join(names)}):`{_PURPOSES.get(name, '')}" for name, names in signatures.items()
            )
            raise ConfigError(
                f"{path}: {abstract[0].__name__} lacks {', '.join(missing)}; write {lines}; `mmkv-bench new other.py --part "
                f"{part}` shows a whole one"
            )
        candidates[part] = [c for c in classes if c not in abstract]
    allowed = [c.__name__ for classes in candidates.values() for c in classes]
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{prefix}.name={name} is not a part in {path}; {nearest(name, allowed)}")
    if names:
        candidates = {part: [c for c in classes if c.__name__ in names] for part, classes in candidates.items()}
    for part, classes in candidates.items():
        if len(classes) > 1:
            raise ConfigError(
                f"{path} defines several {part} classes ({', '.join(c.__name__ for c in classes)}); name the ones to use "
                f"with {prefix}.name=<class> or {prefix}.name=[<class>,<class>]"
            )
    if not candidates["scorer"]:
        among = f" among {', '.join(names)}" if names else ""
        raise ConfigError(
            f"{path} defines no scorer{among}; write `from mmkv_bench.compression.scorers.base import Scorer` and "
            f"`class Mine(Scorer):`, or subclass a scorer of the package to use its scores; {README}"
        )
    return {part: classes[0] for part, classes in candidates.items() if classes}


def _parameters(cls: type) -> list[inspect.Parameter]:
    return list(inspect.signature(cls).parameters.values())


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
