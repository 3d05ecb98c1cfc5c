"""A user's method file as text: what can be said of it before it is run, and so without torch."""

from __future__ import annotations

import ast
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from mmkv_bench.config.shorthand import CUSTOM, README
from mmkv_bench.errors import ConfigError
from mmkv_bench.installed import is_installed


def where(method: str) -> str:
    """How the settings of a method of this name begin on a command line."""
    return f"methods.{CUSTOM}" if method == CUSTOM else f"variants.{method}"


def check(path: str | None, method: str = CUSTOM) -> None:
    """What can be refused of a file without running it, and so without torch: it is there, it is Python, and it imports no
    module that is not installed.

    Raises:
        ConfigError: as of `load`.
    """
    file, text = read(path, method)
    parsed(str(file.resolve()), text, str(path))


def read(path: str | None, method: str) -> tuple[Path, str]:
    """A file and its text, whose bytes are those of its UTF-8."""
    if not path:
        raise ConfigError(
            "method=custom needs a file; allowed: method=<file>.py, or methods.custom.path=<file>.py, with a subclass of "
            f"Scorer; {README}"
        )
    if not isinstance(path, str):
        raise ConfigError(
            f"{where(method)}.path={path} is no path; allowed: a .py file, relative to the working directory"
        )
    file = Path(path).expanduser()
    if file.suffix != ".py" or not file.is_file():
        what = "does not exist" if not file.exists() else "is not a Python file"
        new = f"; `mmkv-bench new {path}` writes one" if file.suffix == ".py" and not file.exists() else ""
        raise ConfigError(
            f"the method's file {path} {what}; allowed: a .py file, relative to the working directory{new}"
        )
    try:
        return file, file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the method's file {path} cannot be read ({error}); give a readable file in UTF-8") from None


def parsed(file: str, text: str, path: str) -> None:
    """Refuse a text that is no Python, or that imports what is not installed or cannot be heard."""
    try:
        tree = ast.parse(text, file)
    except SyntaxError as error:
        shown = f" in `{error.text.strip()}`" if error.text and error.text.strip() else ""
        raise ConfigError(
            f"{path}:{error.lineno}: the file is not valid Python: {error.msg}{shown}; correct the line"
        ) from None
    except ValueError as error:  # a null byte
        raise ConfigError(f"{path}: the file is not valid Python: {error}; correct it") from None
    _refuse_unseen_code(tree, path)


UNHEARD = {
    *(
        "av",
        "cv2",
        "ctypes",
        "datasets",
        "dbm",
        "decord",
        "duckdb",
        "h5py",
        "lmdb",
        "multiprocessing",
        "pandas",
        "polars",
    ),
    *("pyarrow", "safetensors", "sqlite3", "tokenizers", "torchcodec"),
}
"""Modules whose readers open files in C, or in other processes, which `own_reads` does not hear."""
VARIABLES = {"environ", "environb", "getenv"}
DYNAMIC = {"importlib", "pkgutil", "runpy", "zipimport"}
"""Modules that import what no line of a file names."""
BUILTINS = {"__import__", "compile", "eval", "exec"}


def _refuse_unseen_code(tree: ast.AST, path: str) -> None:
    """Code and data outside of the file would change answers without changing the cell: modules that are not installed,
    those that code chooses as it runs, and readers that nobody hears.

    Raises:
        ConfigError: the first such line.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BUILTINS:
            raise _refused(path, node, f"uses {node.id}", "write the code itself")
        named = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
        if named in VARIABLES:
            raise _refused(path, node, f"reads the environment ({named})", "give the value as an argument")
        if isinstance(node, ast.Attribute) and (named == "from_file" or ast.unparse(node) == "torch.jit.load"):
            raise _refused(
                path, node, f"uses {ast.unparse(node)}", "put the data into the file, or give them as arguments"
            )
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        roots = [alias.name.split(".")[0] for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            roots = [(node.module or "").split(".")[0]] if node.level == 0 else ["."]
        for root in roots:
            if root == ".":
                raise _refused(path, node, "imports a module relative to it", INSTALL)
            if root in DYNAMIC | UNHEARD:
                raise _refused(path, node, f"imports {root}", "do without it: import what the method needs by name")
            spec = find_spec(root) if root not in ("", "mmkv_bench", "__main__") else None
            if spec is not None and not all(map(is_installed, _places(spec))):
                raise _refused(path, node, f"imports {root}", INSTALL)


INSTALL = "put the method into one file, or install that module (not as an editable one)"


def _refused(path: str, node: ast.AST, what: str, instead: str) -> ConfigError:
    line = getattr(node, "lineno", 0)
    return ConfigError(f"{path}:{line}: {what}, which the cell's checksum would not cover; {instead}")


def _places(spec: ModuleSpec) -> list[Path]:
    """The folders of a top-level package, or the file of a module; none of what is built in."""
    packages = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    return packages or ([Path(spec.origin).resolve()] if spec.has_location and spec.origin else [])
