"""Notebooks are in git with their outputs, use public names alone, and run from a clean kernel, offline, on what is in git."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tools import notebooks

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PUBLIC = {"mmkv_bench", "mmkv_bench.tiny.pages", "mmkv_bench.tables.figure"}


def code(path: Path) -> list[dict]:
    """The cells of code, read as plain JSON: importing nbformat takes seconds, which `make test-full` has."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_notebooks_have_outputs_are_named_in_the_docs_and_import_public_names_alone():
    page = (ROOT / "docs" / "python.md").read_text()
    for path in NOTEBOOKS:
        text = path.read_text()
        assert not re.search(r"/(?:tmp|root|work|home)/|Warning:", text), path.name
        for cell in code(path):
            assert cell["execution_count"], path.name
            assert all(output["output_type"] != "error" for output in cell["outputs"]), path.name
            shown = {kind for output in cell["outputs"] for kind in output.get("data", ())}
            drawn = re.search(r"^plot\(|plt\.show", "".join(cell["source"]), re.MULTILINE)
            assert "image/png" in shown or not drawn, path.name
        assert f"notebooks/{path.name}" in page, path.name
        trees = [ast.parse("".join(cell["source"])) for cell in code(path)]
        imported = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert {node.module for node in imported if node.module.startswith("mmkv_bench")} <= PUBLIC, path.name
    assert len(NOTEBOOKS) >= 7 and sum(path.stat().st_size for path in NOTEBOOKS) < 2_000_000


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import nbformat

    book, committed = notebooks.executed(path), nbformat.read(path, 4)
    nbformat.validate(committed)
    kinds = [
        sorted(kind for output in cell.get("outputs", ()) for kind in output.get("data", ())) for cell in book.cells
    ]
    assert kinds == [
        sorted(kind for output in cell.get("outputs", ()) for kind in output.get("data", ()))
        for cell in committed.cells
    ], "make notebooks writes the outputs anew"
    assert any("image/png" in shown for shown in kinds), "every notebook draws something"
