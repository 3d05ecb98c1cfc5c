"""Compiles LaTeX where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from mmkv_bench.tables.latex import PACKAGES

PREAMBLE = "\\documentclass{article}\n\\usepackage{%s}\n\\begin{document}\n"


def compiled(body: str, folder: Path, packages: Iterable[str] = PACKAGES) -> str:
    """What LaTeX wrote of it; skips the test where there is none."""
    program = shutil.which("pdflatex") or shutil.which("lualatex") or shutil.which("tectonic")
    if program is None:
        pytest.skip("no LaTeX here (pdflatex, lualatex or tectonic)")
    file = folder / "tables.tex"
    file.write_text(PREAMBLE % ",".join(packages) + body + "\\end{document}\n")
    words = [program, file.name] if program.endswith("tectonic") else [
        program, "-interaction=nonstopmode", "-halt-on-error", file.name
    ]  # fmt: skip
    done = subprocess.run(words, cwd=folder, capture_output=True, check=False)
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, said[-2000:]
    return said
