"""Which tests run a line, the cheapest first: from a coverage database with one context per test, and junit's times.

python -m pytest -n 2 --cov=mmkv_bench --cov-context=test --cov-report= --junitxml=junit.xml
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from functools import cache
from pathlib import Path

from coverage import CoverageData


class Covering:
    """The tests of a coverage database; `root` is the checkout in which it was made."""

    def __init__(self, database: Path, junit: Path, root: Path):
        self._data = CoverageData(basename=str(database))
        self._data.read()
        self._root = root
        self._seconds = _times(junit)
        self._of_file = defaultdict(list)
        for test in self._seconds:
            self._of_file[test.split("::")[0]].append(test)

    @cache  # noqa: B019 - one object per process
    def _contexts(self, file: str) -> dict[int, list[str]]:
        return self._data.contexts_by_lineno(str(self._root / file))

    def lines(self, file: str) -> set[int]:
        """The lines of a file that some test runs."""
        return {row for row, names in self._contexts(file).items() if any(names)}

    def tests(self, file: str, row: int) -> list[str]:
        """One case of each test function that runs the line, cheapest first, then all further cases.

        What a fixture ran for the first test of a file stands for all tests of that file: they use it too.
        """
        direct, shared = set(), set()
        for context in self._contexts(file).get(row, []):
            test, _, phase = context.rpartition("|")
            direct.add(test)
            if phase == "setup":
                shared.update(self._of_file[test.split("::")[0]])
        direct &= self._seconds.keys()
        return self._ordered(direct) + self._ordered(shared - direct)

    def _ordered(self, tests: set[str]) -> list[str]:
        by_cost = sorted(tests, key=lambda test: (self._seconds[test], test))
        first: dict[str, str] = {}
        for test in by_cost:
            first.setdefault(test.split("[")[0], test)
        chosen = set(first.values())
        return list(first.values()) + [test for test in by_cost if test not in chosen]

    def seconds(self, tests: list[str]) -> float:
        """What these tests took in the run that was measured."""
        return sum(self._seconds[test] for test in tests)


def _times(junit: Path) -> dict[str, float]:
    """Node id -> seconds of every test that passed."""
    found: dict[str, float] = {}
    for case in ET.parse(junit).iter("testcase"):
        if case.find("skipped") is None:
            path = case.get("classname").replace(".", "/") + ".py"
            found[f"{path}::{case.get('name')}"] = float(case.get("time"))
    return found
