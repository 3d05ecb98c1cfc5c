"""Typefaces of documents: those of `dev` and `test` come with matplotlib, those of training with packages of fonts.

No family of one split stands in another. Training's folder is made by `tools.train_reader.gather_typefaces` and is not shipped.
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
"""Files of matplotlib's fonts folder, without their ending."""


@cache
def typefaces(split: str, folder: str | None = None) -> list[str]:
    """Return the font files of a split, sorted by name. folder: that of training's typefaces, for `train`.

    Raises:
        FileNotFoundError: the folder has no fonts.
    """
    if split in SHIPPED:
        import matplotlib

        place = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        return [str(place / f"{name}.ttf") for name in SHIPPED[split]]
    files = sorted(str(path) for path in Path(folder or "").glob("*.[ot]tf")) if folder else []
    if not files:
        raise FileNotFoundError(f"no typefaces for {split} in {folder}; see tools/train_reader/gather_typefaces.py")
    return files
