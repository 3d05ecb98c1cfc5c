"""Gather the typefaces of training: open fonts from downloaded packages, cut down to the characters of the documents.

python -m tools.train_reader.gather_typefaces <folder of downloads> <out> [--download]

The folder holds wheels and source archives of PyPI and packages of npm: those of `PYPI` and `NPM` with --download, which wants
pip and npm. Out gets one .ttf or .otf of about 10 kB a style and `typefaces.json`: package, version and licence of each. Nothing
of it is shipped: the product draws with matplotlib's fonts.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from mmkv_bench.reader.render import CHARACTERS

STYLES = re.compile(r"-(Regular|Bold|Medium|Semibold|SemiBold|latin-400-normal|latin-700-normal)\.(ttf|otf|woff)$")
ONE_STYLE = re.compile(r"(DroidSansMono|FredokaOne-Regular|FjallaOne-Regular)\.ttf$")
LICENCES = {"font-fjallaone": "OFL-1.1", "font-rhd": "OFL-1.1", "wordcloud": "Apache-2.0 (Droid Sans Mono)"}
"""Of fonts whose package states the licence of its own code, or none."""


PYPI = (
    *(
        "font-roboto",
        "font-source-sans-pro",
        "font-source-serif-pro",
        "font-fredoka-one",
        "font-fjallaone",
        "font-caladea",
    ),
    *("font-hanken-grotesk", "font-manrope", "font-rhd", "wordcloud"),
)
NPM = (
    *("arvo", "lato", "open-sans", "merriweather", "montserrat", "inter", "noto-sans", "noto-serif", "ibm-plex-sans"),
    *(
        "ibm-plex-mono",
        "ibm-plex-serif",
        "source-code-pro",
        "ubuntu",
        "ubuntu-mono",
        "pt-sans",
        "pt-serif",
        "crimson-text",
    ),
    *("libre-baskerville", "work-sans", "nunito", "raleway", "bitter", "vollkorn", "cabin", "inconsolata", "fira-sans"),
    *("fira-mono", "karla", "rubik", "space-mono", "courier-prime", "josefin-sans", "quicksand", "exo-2", "zilla-slab"),
    *(
        "eb-garamond",
        "playfair-display",
        "anonymous-pro",
        "overpass",
        "dm-sans",
        "cousine",
        "tinos",
        "arimo",
        "gelasio",
    ),
    "carlito",
)
"""Names below @fontsource/."""


def download(folder: Path) -> None:
    """Get the packages of the committed reader, in the versions of today.

    Raises:
        CalledProcessError: an index does not give one of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *PYPI]
    subprocess.run(pip, check=True)
    subprocess.run(["npm", "pack", "--silent", *(f"@fontsource/{name}" for name in NPM)], check=True, cwd=folder)


def packages(folder: Path) -> Iterator[tuple[str, str, str, dict[str, bytes]]]:
    """Yield name, version, licence and font files of each downloaded package."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                content = {name: archive.read(name) for name in archive.namelist() if _wanted(name)}
        elif path.suffix in (".tgz", ".gz"):
            with tarfile.open(path) as archive:
                content = {
                    item.name: file.read()
                    for item in archive
                    if item.isfile() and _wanted(item.name) and (file := archive.extractfile(item))
                }
        else:
            continue
        fonts = {name: data for name, data in content.items() if STYLES.search(name) or ONE_STYLE.search(name)}
        if not fonts:
            continue
        meta = next((data for name, data in content.items() if name.endswith(("METADATA", "PKG-INFO"))), b"").decode()
        if meta:
            facts = dict(re.findall(r"^(Name|Version|License): (.*)$", meta, re.MULTILINE))
            name, version, licence = facts["Name"], facts["Version"], facts.get("License", "")
        else:
            facts = json.loads(next(data for path_, data in content.items() if path_.endswith("package/package.json")))
            name, version, licence = facts["name"], facts["version"], facts["license"]
        yield name, version, str(LICENCES.get(name.replace("_", "-"), licence)), fonts


def _wanted(name: str) -> bool:
    return bool(STYLES.search(name) or ONE_STYLE.search(name)) or name.endswith(
        ("METADATA", "PKG-INFO", "package/package.json")
    )


def cut(data: bytes) -> tuple[bytes, str]:
    """Return a font with the glyphs of `CHARACTERS` alone, and its ending."""
    from fontTools import subset  # type: ignore[import-untyped]
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]

    font = TTFont(io.BytesIO(data))
    font.flavor = None
    options = subset.Options(layout_features=[], hinting=False, name_IDs=["*"], notdef_outline=True)
    cutter = subset.Subsetter(options)
    cutter.populate(text=CHARACTERS)
    cutter.subset(font)
    stream = io.BytesIO()
    font.save(stream)
    return stream.getvalue(), ".otf" if "CFF " in font else ".ttf"


def main() -> None:
    """Write the fonts and their table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--download", action="store_true")
    args = parser.parse_args()
    if args.download:
        download(args.folder)
    args.out.mkdir(parents=True, exist_ok=True)
    table = {}
    for name, version, licence, fonts in packages(args.folder):
        family = re.sub(r"^(@fontsource/|font[-_])", "", name).replace("_", "-")
        for file, data in sorted(fonts.items()):
            if file.endswith(".otf") and any(other.endswith(Path(file).stem + ".ttf") for other in fonts):
                continue
            small, ending = cut(data)
            style = "bold" if re.search("(?i)bold|700", file) else "medium" if "Medium" in file else "regular"
            target = f"{family}-{style}{'-semi' if re.search('(?i)semibold', file) else ''}{ending}"
            (args.out / target).write_bytes(small)
            table[target] = {"package": name, "version": version, "licence": licence, "family": family}
    (args.out / "typefaces.json").write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(f"{len(table)} fonts of {len({row['family'] for row in table.values()})} families")


if __name__ == "__main__":
    main()
