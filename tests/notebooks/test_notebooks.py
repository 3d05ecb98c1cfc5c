"""Notebooks are in git without outputs, use public names alone, and run from a clean kernel, offline, on what is in git."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PUBLIC = {"mmkv_bench", "mmkv_bench.tiny.pages"}


def code(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def test_notebooks_are_stripped_named_in_the_docs_and_import_public_names_alone():
    page = (ROOT / "docs" / "python.md").read_text()
    for path in NOTEBOOKS:
        book = nbformat.read(path, 4)
        nbformat.validate(book)
        for cell in book.cells:
            assert not cell.get("outputs") and not cell.get("execution_count"), path.name
        assert f"notebooks/{path.name}" in page, path.name
        imported = [
            node for text in code(path) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)
        ]
        assert {node.module for node in imported if node.module.startswith("mmkv_bench")} <= PUBLIC, path.name
    assert len(NOTEBOOKS) >= 7


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.read(path, 4)
    manager = nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(ROOT / "notebooks")}})
    manager.create_kernel_manager()
    # The kernel of this interpreter, whatever kernels the user has registered under the same name.
    manager.km.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.execute(
        env={**os.environ, "HF_HUB_OFFLINE": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    )
    kinds = {kind for cell in book.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())}
    assert "image/png" in kinds, "every notebook draws something"
