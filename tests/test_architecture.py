"""Rooms and arrows of the package: dependencies point downwards only, and no light module imports a heavy package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import mmkv_bench
from tests.cli.setting import CHECKOUT
from tests.each import each

ROOT = Path(mmkv_bench.__file__).parent

# room -> rooms and top-level modules it may import. `errors` and `secrecy` are everybody's. What is not listed imports nothing.
ARROWS = {
    "protocols": set(),
    "devices": set(),
    "compression": {"devices", "protocols"},
    "config": {
        "compression",
        "declared",
        "file_state",
        "protocols",
    },  # compression by name, a part's module when it is read
    "file_state": set(),
    "signals": set(),
    "statistics": set(),
    "tiny": set(),
    "reader": set(),
    "judging": {"config"},
    "families": {"protocols"},
    "models": {"config", "devices", "families", "file_state", "reader", "signals"},
    "store": {"declared", "devices", "file_state"},
    "datasets": {"file_state", "reader", "tiny"},
    "generation": {"families", "models", "compression", "devices", "protocols", "store"},
    "tables": {"config", "protocols", "statistics", "store"},
    "papers": {
        "config",
        "declared",
        "methods",
        "families",
        "models",
        "protocols",
        "statistics",
        "store",
        "tables",
        "forecast",
    },
    "report": {"config", "datasets", "models", "statistics", "store", "tables"},
    "calibrate": {"config", "compression", "families", "models", "generation", "store", "tiny"},
    "evaluation": {
        "consent",
        "datasets",
        "judging",
        "file_state",
        "protocols",
        "statistics",
    },
    "methods": {
        "consent",
        "file_state",
        "config",
        "compression",
        "generation",
        "models",
        "protocols",
        "tiny",
    },
    "plan": {
        "config",
        "devices",
        "protocols",
        "methods",
        "calibrate",
        "compression",
        "families",
        "models",
        "datasets",
        "evaluation",
        "judging",
        "store",
        "text_columns",
    },
    "forecast": {
        "calibrate",
        "text_columns",
        "compression",
        "config",
        "datasets",
        "devices",
        "generation",
        "families",
        "file_state",
        "models",
        "plan",
        "protocols",
        "store",
        "tiny",
    },
    "text_columns": set(),
    "declared": set(),
    "run": {
        "signals",
        "file_state",
        "config",
        "devices",
        "plan",
        "protocols",
        "compression",
        "families",
        "models",
        "generation",
        "datasets",
        "evaluation",
        "judging",
        "store",
        "tables",
        "text_columns",
        "forecast",
    },
    "efficiency": {
        "text_columns",
        "config",
        "devices",
        "plan",
        "protocols",
        "methods",
        "compression",
        "families",
        "models",
        "generation",
        "store",
        "run",
        "forecast",
    },
    "slurm": {"config", "evaluation", "plan", "run", "store", "forecast"},
    "diagnostics": {
        "consent",
        "calibrate",
        "compression",
        "config",
        "datasets",
        "evaluation",
        "generation",
        "methods",
        "families",
        "models",
        "plan",
        "protocols",
        "run",
        "store",
        "tables",
    },
    "api": {
        "calibrate",
        "forecast",
        "compression",
        "config",
        "datasets",
        "devices",
        "evaluation",
        "generation",
        "methods",
        "families",
        "models",
        "papers",
        "plan",
        "protocols",
        "run",
        "statistics",
        "store",
        "tables",
    },
    "cli": {
        "api",
        "consent",
        "calibrate",
        "slurm",
        "config",
        "datasets",
        "devices",
        "diagnostics",
        "efficiency",
        "evaluation",
        "families",
        "methods",
        "models",
        "papers",
        "plan",
        "report",
        "run",
        "store",
        "tables",
        "text_columns",
        "declared",
        "forecast",
        "signals",
    },
    "__main__": {"cli"},
    "door": set(),
    "errors": set(),
    "secrecy": set(),
    "consent": set(),
    "__init__": {"api", "methods"},
}
FLOORS = 10
"""At most so many rooms stand on each other, `errors` and `secrecy` not counted."""

FOREIGN = {
    "hydra": {"config"},
    "lmms_eval": {"evaluation"},
    "wandb": {"store"},
    "submitit": {"slurm", "cli"},
    "pandas": {"evaluation", "tables", "papers", "report", "efficiency"},
    "torch": {
        "devices",
        "compression",
        "families",
        "models",
        "generation",
        "methods",
        "calibrate",
        "diagnostics",
        "api",
        "efficiency",
        "forecast",
        "reader",
    },
    "flash_attn": {"compression"},
    "kvpress": {"compression"},
    "triton": {"compression"},
    "transformers": {
        "compression",
        "families",
        "models",
        "generation",
        "api",
        "forecast",
        "reader",
    },
}
"""Packages that only some rooms know."""

LIGHT = (
    "mmkv_bench",
    "mmkv_bench.config.schema",
    "mmkv_bench.errors",
    "mmkv_bench.cli.main",
    "mmkv_bench.cli.grammar",
    "mmkv_bench.cli.verbs.run",
    "mmkv_bench.run.launch",
)


def file_of(module: str) -> Path:
    inside = ROOT.joinpath(*module.split(".")[1:])
    return inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")


def room(file: Path) -> str:
    inside = file.relative_to(ROOT)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(file)))


@cache
def imports(file: Path, top_level_only: bool = False) -> set[str]:
    """Absolute names of the modules that a file imports, `TYPE_CHECKING` blocks left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "mmkv_bench")
        for inner in ast.iter_child_nodes(node):
            visit(inner)

    visit(parsed(file))
    return found


FILES = sorted(file for file in ROOT.rglob("*.py") if "tasks" not in file.parts)
ROOMS = sorted({room(file) for file in FILES})


MODULES = {
    ".".join(("mmkv_bench", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in ROOT.rglob("*.py")
}


@cache
def imported(file: Path) -> set[str]:
    """The modules of this package that a file imports anywhere, also inside functions and for types alone."""
    found: set[str] = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in MODULES else str(node.module) for name in whole)
    return found & set(MODULES)


def own(file: Path) -> set[str]:
    """Rooms and top-level modules that a file imports, its own and `errors` left out."""
    names = {name.split(".")[1] for name in imported(file) if name != "mmkv_bench"}
    return names - {room(file), "errors", "secrecy"}


def test_every_room_has_its_arrows_written_down():
    assert set(ROOMS) <= set(ARROWS)


@each("name", ROOMS)
def test_a_room_imports_only_rooms_below_it(name):
    wrong = {
        str(file.relative_to(ROOT)): sorted(own(file) - ARROWS[name])
        for file in FILES
        if room(file) == name and own(file) - ARROWS[name]
    }
    assert wrong == {}


def test_no_arrow_between_rooms_runs_back_up_and_few_rooms_stand_on_each_other():
    assert list(TopologicalSorter(ARROWS).static_order())
    real: dict[str, set[str]] = {}
    for file in FILES:
        real.setdefault(room(file), set()).update(own(file))
    floors: dict[str, int] = {}
    for name in TopologicalSorter(real).static_order():
        floors[name] = 1 + max((floors[below] for below in real[name]), default=0)
    del floors["__main__"]  # three lines that call cli
    assert max(floors.values()) <= FLOORS, floors


def test_no_file_imports_one_that_imports_it():
    """Imports inside functions and for types alone count too."""
    try:
        TopologicalSorter({module: imported(file) - {module} for module, file in MODULES.items()}).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' <- '.join(error.args[1])}") from None


def test_the_page_of_rooms_says_what_each_says_of_itself():
    table = dict(
        re.findall(r"^\| `mmkv_bench/(\w+)` \| (.+) \|$", (ROOT.parent / "docs" / "rooms.md").read_text(), re.MULTILINE)
    )
    folders = {file.parent.name: file for file in ROOT.glob("*/__init__.py")}
    assert table == {name: ast.get_docstring(parsed(file)).split("\n")[0] for name, file in folders.items()}


@each("package", FOREIGN)
def test_a_package_is_known_to_its_rooms_only(package):
    knowing = {room(file) for file in FILES for name in imports(file) if name.split(".")[0] == package}
    assert knowing <= FOREIGN[package]


def test_rows_need_neither_models_nor_the_engine():
    code = """
import importlib, pkgutil, sys
for name in ("statistics", "tables", "papers", "report", "store"):
    room = importlib.import_module(f"mmkv_bench.{name}")
    for found in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    assert not (heavy := {"torch", "transformers", "lmms_eval"} & set(sys.modules)), (name, heavy)
print("all")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=CHECKOUT)
    assert ended.stdout == "all\n", ended.stderr


@each("name", LIGHT)
def test_light_modules_import_only_the_standard_library(name):
    file = file_of(name)
    foreign = {module.split(".")[0] for module in imports(file, top_level_only=True)}
    assert foreign <= set(sys.stdlib_module_names) | {"mmkv_bench"}


def test_nothing_of_a_library_is_replaced():
    """No assignment to an attribute of an imported foreign module."""
    wrong = []
    for file in FILES:
        modules = {
            (alias.asname or alias.name).split(".")[0]
            for node in nodes(file)
            if isinstance(node, ast.Import)
            for alias in node.names
        } - {"sys", "os"}
        for node in nodes(file):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                base = target
                while isinstance(base, ast.Attribute):
                    base = base.value
                if isinstance(target, ast.Attribute) and isinstance(base, ast.Name) and base.id in modules:
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


def test_only_own_files_are_run_by_path():
    words = ("spec_from_file_location", "SourceFileLoader", "exec_module", "run_path", "source_to_code", "__import__")
    found = {str(file.relative_to(ROOT)) for file in FILES for word in words if word in file.read_text()}
    tasks = {"evaluation/task_code.py"}  # what a task's YAML names, once `documents.task_config` has the user's consent
    assert found == tasks | {
        "methods/method_file.py",
        "methods/method_file_checks.py",
    }  # which refuses their names in method files


DEVICE_ROOMS = ("torch.cuda", "torch.accelerator", "torch.backends.cuda")


def test_only_the_device_object_asks_what_a_device_is_and_has():
    """Neither `torch.cuda` nor a kind of device nor pinned memory elsewhere, in benchmarks, scripts and tools neither."""
    wrong = []
    elsewhere = [file for folder in ("benchmarks", "scripts", "tools") for file in (ROOT.parent / folder).rglob("*.py")]
    for file in [file for file in FILES if room(file) != "devices"] + elsewhere:
        for node in nodes(file):
            asked = isinstance(node, ast.Attribute) and (
                (node.attr in ("cuda", "accelerator") and ast.unparse(node) in DEVICE_ROOMS)
                or node.attr in ("is_cuda", "is_cpu", "pin_memory", "is_pinned")
                or (node.attr == "type" and ast.unparse(node.value).endswith("device"))
            )
            given = isinstance(node, ast.keyword) and node.arg == "pin_memory"
            named = isinstance(node, ast.Import | ast.ImportFrom) and "torch.cuda" in ast.unparse(node)
            if asked or given or named:
                wrong.append(f"{file.relative_to(ROOT.parent)}:{node.lineno}")
    assert wrong == []


def test_unsafe_loading_is_nowhere():
    for file in [*FILES, *sorted((ROOT.parent / "tools").rglob("*.py"))]:
        for node in nodes(file):
            if isinstance(node, ast.Call):
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                trust = given.get("trust_remote_code")
                assert trust is None or (isinstance(trust, ast.Constant) and trust.value is False), file
                last = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
                name = ast.unparse(node.func) if last in ("load", "loads", "unsafe_load", "eval", "exec") else None
                assert name not in ("pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "eval", "exec"), (
                    file
                )
                if name == "torch.load":
                    assert getattr(given.get("weights_only"), "value", None) is True, file


def test_one_file_composes_with_hydra_and_one_converts_what_it_composed():
    mentioning = {str(file.relative_to(ROOT)) for file in FILES if "DictConfig" in file.read_text()}
    assert mentioning == {"config/compose.py", "config/run_config.py"}
