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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


@each("folder", ["conf", "mmkv_bench/tiny/weights", "mmkv_bench/datasets/tasks"])
def test_the_wheel_carries_data(wheel, folder):
    inside = "mmkv_bench/conf" if folder == "conf" else folder
    files = [f for f in (ROOT / folder).rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert files
    names = set(wheel.namelist())
    assert {f"{inside}/{f.relative_to(ROOT / folder)}" for f in files} <= names


def test_the_wheel_has_the_command_and_no_tests(wheel):
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "mmkv-bench = mmkv_bench.cli.main:main" in wheel.read(entry).decode()
    assert not [name for name in wheel.namelist() if name.startswith("tests/") or "__pycache__" in name]


def test_an_unpacked_wheel_finds_its_configuration(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = (
        "from mmkv_bench.config.schema import conf_dir, options, resolve_path\n"
        "from pathlib import Path\n"
        "print(conf_dir(), 'mmshift' in options('method'), Path(resolve_path('pkg://mmkv_bench/tiny/weights')).is_dir())"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.split() == [str(tmp_path / "mmkv_bench" / "conf"), "True", "True"], ended.stderr
