"""Find the cause of a broken promise for `mmkv-bench check`: the line in the user's file, the fault, and what to write there.

A promise is what every method has to keep, such as finite scores; `invariants.py` checks each one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.observation import Needs
from mmkv_bench.config.shorthand import OBSERVATION
from mmkv_bench.errors import first_line, traceback_line
from mmkv_bench.methods import invariants

Check = Callable[["Compressor"], "str | None"]

_UNDECLARED = re.compile(r"the scorer reads (\w+)(?: >= (\d+))? but its `needs` does not declare it")
_SCORED = re.compile(r"gave (torch\.\w+) (\[[\d, ]*\]) in layer \d+; a score is .*? (\[[\d, ]*\])")

_FIXES: dict[Check, tuple[str, str, str]] = {
    invariants.scores_are_finite: (
        "scorer",
        "score",
        "return finite scores; `.clamp_min(1e-12)` below a division or a log",
    ),
    invariants.the_budget_is_kept: (
        "allocator",
        "caps",
        "let the caps of a layer add up to `budget * KV heads`, or say in `allowance` what they add up to",
    ),
    invariants.nothing_is_remembered: (
        "scorer",
        "score",
        "draw with `generator=obs.generator(seed)`, and keep nothing in the object or the module",
    ),
    invariants.seeds_matter_only_if_declared: ("scorer", "stochastic", ""),
    invariants.equal_keys_give_equal_scores: ("scorer", "key", ""),
    invariants.neighbours_change_nothing: (
        "scorer",
        "score",
        "put every parameter that a value depends on into the name that it is shared under, or use `obs.memo`",
    ),
    invariants.nothing_is_written_to: ("scorer", "score", "write to a copy: `obs.key.clone()`"),
}
"""Promise -> the part that usually breaks it, the method to inspect, and what to write."""


_SAME_TWICE = (invariants.nothing_is_remembered, invariants.nothing_is_written_to)
_NEEDED: dict[Check, tuple[Check, ...]] = {
    invariants.neighbours_change_nothing: (invariants.nothing_is_remembered,),
    invariants.seeds_matter_only_if_declared: _SAME_TWICE,
    invariants.equal_keys_give_equal_scores: _SAME_TWICE,
}
"""Promise -> promises that must be kept before it can be checked; all need finite scores."""


@dataclass(frozen=True)
class Finding:
    """The cause of a broken promise."""

    place: str  # `path:line`, or the path of the file
    fault: str  # what is wrong
    fix: str = ""  # what to write instead; "" if unknown
    error: str = ""  # text of the exception, if there was one; promises broken by equal errors have one cause

    def __str__(self) -> str:
        return f"{self.place}: {self.fault}" + (f"; {self.fix}" if self.fix else "")

    def has_same_cause(self, other: Finding) -> bool:
        """Tell whether `other`, the finding of another promise, has the same error as cause."""
        return bool(self.error) and (self.error == other.error or self.error in other.fault)


def depends_on_broken(check: Check, broken: Collection[Check]) -> bool:
    """Tell whether a check has no meaning, because it depends on a promise in `broken`."""
    return any(one in broken for one in (invariants.scores_are_finite, *_NEEDED.get(check, ())))


def run_check(check: Check, made: Compressor, path: str) -> Finding | None:
    """Run one check of the method `made`; return the cause if the promise is broken, None if it is kept.

    path: the user's file that defines the method.
    """
    try:
        fault = check(made)
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises is the finding
        return _finding_of_exception(error, made, path)
    return None if fault is None else _finding_of_fault(check, fault, made, path)


def _finding_of_fault(check: Check, fault: str, made: Compressor, path: str) -> Finding:
    if check not in _FIXES:
        return Finding(path, fault)
    part_name, method, fix = _FIXES[check]
    if part_name == "allocator" and line_of(path, made.allocator, method) is None:
        part_name, method, fix = "selector", "select", "keep as many indices of each head as its cap says"
    if fault.endswith(invariants.IN_REDUCE):
        part_name, method, fix = "reducer", "reduce", "write to a copy: `key.clone()`"
    line = line_of(path, getattr(made, part_name), method)
    return Finding(f"{path}:{line}" if line else path, fault, fix)


def _finding_of_exception(error: Exception, made: Compressor, path: str) -> Finding:
    """Return the finding for an exception that a check raised.

    Its place is the last line of the user's file in the traceback, or the method of the file whose result was refused.
    """
    text = first_line(error).partition(" (Needs(")[0]
    line = traceback_line(error, str(Path(path).expanduser().resolve()))
    undeclared_need, wrong_score = _UNDECLARED.search(text), _SCORED.search(text)
    fix = ""
    if undeclared_need is not None:
        fix = _declaration(undeclared_need[1], undeclared_need[2], made, path, line or 0)
    elif isinstance(error, AttributeError) and "'Observation'" in text:
        fix = OBSERVATION
    elif wrong_score is not None:
        line = line_of(path, made.scorer, "score")
        fix = (
            "end with `.float()`"
            if wrong_score[2] == wrong_score[3]
            else f"return {wrong_score[3]} numbers, KV heads by tokens"
        )
    elif type(error).__name__ == "NonFiniteScoreError":
        line, fix = line_of(path, made.scorer, "score"), _FIXES[invariants.scores_are_finite][2]
    elif type(error).__name__ == "OverBudgetError":
        line, fix = line_of(path, made.allocator, "caps"), _FIXES[invariants.the_budget_is_kept][2]
    return Finding(f"{path}:{line}" if line else path, text, fix, text)


def _declaration(need: str, number: str | None, made: Compressor, path: str, line: int) -> str:
    """Return the instruction to declare a need (a field of `Needs`) that a scorer or allocator reads undeclared.

    The instruction names a parameter of the code if its value is large enough.
    number: the smallest sufficient value, as text; None for a field that is True or False. line: where the file reads the
    undeclared value.
    """
    text = Path(path).expanduser().read_text(encoding="utf-8")
    nodes: list[Any] = list(ast.walk(ast.parse(text)))
    enclosing_nodes = [node for node in nodes if getattr(node, "lineno", line + 1) <= line <= node.end_lineno]
    name = next((node.name for node in enclosing_nodes if isinstance(node, ast.ClassDef)), type(made.scorer).__name__)
    part = made.allocator if name == type(made.allocator).__name__ else made.scorer
    arguments = [argument for node in enclosing_nodes if isinstance(node, ast.Call) for argument in node.args]
    needed_value, declaration = number or "True", "`needs = {}`"
    if number and number not in map(ast.unparse, arguments):
        searched_nodes = [*arguments, *(node for node in enclosing_nodes if isinstance(node, ast.FunctionDef))]
        attribute_names = [
            node.attr for one in searched_nodes for node in ast.walk(one) if isinstance(node, ast.Attribute)
        ]
        matching_attributes = (
            one for one in attribute_names if isinstance(size := getattr(part, one, None), int) and size >= int(number)
        )
        if parameter := next(matching_attributes, None):
            needed_value, declaration = f"self.{parameter}", "`@property` and `def needs(self): return {}`"
    import_hint = "" if "Needs" in text else f", and `from {Needs.__module__} import Needs` above it"
    return (
        f"write {declaration.format(f'Needs({need}={needed_value})')} into the class {name}{import_hint}; {OBSERVATION}"
    )


def line_of(path: str, part: Any, method: str) -> int | None:
    """Return the line on which a part's class defines `method`, or the line of the class if it inherits the method.

    None if the file does not define the class.
    """
    tree = ast.parse(Path(path).expanduser().read_bytes())
    name = type(part).__name__
    cls = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if cls is None:
        return None
    for node in cls.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if getattr(node, "name", None) == method or method in names:
            return node.lineno
    return cls.lineno
