"""Checks of a user's method file: its text before it runs, and the files that it opens while it runs.

Results are identified by the checksum of the method file, so nothing outside of the file may change its answers. The
text is refused if it imports a module that is not installed, imports by a computed name, reads the environment, or uses
a reader that opens files in C. Files opened by Python code are caught at run time: the interpreter reports every
opening (audit event `open`, PEP 578). An opening with code of a method file on the stack is refused unless the file
belongs to an installed package.
"""

from __future__ import annotations

import ast
import os
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from mmkv_bench.config.shorthand import CUSTOM, README
from mmkv_bench.errors import ConfigError
from mmkv_bench.file_state import is_installed

PREFIX = "mmkv_bench_custom_"
"""Prefix of the module names of method files."""
UNHEARD = {
    *("av", "cv2", "ctypes", "datasets", "dbm", "decord", "duckdb", "h5py", "lmdb", "multiprocessing", "pandas"),
    *("polars", "pyarrow", "safetensors", "sqlite3", "tokenizers", "torchcodec"),
}
"""Modules whose readers open files in C or in other processes, without an audit event."""
VARIABLES = {"environ", "environb", "getenv"}
DYNAMIC = {"importlib", "pkgutil", "runpy", "zipimport"}
"""Modules that import by a computed name."""
BUILTINS = {"__import__", "compile", "eval", "exec"}
INSTALL = "put the method into one file, or install that module (not as an editable one)"
_KERNEL = ("/dev/", "/proc/", "/sys/")


class OwnFileReadError(ConfigError, PermissionError):
    """A user's method file opened another file.

    The error is a PermissionError, too, so libraries that only try to read an optional file continue without it.
    """


# ---------------------------------------------------------------- the text
def settings_prefix(method: str) -> str:
    """Return the prefix of a method's settings on the command line: `methods.custom`, or `variants.<name>`."""
    return f"methods.{CUSTOM}" if method == CUSTOM else f"variants.{method}"


def check(path: str | None, method: str = CUSTOM) -> None:
    """Raise ConfigError for a method file that is missing, is not Python or imports what is not allowed; it is not run.

    method: the method's name in the run, for messages.
    """
    file, text = read(path, method)
    check_text(str(file.resolve()), text, str(path))


def read(path: str | None, method: str) -> tuple[Path, str]:
    """Return a method file and its text; raise ConfigError if it cannot be read as UTF-8."""
    if not path:
        raise ConfigError(
            "method=custom needs a file; allowed: method=<file>.py, or methods.custom.path=<file>.py, with a subclass of "
            f"Scorer; {README}"
        )
    if not isinstance(path, str):
        raise ConfigError(
            f"{settings_prefix(method)}.path={path} is not a path; allowed: a .py file, relative to the working "
            "directory"
        )
    file = Path(path).expanduser()
    if file.suffix != ".py" or not file.is_file():
        problem = "does not exist" if not file.exists() else "is not a Python file"
        new_hint = f"; `mmkv-bench new {path}` writes one" if file.suffix == ".py" and not file.exists() else ""
        raise ConfigError(
            f"the method's file {path} {problem}; allowed: a .py file, relative to the working directory{new_hint}"
        )
    try:
        return file, file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the method's file {path} cannot be read ({error}); give a readable file in UTF-8") from None


def check_text(file: str, text: str, path: str) -> None:
    """Raise ConfigError for a text that is not Python, or for its first line that depends on something outside the file."""
    try:
        tree = ast.parse(text, file)
    except SyntaxError as error:
        line = f" in `{error.text.strip()}`" if error.text and error.text.strip() else ""
        raise ConfigError(
            f"{path}:{error.lineno}: the file is not valid Python: {error.msg}{line}; correct the line"
        ) from None
    except ValueError as error:  # a null byte
        raise ConfigError(f"{path}: the file is not valid Python: {error}; correct it") from None
    for node in ast.walk(tree):
        forbidden_use = _forbidden_use(node)
        if forbidden_use is not None:
            use, remedy = forbidden_use
            number = getattr(node, "lineno", 0)
            raise ConfigError(f"{path}:{number}: {use}, which the cell's checksum would not cover; {remedy}")


def _forbidden_use(node: ast.AST) -> tuple[str, str] | None:
    """Return how a syntax node depends on code or data outside of the file, and what to write instead; None: not at all."""
    if isinstance(node, ast.Name) and node.id in BUILTINS:
        return f"uses {node.id}", "write the code itself"
    name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
    if name in VARIABLES:
        return f"reads the environment ({name})", "give the value as an argument"
    if isinstance(node, ast.Attribute) and (name == "from_file" or ast.unparse(node) == "torch.jit.load"):
        return f"uses {ast.unparse(node)}", "put the data into the file, or give them as arguments"
    if isinstance(node, ast.ImportFrom) and node.level:
        return "imports a module by a relative path", INSTALL
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else modules
    for root in (module.split(".")[0] for module in modules):
        if root in DYNAMIC | UNHEARD:
            return f"imports {root}", "import what the method needs by name instead"
        spec = find_spec(root) if root not in ("", "mmkv_bench", "__main__") else None
        if spec is not None and not all(map(is_installed, _places(spec))):
            return f"imports {root}", INSTALL
    return None


def _places(spec: ModuleSpec) -> list[Path]:
    """Return the folders of a top-level package, or the file of a module; [] for built-in modules."""
    packages = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    return packages or ([Path(spec.origin).resolve()] if spec.has_location and spec.origin else [])


# ---------------------------------------------------------------- files that are opened
@cache
def refuse_openings() -> None:
    """Install the hook that refuses files opened by method files; only once per process."""
    sys.addaudithook(_on_event)


def _on_event(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open":
        return
    path, _, flags = arguments
    if not isinstance(path, str | bytes | os.PathLike):
        return
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_TRUNC | os.O_EXCL):  # nothing old can be read
        return
    method = _method_file()
    if method is None:
        return
    name = os.path.realpath(os.fsdecode(path))
    if name != os.path.realpath(method) and not name.startswith(_KERNEL) and not is_installed(Path(name)):
        raise OwnFileReadError(
            f"{method} opens {name}, which the cell's checksum would not cover; put the data into the method file, or give "
            "them as arguments"
        )


def _method_file() -> str | None:
    """Return the path of the method file whose code this thread runs; None if there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(PREFIX):
            return frame.f_code.co_filename
        frame = frame.f_back  # type: ignore[assignment]
    return None
