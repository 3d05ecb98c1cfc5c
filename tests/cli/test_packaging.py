"""What is installed: pins that belong together, and a wheel that carries configuration, weights and tasks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mmkv_bench
from tests.each import each

ROOT = Path(mmkv_bench.__file__).parents[1]
if not (ROOT / "pyproject.toml").is_file():
    pytest.skip("not a checkout", allow_module_level=True)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text().splitlines()


def pins() -> dict[str, str]:
    found = {}
    for line in LOCK:
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), line
            found[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return found


def test_the_lock_pins_every_package_and_names_no_place():
    assert len(pins()) > 100
    assert not [line for line in LOCK if re.search(r"://|file:|^-|/tmp|--index", line)]


@each("extra", ["", "dev", "slurm", "notebooks"])
def test_the_lock_satisfies_what_the_project_asks_for(extra):
    locked = pins()
    wanted = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for text in wanted:
        requirement = Requirement(text)
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text} against {version}"


def test_the_environment_is_the_locked_one():
    """Numbers are claimed for the locked versions; a developer's environment that drifted should know it."""
    from importlib.metadata import version

    for name in ("torch", "transformers", "lmms-eval", "hydra-core", "datasets", "pyarrow", "pandas", "numpy"):
        assert version(name).partition("+")[0] == pins()[name]


@pytest.mark.slow
def test_what_is_imported_is_asked_for():
    """A package that only comes along with another goes away with it. kvpress is an extra that its users install; Triton is
    part of torch's wheels where there is a device for it, and row blocks run without it."""
    from importlib.metadata import packages_distributions

    where = packages_distributions()
    files = [file.read_text() for file in Path(mmkv_bench.__file__).parent.rglob("*.py")]
    names = {
        name
        for text in files
        for name in re.findall(r"^ *(?:from|import) (\w+)[\w. ]*(?:import .*)?$", text, re.MULTILINE)
    }
    foreign = {
        name: where[name][0]
        for name in names & where.keys() - {*sys.stdlib_module_names, "mmkv_bench", "kvpress", "triton"}
    }
    declared = [
        *PROJECT["dependencies"],
        *(text for extra in ("slurm", "gguf") for text in PROJECT["optional-dependencies"][extra]),
    ]
    asked = {canonicalize_name(Requirement(text).name) for text in declared}
    assert len(foreign) > 20
    assert {name for name, package in foreign.items() if canonicalize_name(package) not in asked} == set()


def test_no_requirement_is_exact_and_none_is_unbounded_below():
    """The lock is exact; a range lets the package live beside others."""
    for text in PROJECT["dependencies"]:
        operators = {one.operator for one in Requirement(text).specifier}
        assert operators in ({">="}, {">=", "<"}), text


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(built) -> zipfile.ZipFile:
    return zipfile.ZipFile(built)


@pytest.mark.slow
@each("folder", ["conf", "mmkv_bench/tiny/weights", "mmkv_bench/datasets/tasks"])
def test_the_wheel_carries_data(wheel, folder):
    inside = "mmkv_bench/conf" if folder == "conf" else folder
    files = [f for f in (ROOT / folder).rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert files
    names = set(wheel.namelist())
    assert {f"{inside}/{f.relative_to(ROOT / folder)}" for f in files} <= names


@pytest.mark.slow
def test_the_wheel_has_the_command_its_types_and_no_tests(wheel):
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "mmkv-bench = mmkv_bench.cli.main:main" in wheel.read(entry).decode()
    assert "mmkv_bench/py.typed" in wheel.namelist()
    assert not [name for name in wheel.namelist() if name.startswith("tests/") or "__pycache__" in name]


WATCHING = f"""\
import sys
def watch(event, given):
    path = given[0] if event == "open" and given else ""
    if isinstance(path, str) and path.startswith({str(ROOT) + os.sep!r}) and not path.startswith(tuple({{sys.prefix, *BESIDE}})):
        sys.stderr.write(f"read from the checkout: {{path}}\\n")
sys.addaudithook(watch)
"""
"""Put into an environment as sitecustomize.py: whatever a process there opens in the checkout, it says."""


def installed(built: Path, folder: Path, *more: str) -> Path:
    """The scripts of a new environment with the wheel, made by uv, which says on stderr what it reads from the checkout."""
    uv = [sys.executable, "-m", "uv", "--quiet"]
    subprocess.run([*uv, "venv", "--python", sys.executable, str(folder)], check=True)
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    command = [*uv, "pip", "install", "--python", str(scripts / "python"), str(built), *more]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (packages,) = folder.rglob("site-packages")
    beside = [path for path in sys.path if path.endswith("-packages")]
    (packages / "sitecustomize.py").write_text(f"BESIDE = {beside}\n{WATCHING}")
    if "--no-deps" in more:  # on its path, but without its .pth files: what is installed editable there is not found
        (packages / "beside.pth").write_text("\n".join(beside))
    return scripts


def ran(command: list[str], folder: Path) -> str:
    """What a command prints in a folder outside of the checkout, having read nothing of the checkout."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    ended = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "read from the checkout" not in ended.stderr, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_wheels_command_composes_a_run_outside_of_the_checkout(built, tmp_path):
    pytest.importorskip("uv", reason="uv makes the environment; `make` installs it")
    scripts = installed(built, tmp_path / "venv", "--no-deps", "--offline")
    said = ran([str(scripts / "mmkv-bench"), "method=mmshift", "budget=64", "--cfg", "job"], tmp_path)
    assert "budget: 64" in said and "path: pkg://mmkv_bench/tiny/weights" in said
    code = "from mmkv_bench.config.files import conf_dir; from mmkv_bench.config.schema import resolve_path; import mmkv_bench\n"
    code += "print(conf_dir(), resolve_path('pkg://mmkv_bench/tiny/weights'), mmkv_bench.__path__[0])"
    found = [Path(path).resolve() for path in ran([str(scripts / "python"), "-c", code], tmp_path).split()]
    assert all(path.is_dir() and path.is_relative_to((tmp_path / "venv").resolve()) for path in found)


@pytest.mark.full
def test_the_wheel_passes_the_first_command_in_an_empty_environment(built, tmp_path):
    """All requirements from the index, of the lock's versions; packages that uv has in its cache are linked, not fetched."""
    pytest.importorskip("uv", reason="uv makes the environment; `make` installs it")
    asked = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "-"]
    reached = subprocess.run([*asked, "--no-cache"], input="pytz", capture_output=True, text=True, check=False)
    if reached.returncode:
        pytest.skip(f"the package index cannot be reached: {reached.stderr.strip().splitlines()[-1]}")
    scripts = installed(built, tmp_path / "venv", "-c", str(ROOT / "requirements.lock"))
    said = ran([str(scripts / "mmkv-bench"), "method=mmshift", "budget=64", "limit=2"], tmp_path)
    assert re.search(r"^\| full +\| \d", said, re.MULTILINE) and re.search(r"^\| mmshift +\| \d", said, re.MULTILINE)
    assert (tmp_path / "runs" / "default" / "store.json").is_file()
