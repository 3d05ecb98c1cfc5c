"""Pages of methods: `docs/methods.md` lists them and `docs/methods/<name>.md` describes each.

`python -m tools.methods_page` writes them, `--check` compares them. Everything is read from `conf/method/*.yaml` (the method's
description, what `released` changes), from the classes that the file names (parameters, defaults, docstrings) and from the
compressor that the file builds (scope, parts, gathered statistics).
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.files import conf_dir, options
from mmkv_bench.config.method_parts import part_parameters
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods.build import FULL, build_compressor
from mmkv_bench.methods.node import DECODING, PARTS, flat_parameters
from tools.pages import command

if TYPE_CHECKING:
    from mmkv_bench.compression.compressor import Compressor

ABOUT = ("idea", "source", "cost", "readings")
"""Keys of a method file's `about`."""
SCOPES = {
    "layer": "`layer`: a layer is reduced as soon as it is prefilled, so memory falls during the prefill",
    "model": "`model`: decided after the last layer, so the peak is the full cache's",
}
NOTE = """\
Made by `make docs` from the method's file in `conf/method` and the classes that it names; do not edit. A budget C is counted
in entries per KV head; T are the prompt's tokens. What a parameter means is said by the class that takes it; its docstring
also explains "above" and "below", and what of a release is not reproduced, and why. [All methods](../methods.md)"""
OWN = "that of the parts that you name"
GATHERED = {
    "tail_queries": "the last queries",
    "query_moments": "mean and covariance of the queries",
    "hidden_moments": "mean and deviation of the hidden states",
    "hidden_scalars": "one mean and deviation of all hidden values",
    "column_sums": "attention column sums",
    "queries": "all queries of a layer, until it is done",
    "answer": "after it, the attention of the full cache's own answer",
    "states": "all hidden states of a layer, until it is done",
}

_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): ")
_ELSEWHERE = re.compile(r"see ``(\w+)``")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method: its default as YAML text, and its meaning.

    The meaning is the comment after the value in the method's file, otherwise the docstring of the class with the parameter.
    """

    name: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Method:
    """One method file, as the page shows it."""

    name: str
    about: Mapping[str, str]
    parameters: Sequence[Parameter]
    released: Mapping[str, Any]
    scope: str
    budget: str
    parts: Sequence[str]
    gathered: Sequence[str]
    stochastic: bool


def pages() -> dict[str, str]:
    """Return path below docs/ -> Markdown: the index and a page for each method."""
    from mmkv_bench.config.compose import method_defaults

    nodes = method_defaults(sorted(options("method"), key=lambda name: (name != FULL, name)))
    methods = [read(name, node) for name, node in nodes.items()]
    return {"methods.md": index(methods)} | {f"methods/{m.name}.md": page(m) for m in methods}


def index(methods: Sequence[Method]) -> str:
    """Return the list of all methods."""
    lines = [
        "# Methods",
        "",
        "Made by `make docs` from the files in `conf/method`; do not edit. The page of each method has its parameters, cost and",
        "readings. `reading=paper` is the default; `reading=released` sets what the paper's released code does differently.",
        "",
        "| method | idea | scope | seeds | released changes |",
        "|---|---|---|---|---|",
    ]
    for m in methods:
        changes = ", ".join(f"`{key}`" for key in m.released) or "nothing"
        seeds = "yes" if m.stochastic else "no"
        lines.append(
            f"| [{m.name}](methods/{m.name}.md) | {m.about['idea']} | {_short(m.scope)} | {seeds} | {changes} |"
        )
    return "\n".join(lines) + "\n"


def read(name: str, node: Mapping[str, Any] | None = None) -> Method:
    """Return a method file with the compressor that it builds.

    Args:
        node: the file as composed by `method_defaults`; None composes it.

    Raises:
        ConfigError: `about` or an entry of it is missing or empty, or a parameter has no description.
    """
    from mmkv_bench.config.compose import method_defaults

    path = conf_dir() / "method" / f"{name}.yaml"
    node = method_defaults([name])[name] if node is None else node
    about = {key: str(value or "") for key, value in (node.get("about") or {}).items()}
    lacking = [key for key in ABOUT if not about.get(key, "").strip()]
    if lacking:
        raise ConfigError(f"conf/method/{name}.yaml says nothing under about.{lacking[0]}; add one sentence")
    parameters = _parameters(path, node)
    compressor = None if is_open(node) else build_compressor(name, node, "paper")
    return Method(
        name=name,
        about=about,
        parameters=parameters,
        released=dict(node.get("released") or {}),
        scope=OWN if compressor is None else _scope(compressor),
        budget=OWN if compressor is None else _budget(compressor, build_compressor(name, node, "released")),
        parts=[] if compressor is None else _parts(compressor),
        gathered=[] if compressor is None else _gathered(compressor),
        stochastic=compressor is not None and compressor.stochastic,
    )


def meaning(target: str, parameter: str) -> str | None:
    """Return a parameter's description in the `Args` of a class's docstring; a reference (`see ``TopK```) is followed."""
    module, _, name = target.rpartition(".")
    return _meaning(getattr(importlib.import_module(module), name), parameter)


def _meaning(cls: type, parameter: str) -> str | None:
    text = _arguments(inspect.cleandoc(vars(cls).get("__doc__") or "")).get(parameter)
    if text and not _ELSEWHERE.match(text):
        return text
    parents = [parent for parent in cls.__bases__ if parent.__module__.startswith("mmkv_bench.")]
    return next((inherited for parent in parents if (inherited := _meaning(parent, parameter))), text)


def _arguments(docstring: str) -> dict[str, str]:
    """Map each parameter to its description in a docstring's section `Args`."""
    section = re.split(r"^Args:\n", docstring, maxsplit=1, flags=re.MULTILINE)
    words: dict[str, str] = {}
    names: list[str] = []
    for line in section[1].splitlines() if len(section) > 1 else ():
        if line and not line.startswith("    "):
            break
        entry = _ENTRY.match(line)
        if entry:
            names = entry[1].split(", ")
        for name in names:
            words[name] = f"{words.get(name, '')} {line[entry.end() :] if entry else line.strip()}".strip()
    return words


def is_open(node: Mapping[str, Any]) -> bool:
    """Tell whether a method has no scorer until its user names one, so that no compressor can be built yet."""
    return node.get("base") != FULL and node.get("scorer") is None and node.get(DECODING) is None


def _parameters(path: Path, node: Mapping[str, Any]) -> list[Parameter]:
    comments, classes_of = _comments(path), part_parameters(node)
    found = []
    for name, default in flat_parameters(node).items():
        said = comments.get(name) or (meaning(*classes_of[name]) if name in classes_of else None)
        if not said:
            raise ConfigError(
                f"conf/method/{path.name}: nobody says what the parameter {name} means; write a comment behind its value, or "
                "the docstring of the class that takes it"
            )
        found.append(Parameter(name, _yaml(default), said.replace("``", "`")))
    return found


def _comments(path: Path) -> dict[str, str]:
    """Map each parameter to the comment after its value in a method's file."""
    lines = (re.match(r"(\w+):.*?\s#\s*(.+)$", line) for line in path.read_text().splitlines())
    return {line[1]: line[2] for line in lines if line}


def _scope(compressor: Compressor) -> str:
    return "nothing is evicted" if compressor.unbudgeted else SCOPES[compressor.scope]


def _budget(paper: Compressor, released: Compressor) -> str:
    if paper.unbudgeted:
        return "none"
    if paper.resamples:
        assert paper.eviction is not None
        over = paper.eviction.scorer.over_budget
        return f"at most C entries per KV head, the same of all; more where the smallest prompt has more (`{over}`)"
    words = (
        "at most C entries per KV head, on average"
        if paper.falls_short
        else "exactly C entries per KV head, on average"
    )
    if released.exceeds:
        return f"{words}; `released` may keep more"
    return words if released.falls_short == paper.falls_short else f"{words}; `released` may keep fewer"


def _parts(compressor: Compressor) -> list[str]:
    parts = {part: getattr(compressor, part) for part in (*PARTS, DECODING)}
    return [f"{name} `{type(part).__name__}`" for name, part in parts.items() if part is not None]


def _gathered(compressor: Compressor) -> list[str]:
    needs = vars(compressor.needs)
    return [words for name, words in GATHERED.items() if needs[name]]


def _short(scope: str) -> str:
    return scope.partition(":")[0].strip("`") if scope in SCOPES.values() else scope


def page(m: Method) -> str:
    """Return the page of one method."""
    return "\n".join([*_description(m), "", *_table(m), "", NOTE]) + "\n"


def _description(m: Method) -> list[str]:
    lines = [
        f"# {m.name}",
        "",
        f"{_sentence(m.about['idea'])}",
        "",
        f"- source: {m.about['source']}",
        f"- cost: {m.about['cost']}",
        f"- scope: {m.scope}",
        f"- keeps: {m.budget}",
        f"- readings: {m.about['readings']}",
    ]
    if m.parts:
        lines.append(f"- parts: {', '.join(m.parts)}")
    if m.gathered:
        lines.append(f"- gathered during the prefill: {', '.join(m.gathered)}")
    return lines if m.parameters else [*lines, "- parameters: none"]


def _table(m: Method) -> list[str]:
    """Return the table of parameters; an empty text without parameters."""
    if not m.parameters:
        return []
    changed = {key: value for key, value in m.released.items() if "." not in key}
    lines = ["| parameter | default | released | meaning |", "|---|---|---|---|"]
    for p in m.parameters:
        released = f"`{_yaml(changed[p.name])}`" if p.name in changed else ""
        lines.append(f"| `{p.name}` | `{p.default}` | {released} | {_cell(p.meaning)} |")
    inside = [f"`{key}={_yaml(value)}`" for key, value in m.released.items() if "." in key]
    return lines + (["", f"`released` also sets {', '.join(inside)}."] if inside else [])


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else text + "."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them with `--check`."""
    return command("methods_page", __doc__, pages, arguments)


if __name__ == "__main__":
    sys.exit(main())
