"""Promise: `make size` counts what it says it counts; no number is held."""

from __future__ import annotations

import ast

from tools import size


def test_sizes_are_counted(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        '"""Two\nlines."""\n\n# a comment\nx = 1\n"""A note."""\n\n\ndef f():\n    """One."""\n    return [\n        x,\n    ]\n'
    )
    assert size.lines_of_code(file) == 5  # x, def, and the three of the return
    assert list(size.docstrings(ast.parse(file.read_text()))) == [(1, 2), (6, 6), (10, 10)]
    rooms = size.by_room()
    assert all(0 < code <= lines for _, lines, code in rooms.values() if lines) and "compression" in rooms
    assert size.words()["README.md"] == len((size.ROOT / "README.md").read_text().split())
    assert size.mentioning("DictConfig")


def test_functions_that_the_configuration_reaches_are_counted(tmp_path):
    (tmp_path / "a.py").write_text(
        "def taken(config: RunConfig, other):\n    return handed(config, config.model)\n\n"
        "def planned(plan):\n    config = plan.config\n    return config.out\n\n"
        "def narrow(model: Model):\n    return model.config.name\n"
    )
    assert size.config_walk(tmp_path) == [("a.py", "taken", 3), ("a.py", "planned", 1)]
    assert size.config_walk()
