"""Notebooks are in git with their outputs, use public names alone, and run from a clean kernel, offline, on what is in git."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest

from tools import notebooks

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PUBLIC = {"mmkv_bench", "mmkv_bench.tiny.pages", "mmkv_bench.tables.figure"}


def code(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def test_notebooks_have_outputs_are_named_in_the_docs_and_import_public_names_alone():
    page = (ROOT / "docs" / "python.md").read_text()
    for path in NOTEBOOKS:
        book = nbformat.read(path, 4)
        nbformat.validate(book)
        text = path.read_text()
        assert not re.search(r"/(?:tmp|root|work|home)/|Warning:", text), path.name
        for cell in book.cells:
            if cell.cell_type == "code":
                assert cell.execution_count and all(output.output_type != "error" for output in cell.outputs), path.name
                shown = {kind for output in cell.outputs for kind in output.get("data", ())}
                assert "image/png" in shown or not re.search(r"^plot\(|plt\.show", cell.source, re.MULTILINE), path.name
        assert f"notebooks/{path.name}" in page, path.name
        imported = [
            node for text in code(path) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)
        ]
        assert {node.module for node in imported if node.module.startswith("mmkv_bench")} <= PUBLIC, path.name
    assert len(NOTEBOOKS) >= 7 and sum(path.stat().st_size for path in NOTEBOOKS) < 2_000_000


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book, committed = notebooks.executed(path), nbformat.read(path, 4)
    kinds = [
        sorted(kind for output in cell.get("outputs", ()) for kind in output.get("data", ())) for cell in book.cells
    ]
    assert kinds == [
        sorted(kind for output in cell.get("outputs", ()) for kind in output.get("data", ()))
        for cell in committed.cells
    ], "make notebooks writes the outputs anew"
    assert any("image/png" in shown for shown in kinds), "every notebook draws something"
