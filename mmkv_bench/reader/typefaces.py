"""Typefaces of documents: `dev` and `test` use matplotlib's, training uses packages of fonts.

No family of typefaces is in two splits. `tools.train_reader.gather_typefaces` makes training's folder, which is not shipped.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

SHIPPED = {
    "dev": ("DejaVuSans", "DejaVuSans-Bold"),
    "test": (
        *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold", "STIXGeneral", "STIXGeneralBol"),
    ),
}
"""Names of files in matplotlib's fonts folder, without the extension."""


@cache
def typefaces(split: str, folder: str | None = None) -> list[str]:
    """Return the font files of a split (`train`, `dev` or `test`).

    folder: the folder of training's typefaces, only for `train`.

    Raises:
        FileNotFoundError: the folder has no fonts.
    """
    if split in SHIPPED:
        import matplotlib

        shipped_folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        return [str(shipped_folder / f"{name}.ttf") for name in SHIPPED[split]]
    files = sorted(str(path) for path in Path(folder or "").glob("*.[ot]tf")) if folder else []
    if not files:
        raise FileNotFoundError(f"no typefaces for {split} in {folder}; see tools/train_reader/gather_typefaces.py")
    return files
