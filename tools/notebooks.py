"""Run the notebooks and write their outputs into them: `python -m tools.notebooks [names]`, `make notebooks`.

Values that differ between runs are left out of the files: execution times, the kernel's version, and stderr.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"


def executed(path: Path) -> Any:
    """Run a notebook from top to bottom on this interpreter's kernel, and return it with its outputs."""
    import nbclient
    import nbformat

    book = nbformat.read(path, 4)
    manager: Any = nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(FOLDER)}})
    manager.create_kernel_manager()
    # The kernel of this interpreter, whatever kernels the user has registered under the same name.
    manager.km.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.execute(
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "TQDM_DISABLE": "1",
        }
    )
    book.metadata = nbformat.from_dict({"kernelspec": book.metadata.get("kernelspec", {})})
    for cell in book.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return book


def main() -> None:
    """Run the named notebooks, or all."""
    import nbformat

    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        path = FOLDER / f"{name.removesuffix('.ipynb')}.ipynb"
        path.write_text(nbformat.writes(executed(path)).replace(f"{ROOT}/", "") + "\n")
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
