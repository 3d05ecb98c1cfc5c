"""Every small wrong change that can be made to one line of a file, and how to make it again after the file changed."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "is": "is not"}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "&": "|", "|": "&"}
SWAPPED = ("min max", "any all", "amin amax", "argmin argmax", "floor ceil", "minimum maximum", "less greater")
SWAPS = {a: b for pair in SWAPPED for a, b in (pair.split(), pair.split()[::-1])}
SILENT = {"strict", "indent", "stacklevel", "ensure_ascii", "errors", "encoding", "newline", "exist_ok", "parents"}
"""Keywords whose value no result shows, or whose change is no change where the lengths agree."""
SPEECH = {"print", "warn", "warning", "info", "debug", "log", "echo"}
TALKING = {"__repr__", "__str__", "explain", "describe", "message", "sentence"}


@dataclass(frozen=True)
class Mutation:
    """One line of one function, and what stands there instead; `nth` counts equal lines of the function."""

    file: str
    function: str
    line: str
    nth: int
    instead: str
    kind: str


def candidates(file: str, source: str) -> dict[int, list[Mutation]]:
    """Line number -> every mutation of that line of a file; only lines within functions have any."""
    lines, found = source.splitlines(), {}
    for name, function in functions(ast.parse(source)):
        for node in _code(function):
            for kind, row, first, last, text in _changes(node, lines):
                line = lines[row - 1]
                if line.isascii():
                    nth = lines[function.lineno - 1 : row - 1].count(line)
                    instead = line[:first] + text + line[last:]
                    found.setdefault(row, []).append(Mutation(file, name, line, nth, instead, kind))
    return {row: sorted(set(every), key=vars_of) for row, every in sorted(found.items())}


def vars_of(mutation: Mutation) -> tuple:
    """A key that sorts mutations of a line the same way in every process."""
    return (mutation.kind, mutation.instead, mutation.function)


def row_of(mutation: Mutation, source: str) -> int:
    """The line number where a mutation belongs today; LookupError when its line is not in its function any more."""
    lines = source.splitlines()
    for name, function in functions(ast.parse(source)):
        if name == mutation.function:
            rows = [n for n in range(function.lineno, function.end_lineno + 1) if lines[n - 1] == mutation.line]
            if len(rows) > mutation.nth:
                return rows[mutation.nth]
    raise LookupError(f"{mutation.file}: {mutation.function} has no line {mutation.line.strip()!r}")


def applied(mutation: Mutation, source: str) -> str:
    """The file with the mutation in it."""
    lines = source.splitlines(keepends=True)
    row = row_of(mutation, source) - 1
    lines[row] = mutation.instead + "\n"
    return "".join(lines)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Qualified name and node of every function, outer ones first; what is inside a function belongs to it as well."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from functions(node, prefix)


def _code(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function that decide something: no docstring, annotation, decorator, message or assertion."""
    if function.name in TALKING:
        return
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom) or _spoken(node):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.keyword) and node.arg in SILENT:
            continue
        yield node
        if isinstance(node, ast.AnnAssign):
            waiting += [inner for inner in (node.target, node.value) if inner is not None]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting += [] if node.name in TALKING else node.body
        else:
            waiting += ast.iter_child_nodes(node)


def _spoken(node: ast.AST) -> bool:
    called = node.value if isinstance(node, ast.Expr) else node
    name = getattr(called, "func", None)
    return isinstance(called, ast.Call) and (getattr(name, "attr", None) or getattr(name, "id", None)) in SPEECH


def _changes(node: ast.AST, lines: list[str]) -> Iterator[tuple[str, int, int, int, str]]:
    """(kind, row, first column, last column, new text) of every change of this one node."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for left, right in itertools.pairwise(sides):
            yield from _operator("comparison", left, right, COMPARISONS, lines)
    elif isinstance(node, ast.BinOp) and not any(isinstance(s, ast.JoinedStr) for s in (node.left, node.right)):
        yield from _operator("arithmetic", node.left, node.right, ARITHMETIC, lines)
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _operator("and or", left, right, {"and": "or", "or": "and"}, lines)
    elif isinstance(node, ast.Constant):
        yield from _constant(node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and _one_line(node):
        yield "negation", node.lineno, node.col_offset, node.col_offset + len("not "), ""
    elif isinstance(node, ast.If | ast.While) and _one_line(node.test):
        test = lines[node.test.lineno - 1][node.test.col_offset : node.test.end_col_offset]
        yield "negation", node.test.lineno, node.test.col_offset, node.test.end_col_offset, f"not ({test})"
    elif isinstance(node, ast.IfExp) and _one_line(node):
        line = lines[node.lineno - 1]
        body, other = (line[part.col_offset : part.end_col_offset] for part in (node.body, node.orelse))
        yield "other branch", node.lineno, node.body.col_offset, node.body.end_col_offset, other
        yield "other branch", node.lineno, node.orelse.col_offset, node.orelse.end_col_offset, body
    elif isinstance(node, ast.Call) and _one_line(node.func):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in SWAPS:
            yield "swap", node.lineno, node.func.end_col_offset - len(name), node.func.end_col_offset, SWAPS[name]
    elif _droppable(node) and _one_line(node):
        yield "dropped statement", node.lineno, node.col_offset, node.end_col_offset, "pass"


def _operator(kind, left, right, changes, lines) -> Iterator[tuple[str, int, int, int, str]]:
    if left.end_lineno != right.lineno:
        return
    between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    symbol = between.strip("() ")
    if symbol in changes:
        first = left.end_col_offset + between.index(symbol)
        yield kind, right.lineno, first, first + len(symbol), changes[symbol]


def _constant(node: ast.Constant) -> Iterator[tuple[str, int, int, int, str]]:
    values = []
    if isinstance(node.value, bool):
        values = [not node.value]
    elif isinstance(node.value, int | float):
        values = [node.value + 1, node.value - 1] if node.value else [node.value + 1]
    for value in values:
        yield "constant", node.lineno, node.col_offset, node.end_col_offset, repr(value)


def _droppable(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return stored or isinstance(node, ast.AugAssign | ast.Continue | ast.Break)


def _one_line(node: ast.AST) -> bool:
    return node.lineno == node.end_lineno
