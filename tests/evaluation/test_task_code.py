"""Promise: prompts of a user's task are made again in every run, and its code is part of the dataset's identity."""

from __future__ import annotations

import importlib
import importlib.util
import os
import py_compile
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmkv_bench import file_state
from mmkv_bench.datasets.specs import TaskSpec, spec_from_config
from mmkv_bench.evaluation import documents, fingerprints, task_code
from mmkv_bench.evaluation.fingerprints import fingerprint, inputs_of
from mmkv_bench.evaluation.generating import prompt_hashes
from tests.run.own_media import write_task

HEAD = "from pathlib import Path\nimport json, os\nfrom PIL import Image\nHERE = Path(__file__).parent\n"
TAIL = """
def scored(doc, results):
    return {"exact": float(results[0] == doc["answer"])}
def text(doc):
    return TEXT if "TEXT" in globals() else said(doc)
"""
PICTURE = 'def visual(doc):\n    return [Image.open(HERE / doc["file"]).convert("RGB")]\n'
CODE = {
    "listing": PICTURE + 'def said(doc):\n    return " ".join(sorted(os.listdir(HERE / "words")))\n',
    "parquet": PICTURE
    + 'import pandas\ndef said(doc):\n    return pandas.read_parquet(HERE / "word.parquet")["word"][0]\n',
    "module elsewhere": PICTURE + "import sys\nsys.path.insert(0, str(HERE.parent))\n"
    "def said(doc):\n    from mmkv_test_elsewhere import WORD\n    return WORD\n",
}


def store(folder: Path, word: str) -> None:
    """A word where a reader written in C and a module find it."""
    pq.write_table(pa.table({"word": [word]}), folder / "word.parquet")
    (folder.parent / "mmkv_test_elsewhere.py").write_text(f'WORD = "{word}?"\n')


def draw(file: Path, seed: int) -> None:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (56, 56, 3), np.uint8)).save(file)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(file_state, "SETTLED_NS", -1)
    folder = tmp_path / "task"
    (folder / "words").mkdir(parents=True)
    (folder / "words" / "one").touch()
    draw(folder / "0.bmp", 0)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mmkv_test_elsewhere", raising=False)
    return folder


def change(case: str, folder: Path) -> None:
    if case == "listing":
        (folder / "words" / "two").touch()
    else:
        store(folder, "two")
        sys.modules.pop("mmkv_test_elsewhere", None)


def looked(spec: TaskSpec) -> dict[int, str]:
    """The prompts' hashes as another process finds them."""
    fingerprints._MEMORIES.clear()
    documents._LOADED.clear()
    documents.READ_AT_IMPORT.clear()
    return prompt_hashes(spec, [0], None, anew=True)


@pytest.mark.slow
def test_what_nobody_hears_is_noticed_by_the_next_run(folder):
    for case, code in CODE.items():
        name = case.replace(" ", "_")
        own = shutil.copytree(folder, folder.parent / name)
        write_task(own, name, ["0.bmp"], "", 2)
        (own / "utils.py").write_text(HEAD + code + TAIL)
        store(own, "one")
        spec = spec_from_config(name, {"task": name, "include_path": str(own)})
        first = looked(spec)
        assert first[0], case
        change(case, own)
        assert looked(spec) != first, case


def test_packages_that_a_tasks_code_imports_are_part_of_the_datasets_identity(folder):
    write_task(folder, "packaged", ["0.bmp"], 'Image.open(path).convert("RGB")', 2)
    spec = spec_from_config("packaged", {"task": "packaged", "include_path": str(folder)})
    plain = fingerprint(spec)
    for unused in ("runs", ".venv"):
        (folder / unused).mkdir()
        (folder / unused / "a.py").write_text("")
    assert fingerprint(spec) == plain
    (folder / "inside" / "deep").mkdir(parents=True)
    (folder / "inside" / "deep" / "b.py").write_text("WORD = 1\n")
    utils = folder / "utils.py"
    text = utils.read_text()
    known = []
    for line in ("", "from inside.deep import b\n", "import importlib\n"):
        utils.write_text(text + line)
        known.append(fingerprint(spec))
        (folder / "inside" / "deep" / "b.py").write_text(f"WORD = {line!r}\n")
        assert (fingerprint(spec) != known[-1]) == bool(line)
    assert utils in inputs_of(spec) and folder / "inside" / "deep" / "b.py" in inputs_of(spec)


def test_code_that_a_package_imports_lies_behind_a_link_or_in_a_hidden_place_is_part_of_it_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "beside")])
    folder = tmp_path / ".hidden" / "task"
    for place in (folder / "first", folder / "second", tmp_path / "linked", tmp_path / "beside" / "mmkv_test_beside"):
        place.mkdir(parents=True)
    (folder / "first" / "linked").symlink_to(tmp_path / "linked")
    (folder / "first" / "around").symlink_to("../first")
    draw(folder / "0.bmp", 0)
    write_task(folder, "packed", ["0.bmp"], 'Image.open(path).convert("RGB")', 2)
    (folder / "utils.py").write_text("from first import a\n" + (folder / "utils.py").read_text())
    files = {
        folder / "first" / "a.py": "from second import b\nimport mmkv_test_beside\n",
        folder / "second" / "b.py": "",
        tmp_path / "linked" / "c.py": "",
        tmp_path / "beside" / "mmkv_test_beside" / "__init__.py": "",
    }
    for file, text in files.items():
        file.write_text(text)
    (folder / "fast.so").write_bytes(b"\x00")
    known = [task_code.digests(folder / "packed.yaml")]
    for file in (*files, folder / "fast.so"):
        file.write_bytes(file.read_bytes() + b"\nWORD = 1\n")
        known.append(task_code.digests(folder / "packed.yaml"))
        assert known[-1] != known[-2], file
    moved = shutil.copytree(tmp_path / ".hidden", tmp_path / "moved", symlinks=True) / "task"
    assert task_code.digests(moved / "packed.yaml") == known[-1]


def test_bytecode_of_another_text_is_not_run(folder):
    """Python goes by a source's time and size, which cp -p and tar keep; whoever imported a task's modules left some."""
    write_task(folder, "compiled", ["0.bmp"], 'Image.open(path).convert("RGB")', 2)
    utils, elsewhere = folder / "utils.py", folder.parent / "mmkv_test_elsewhere.py"
    utils.write_text(HEAD + CODE["module elsewhere"] + TAIL)
    store(folder, "one")
    spec = spec_from_config("compiled", {"task": "compiled", "include_path": str(folder)})
    known = [looked(spec)[0]]
    for file, old, new in ((elsewhere, "one", "two"), (utils, "return WORD", "return 'so'")):
        before, kept = file.stat(), Path(py_compile.compile(str(file), doraise=True))
        bytecode = kept.read_bytes()
        file.write_text(file.read_text().replace(old, new))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_size == before.st_size
        sys.modules.pop("mmkv_test_elsewhere", None)
        known.append(looked(spec)[0])
        assert kept.read_bytes() == bytecode, "it is the user's"
    assert len({*known}) == 3


@pytest.mark.slow
def test_installed_packages_keep_their_bytecode_and_modules_of_a_task_do_not(tmp_path, monkeypatch):
    places = {
        "task": tmp_path / "deep",
        "installed": tmp_path / "site-packages",
        "elsewhere": tmp_path.parent / "elsewhere",
    }
    for name, place in places.items():
        place.mkdir()
        monkeypatch.syspath_prepend(place)
        for case in ("stale", "alone"):
            file = place / f"{case}_{name}.py"
            file.write_text("WORD = 1\n")
            state = file.stat()
            py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")) if case == "alone" else None)
            file.write_text("WORD = 2\n")
            os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
        file.unlink()
        importlib.invalidate_caches()
        assert importlib.util.find_spec(f"stale_{name}") is not None, "Python knows the folder before we do"
    task_code.import_from_source([tmp_path])
    words = {
        f"{case} {name}": importlib.import_module(f"{case}_{name}").WORD
        for name in places
        for case in ("stale", "alone")
    }
    assert words == {f"alone {name}": 1 for name in places} | {
        "stale task": 2,
        "stale installed": 1,
        "stale elsewhere": 2,
    }
