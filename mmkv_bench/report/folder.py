"""The folder of a report: marker file, pages and libraries."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from mmkv_bench import __version__
from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.report.charts import Figure, by_head
from mmkv_bench.report.formatting import score

MARK = "report.json"
FORMAT = "mmkv-bench report 1"
_FOLDERS = ("cells", "configs", "data", "figures", "images", "lib", "receipts", "samples")  # data: of earlier versions
_UNFINISHED_FOLDER = ".making"  # folder of a new report until it is complete
_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*\.[a-z]+")
TEMPLATES = Path(__file__).with_name("templates")
LIBRARIES = ("plotly", "itables")
MISSING = (
    "a report needs the package {name} for its charts or tables, but it is not installed; install mmkv-bench again"
)


class Folder:
    """The folder into which a report is written. A complete new report replaces an earlier one.

    further: (file, link text) of pages that are linked after the overview and the table.

    Attributes:
        bytes: bytes written so far, by subfolder; `pages` stands for the top folder.
    """

    def __init__(self, root: Path, further: Sequence[tuple[str, str]] = ()) -> None:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        self.root, self.further, self._making = root, further, root / _UNFINISHED_FOLDER
        self.bytes: dict[str, int] = {}
        self.files = 0
        self._heads: set[str] = set()
        self._templates = Environment(
            loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, undefined=StrictUndefined
        )
        self._templates.filters["score"] = score
        self._templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
        versions = (f"{name} {distribution(name).version}" for name in LIBRARIES)
        self._templates.globals |= {"version": __version__, "libraries": ", ".join(versions)}

    def begin(self) -> None:
        """Make the report's folder, and in it a subfolder for the new report. An earlier report stays until `finish`.

        Raises StoreError: the disk refuses to write.
        """
        with _store_errors(self.root):
            self._making.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._making)
            self._making.mkdir()
            (self.root / MARK).write_text(json.dumps({"format": FORMAT}) + "\n")

    def finish(self) -> None:
        """Replace an earlier report by the new one. Raises StoreError: the disk refuses to write."""
        with _store_errors(self.root):
            for name in _FOLDERS:
                if (self.root / name).is_dir():
                    shutil.rmtree(self.root / name)
            for path in [*self.root.glob("scores-*.html"), *self.root.glob("*.js")]:
                path.unlink()
            for path in self._making.iterdir():
                os.replace(path, self.root / path.name)
            self._making.rmdir()

    def page(self, name: str, template: str, /, **values: Any) -> None:
        """Write `<name>.html` from a template. values: variables of the template."""
        root = "../" * name.count("/")
        shared_values = {"root": root, "page": f"{name}.html", "further": self.further}
        text = self._templates.get_template(template).render(**shared_values, **values)
        self.write(f"{name}.html", text.encode())

    def figure(self, name: str, figure: Figure | None, header: Sequence[str] = (), rows: Sequence[Any] = ()) -> None:
        """Write `figures/<name>.js`: a chart that several pages can show, with its numbers (`header`, `rows`) as a
        table.

        figure: plotly figure; None: only the table.
        """
        macros: Any = self._templates.get_template("macros.html").module
        numbers_html = str(macros.plain(header, rows)) if header else ""
        if figure is not None and header:
            numbers_html = f"<details><summary>as numbers</summary>{numbers_html}</details>"
        figure_json = json.dumps({"figure": figure, "numbers": numbers_html}, separators=(",", ":"))
        self.write(f"figures/{name}.js", f"mmkv.put({json.dumps(name)},{figure_json});\n".encode())

    def heads(self, layers: int, heads: int, words: str, kinds: Sequence[str] = ("",), digits: int = 0) -> str:
        """Write the heat map of `by_head` unless it exists, and return its name. Arguments: see `by_head`."""
        name = f"heads-{layers}-{heads}-{len(kinds)}-{digits}"
        if name not in self._heads:
            self._heads.add(name)
            self.figure(name, by_head(layers, heads, words, kinds, digits))
        return name

    def write(self, name: str, data: bytes) -> None:
        """Write one file of the report. Raises StoreError: the disk refuses to write."""
        assert _FILE_NAME_PATTERN.fullmatch(name), f"{name!r} is no name of a file"
        path, (kind, _, _) = self._making / name, name.rpartition("/")
        with _store_errors(self.root):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.bytes[kind or "pages"] = self.bytes.get(kind or "pages", 0) + len(data)
        self.files += 1

    def libraries(self) -> None:
        """Copy the style sheet, the script, and the libraries with their licences into the report.

        A page opened from a file cannot import DataTables, a JavaScript module. So itables writes a script that
        contains it.
        """
        from itables.javascript import generate_init_offline_itables_html

        for name in ("report.css", "report.js"):
            self.write(name, (TEMPLATES / name).read_bytes())
        plotly, itables = (distribution(name) for name in LIBRARIES)
        self.write("lib/plotly.js", _file(plotly, "plotly/package_data/plotly.min.js"))
        bundle_file = _file(itables, "itables/html/dt_bundle.js")
        bundle = Path(str(itables.locate_file("itables/html/dt_bundle.js")))
        itables_script = generate_init_offline_itables_html(bundle).partition("<script>")[2].partition("</script>")[0]
        self.write("lib/itables.js", itables_script.encode())
        self.write("lib/LICENSE-datatables.txt", bundle_file[max(bundle_file.rfind(b"/*! Bundled license"), 0) :])
        for each in (plotly, itables):
            for file in each.files or ():
                if file.parent.name == "licenses":
                    self.write(f"lib/LICENSE-{each.name}.txt", Path(str(each.locate_file(file))).read_bytes())


def check(root: Path) -> None:
    """Check that a report can be written to the folder `root`.

    Raises ConfigError: `root` is no folder, contains something other than a report, or a needed package is missing.
    """
    for name in LIBRARIES:
        try:
            distribution(name)
        except PackageNotFoundError:
            raise ConfigError(MISSING.format(name=name)) from None
    if not root.exists() and not root.is_symlink():
        return
    if not root.is_dir():
        raise ConfigError(f"--out {root} is not a folder; give a new folder, or the folder of an earlier report")
    if any(root.iterdir()) and not _is_report(root):
        raise ConfigError(
            f"--out {root} is not empty and has no earlier report; give a new folder, or the folder of an earlier report, which "
            "is then replaced"
        )


def _is_report(root: Path) -> bool:
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
            f"{package.name} {package.version} has no file {name} ({problem.strerror}); install the version of requirements.lock"
        ) from problem


@contextmanager
def _store_errors(root: Path) -> Iterator[None]:
    """Turn an error of the disk into StoreError. root: the report's folder."""
    try:
        yield
    except OSError as problem:
        raise StoreError(
            f"writing the report below {root} failed: {problem.strerror or problem}; free disk space or choose another folder, "
            "then run the same command again"
        ) from problem
