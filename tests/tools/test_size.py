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
    assert size.words()["README.md"] == len((size.ROOT / "README.md").read_text().split())


def test_rooms_are_counted_largest_first_and_files_outside_beside_them(tmp_path, monkeypatch):
    for name, text in (
        ("a.py", "x = 1\n"),
        ("small/b.py", "# DictConfigs\ny = 2\n"),
        ("large/c.py", "a = DictConfig\nb = 1\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "large/d.py").write_text("\nc = 3\n")
    assert "compression" in {folder.name for folder in size.PACKAGE.iterdir()}
    monkeypatch.setattr(size, "PACKAGE", tmp_path)
    rooms = size.by_room()
    assert rooms == {"large": (2, 4, 3), "(top)": (1, 1, 1), "small": (1, 2, 1)} and next(iter(rooms)) == "large"
    assert size.mentioning("DictConfig") == ["large/c.py"]


def test_functions_that_the_configuration_reaches_are_counted(tmp_path):
    (tmp_path / "a.py").write_text(
        "def taken(config: RunConfig, other):\n    return handed(config, config.model)\n\n"
        "def planned(plan):\n    config = plan.config\n    return config.out\n\n"
        "def narrow(model: Model):\n    return model.config.name\n"
    )
    assert size.config_walk(tmp_path) == [("a.py", "taken", 3), ("a.py", "planned", 1)]
    assert size.config_walk()
