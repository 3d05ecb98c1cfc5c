"""Provenance names code, versions and device, and nothing about the person or the machine's place."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from store_examples import ENVIRONMENT, cell

import mmkv_bench
from mmkv_bench.store import provenance
from mmkv_bench.store.store import Store
from tests.each import each

IDENTITY = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def git(folder: Path, *arguments: str) -> str:
    environment = os.environ | IDENTITY
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


def collected(checkout: Path, **environment: str) -> dict:
    """What the copy of the package under `checkout` says of itself."""
    code = "import json; from mmkv_bench.store.provenance import collect; print(json.dumps(collect()))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | environment | {"PYTHONPATH": str(checkout)},
    )
    return json.loads(done.stdout)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A repository that holds just enough of the package."""
    root = tmp_path / "checkout"
    package = Path(mmkv_bench.__file__).parent
    (root / "mmkv_bench").mkdir(parents=True)
    for module in package.glob("*.py"):
        shutil.copy(module, root / "mmkv_bench")
    for room in ("devices", "store"):
        shutil.copytree(package / room, root / "mmkv_bench" / room, ignore=shutil.ignore_patterns("__pycache__"))
    (root / ".gitignore").write_text("__pycache__/\n")
    git(tmp_path, "init", "-q", "checkout")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return root


def test_the_commit_is_that_of_the_packages_own_checkout(checkout, tmp_path):
    other = tmp_path / "other"
    git(tmp_path, "init", "-q", "other")
    found = collected(checkout, GIT_DIR=str(other / ".git"))  # as inside a hook of another repository
    assert (found["git_commit"], found["git_dirty"]) == (git(checkout, "rev-parse", "HEAD"), False)


def test_a_file_is_read_as_a_commit_has_it_and_nothing_is_guessed(checkout, tmp_path):
    first = git(checkout, "rev-parse", "HEAD")
    (checkout / "margins").write_text("later\n")
    git(checkout, "add", "margins")
    git(checkout, "commit", "-q", "-m", "second")
    code = "import sys; from mmkv_bench.store.provenance import file_in_commit as read; "
    code += "print([read('margins', c) for c in sys.argv[1:]])"

    def read(root):
        words = [sys.executable, "-c", code, first, git(checkout, "rev-parse", "HEAD"), "f" * 40, "HEAD"]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    assert read(checkout).strip() == "['', 'later', None, None]"
    shutil.copytree(checkout / "mmkv_bench", tmp_path / "installed" / "mmkv_bench")
    assert read(tmp_path / "installed").strip() == "[None, None, None, None]"


@pytest.mark.parametrize("change", ["edit", "new file", "elsewhere"])
def test_dirty_means_that_the_code_differs(checkout, change):
    target = {"edit": "mmkv_bench/__init__.py", "new file": "mmkv_bench/new.py", "elsewhere": "results.md"}[change]
    with (checkout / target).open("a") as stream:
        stream.write("# changed\n")
    assert collected(checkout)["git_dirty"] is (change != "elsewhere")


def test_a_package_that_is_no_checkout_has_no_commit(checkout, tmp_path):
    git(tmp_path, "init", "-q", "somebody_else")
    installed = tmp_path / "somebody_else" / "site-packages"
    shutil.copytree(checkout / "mmkv_bench", installed / "mmkv_bench")
    git(tmp_path / "somebody_else", "add", "-A")
    git(tmp_path / "somebody_else", "commit", "-q", "-m", "an environment inside another repository")
    found = collected(installed)
    assert (found["git_commit"], found["git_dirty"]) == (None, None)
    assert collected(checkout, PATH="")["git_commit"] is None  # no git at all


def test_versions_and_device_are_told_without_importing_heavy_packages():
    code = (
        "import json, sys; from mmkv_bench.store.provenance import collect; "
        "print(json.dumps([collect(), [m for m in ('torch', 'transformers', 'wandb', 'lmms_eval') if m in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=ENVIRONMENT)
    found, imported = json.loads(done.stdout)
    assert imported == []
    versions = json.loads(found["versions"])
    assert versions["python"] == platform.python_version()
    assert set(provenance.PACKAGES) < set(versions)
    assert versions["pyarrow"] == metadata.version("pyarrow")
    assert found["torch"] == (versions["torch"] or "none")
    assert (found["device"], found["driver"]) == ("cpu", None)
    assert found["cpu"]


def test_processors_whose_names_a_hypervisor_shortened_differ_by_family_and_model(tmp_path):
    file = tmp_path / "cpuinfo"
    names = []
    for model in (1, 17):
        file.write_text(f"processor : 0\ncpu family\t: 25\nmodel\t\t: {model}\nmodel name\t: AMD EPYC\n")
        names.append(provenance._cpu(file))
    assert names == ["AMD EPYC (family 25, model 1)", "AMD EPYC (family 25, model 17)"]
    file.write_text("model name\t: Neoverse-N1\n")
    assert provenance._cpu(file) == "Neoverse-N1"
    assert provenance._cpu(tmp_path / "none") == (platform.machine() or None)


def test_no_host_user_path_or_environment_value_is_told(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a-very-secret-key")
    text = json.dumps(provenance.collect())
    for private in (str(Path.cwd()), str(Path.home()), sys.prefix, "a-very-secret-key"):
        assert private not in text
    for word in (socket.gethostname(), getpass.getuser()):  # may be short: as words, not inside a hash
        assert not re.search(rf"\b{re.escape(word)}\b", text)


def test_provenance_fits_into_a_cell_row(tmp_path):
    store = Store(tmp_path)
    found = provenance.collect()
    store.write_cells([cell() | found])
    (row,) = store.cells().to_pylist()
    assert {name: row[name] for name in found} == found


@each(
    ("report", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 2023\nGCC version: 12\n",
            "535.129.03",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC: 13.2.0 \n",
            "570.86.15",
        ),
        ("something else\n", None),
    ],
)
def test_the_driver_version_is_read_from_the_kernels_report(tmp_path, report, version):
    (tmp_path / "version").write_text(report)
    assert provenance._driver(tmp_path / "version") == version
    assert provenance._driver(tmp_path / "absent") is None
