"""Which tests run a line, those that run the least besides first: from a coverage database with one context per test.

python -m pytest -n 2 -m "not full" --cov=mmkv_bench --cov-context=test --cov-report=
"""

from __future__ import annotations

import ast
import sqlite3
from collections import defaultdict
from functools import cached_property
from pathlib import Path

from coverage.numbits import numbits_to_nums

Test = str
"""A node id as pytest writes it; without its parameters, a test function."""


class Covering:
    """The tests of a coverage database; `root` is the checkout in which it was made."""

    def __init__(self, database: Path, root: Path):
        self._data = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        self._root = root

    @cached_property
    def _width(self) -> dict[Test, int]:
        """Test -> bytes of the bitmaps of the lines that it runs: a measure of how much it does."""
        found: dict[Test, int] = defaultdict(int)
        query = "select context, sum(length(numbits)) from line_bits join context on context.id = context_id group by 1"
        for context, width in self._data.execute(query):
            found[context.rpartition("|")[0]] += width
        return found

    @cached_property
    def _of_file(self) -> dict[str, list[Test]]:
        found: dict[str, list[Test]] = defaultdict(list)
        for test in self._width:
            found[test.split("::")[0]].append(test)
        return found

    def lines(self, file: str) -> set[int]:
        """The lines of a file that some test runs."""
        return {row for context, rows in self._rows(file) if context for row in rows}

    def _rows(self, file: str) -> list[tuple[str, list[int]]]:
        query = (
            "select context, numbits from line_bits join context on context.id = context_id "
            "join file on file.id = file_id where path = ?"
        )
        found = self._data.execute(query, (str(self._root / file),))
        return [(context, numbits_to_nums(numbits)) for context, numbits in found]

    def tests(self, file: str, row: int) -> list[Test]:
        """One case of each test function that runs the line, then all further cases, the narrowest first.

        What a fixture ran for the first test of a file stands for all tests of that file: they use it too.
        """
        direct, shared = set(), set()
        for context, rows in self._rows(file):
            if context and row in rows:
                test, _, phase = context.rpartition("|")
                direct.add(test)
                if phase == "setup":
                    shared.update(self._of_file[test.split("::")[0]])
        return self._ordered(direct) + self._ordered(shared - direct)

    def _ordered(self, tests: set[Test]) -> list[Test]:
        narrow = sorted(tests, key=lambda test: (self._width[test], test))
        first: dict[Test, Test] = {}
        for test in narrow:
            first.setdefault(function_of(test), test)
        chosen = set(first.values())
        return list(first.values()) + [test for test in narrow if test not in chosen]


def present(tests: list[Test], checkout: Path) -> list[Test]:
    """The functions of these tests, each once, as a checkout has them; one that moved to another file is found by its name."""
    places: dict[str, list[Test]] = defaultdict(list)
    for file in sorted((checkout / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                places[node.name].append(f"{file.relative_to(checkout)}::{node.name}")
    found: dict[Test, None] = {}
    for function in map(function_of, tests):
        here = places[function.rpartition("::")[2]]
        found.update(dict.fromkeys([function] if function in here else here))
    return list(found)


def function_of(test: Test) -> Test:
    """A node id without its parameters."""
    return test.split("[")[0]
