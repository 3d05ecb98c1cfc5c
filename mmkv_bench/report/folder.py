"""The folder of a report: whose it is, the scripts that hold its data, the libraries beside its pages, and how large all is."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from mmkv_bench.errors import ConfigError, StoreError

MARK = "report.json"
FORMAT = "mmkv-bench report 1"
_OURS = ("data", "images", "lib", "pages")
_MAKING = ".making"  # a new report lies here until it is whole
_SAFE = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
PAGES = Path(__file__).with_name("pages")
LIBRARIES = ("plotly", "itables")
MISSING = "a report needs the package {name}, which carries scripts of its pages and is not installed; install mmkv-bench again"


class Folder:
    """Where a report is written. An earlier one of ours is replaced when the new one is whole, other files are never touched.

    Attributes:
        bytes: of everything written so far, by kind: `data`, `images`, `lib`, `pages`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bytes = dict.fromkeys(_OURS, 0)
        self.files = 0

    def begin(self) -> None:
        """Take the folder, or make it; an earlier report in it stays until `finish`.

        Raises:
            ConfigError: it is no folder, or holds something and no report of ours; a library is missing.
            StoreError: the disk refuses.
        """
        check(self.root)
        try:
            self._making.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._making)
            self._making.mkdir()
            (self.root / MARK).write_text(json.dumps({"format": FORMAT}) + "\n")
        except OSError as problem:
            raise _refused(self.root, problem) from problem

    def finish(self) -> None:
        """Put what was written in the place of an earlier report. Raises StoreError where the disk refuses."""
        try:
            for name in _OURS[:3]:
                if (self.root / name).is_dir():
                    shutil.rmtree(self.root / name)
            for path in self._making.iterdir():
                os.replace(path, self.root / path.name)
            self._making.rmdir()
        except OSError as problem:
            raise _refused(self.root, problem) from problem

    @property
    def _making(self) -> Path:
        return self.root / _MAKING

    def script(self, name: str, value: Any) -> None:
        """Write `data/<name>.js`, which gives `value` to the pages under that name."""
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        self.write("data", f"{name}.js", f"mmkv.put({json.dumps(name)},{text});\n".encode())

    def write(self, kind: str, name: str, data: bytes) -> None:
        """Write `<kind>/<name>`; pages lie at the top. Raises StoreError where the disk refuses."""
        assert _SAFE.fullmatch(name.rpartition(".")[0]), f"{name!r} is no name of a file"
        path = self._making / name if kind == "pages" else self._making / kind / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as problem:
            raise _refused(self.root, problem) from problem
        self.bytes[kind] += len(data)
        self.files += 1

    def libraries(self) -> Mapping[str, str]:
        """Copy the libraries with their licences; returns name -> version.

        Plotly is a plain script. DataTables comes as a module, and a page from a file may import none from another file: it
        lies in a script as the text of an address that the page imports.
        """
        plotly, itables = (distribution(name) for name in LIBRARIES)
        self.write("lib", "plotly.js", _file(plotly, "plotly/package_data/plotly.min.js"))
        module = _file(itables, "itables/html/dt_bundle.js")
        text = base64.b64encode(module).decode()
        self.write("lib", "datatables.js", f'mmkv.datatables="data:text/javascript;base64,{text}";\n'.encode())
        self.write("lib", "LICENSE-datatables.txt", module[max(module.rfind(b"/*! Bundled license"), 0) :])
        self.write("lib", "datatables.css", _file(itables, "itables/html/dt_bundle.css"))
        for each in (plotly, itables):
            for file in each.files or ():
                if file.parent.name == "licenses":
                    self.write("lib", f"LICENSE-{each.name}.txt", Path(str(each.locate_file(file))).read_bytes())
        return {each.name: each.version for each in (plotly, itables)}

    @property
    def size(self) -> int:
        return sum(self.bytes.values())


def check(root: Path) -> None:
    """Raises ConfigError unless a report can be written there: asked before the work."""
    for name in LIBRARIES:
        try:
            distribution(name)
        except PackageNotFoundError:
            raise ConfigError(MISSING.format(name=name)) from None
    if not root.exists() and not root.is_symlink():
        return
    if not root.is_dir():
        raise ConfigError(f"--out {root} is no folder; name one that is not there yet, or that of an earlier report")
    if any(root.iterdir()) and not _ours(root):
        raise ConfigError(
            f"--out {root} is not empty and holds no report of ours; name a folder that is not there yet, or that of an earlier "
            "report, which is replaced"
        )


def _ours(root: Path) -> bool:
    try:
        return str(json.loads((root / MARK).read_text())["format"]).startswith("mmkv-bench report ")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _file(package: Any, name: str) -> bytes:
    path = Path(str(package.locate_file(name)))
    try:
        return path.read_bytes()
    except OSError as problem:
        raise ConfigError(
            f"{package.name} {package.version} carries no {name} ({problem.strerror}); install the version of requirements.lock"
        ) from problem


def _refused(root: Path, problem: OSError) -> StoreError:
    return StoreError(
        f"writing the report failed under {root}: {problem.strerror or problem}. Free space or choose another folder, and "
        "run the same command again: it begins anew"
    )
