"""From configuration to tasks: what is refused, and that looking at it imports nothing heavy."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from mmkv_bench.config import files
from mmkv_bench.datasets.drawn_page_tasks import PAGE_TASKS, SIZES, lmms_eval_name, page_task, place
from mmkv_bench.datasets.specs import KEYS, spec_from_config
from mmkv_bench.datasets.task_yaml import OWN_FOLDER, lmms_eval_tasks, own_tasks, plain_config, task_file
from mmkv_bench.errors import ConfigError, DataError, UnsupportedError
from mmkv_bench.evaluation import task_code
from mmkv_bench.evaluation.documents import sample_refs
from mmkv_bench.evaluation.fingerprints import fingerprint
from tests.each import each
from tests.evaluation.conftest import pages


def conf(name: str) -> dict:
    node = files.content("dataset", name)
    return node | ({"size": "large"} if "size" in node else {})


def test_the_package_imports_nothing_heavy():
    code = (
        "import sys, mmkv_bench.evaluation; "
        "print([m for m in ('torch', 'datasets', 'lmms_eval', 'numpy', 'PIL', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@each("name", PAGE_TASKS)
def test_every_pages_dataset_is_configured(name):
    spec = spec_from_config(name, conf(name))
    assert (spec.name, spec.split, spec.count, spec.metrics) == (f"{name}_large", "test", 500, ("exact_match",))


def test_the_node_of_other_tasks_has_every_key_but_size():
    assert set(conf("lmms_eval")) == set(KEYS) - {"size"}


@each(
    ("change", "message"),
    [
        ({"tsk": 1}, "did you mean 'task'"),
        ({"task": None}, "name an lmms-eval task"),
        ({"size": "huge"}, "allowed: large, small"),
        ({"split": "train"}, "dev, test"),
        ({"count": 0}, "at least 1"),
        ({"count": True}, "at least 1"),
        ({"dataset_path": "/data"}, "makes its data itself"),
        ({"placeholders": "interleaved"}, "did you mean 'interleave'"),
    ],
)
def test_bad_settings_are_refused_with_what_is_allowed(change, message):
    with pytest.raises(ConfigError, match=message):
        spec_from_config("pages_walk", conf("pages_walk") | change)


@each("limit", [0, -1, 1.5, True, "5"])
def test_a_limit_that_is_no_number_of_samples_is_refused(limit):
    with pytest.raises(ConfigError, match="at least 1"):
        sample_refs(pages(), limit)


def test_sizes_and_splits_have_names_of_their_own():
    specs = [pages(size=size, split=split) for size in SIZES for split in ("test", "dev")]
    assert len({spec.dataset for spec in specs}) == 4


def test_an_unknown_task_names_its_neighbours():
    spec = spec_from_config("lmms_eval", {"task": "docvqa_vla"})
    with pytest.raises(ConfigError, match="docvqa_val"):
        task_file(spec)


def test_a_group_of_tasks_is_no_task():
    with pytest.raises(UnsupportedError, match="group"):
        task_file(spec_from_config("lmms_eval", {"task": "hrbench"}))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="include_path.*not a folder"):
        task_file(spec_from_config("lmms_eval", {"task": "x", "include_path": str(tmp_path / "none")}))
    spec = spec_from_config("lmms_eval", {"task": "docvqa_val", "dataset_path": str(tmp_path / "none")})
    with pytest.raises(DataError, match="dataset_path.*not a folder"):
        sample_refs(spec, 1)


def test_every_prefix_of_a_mix_is_balanced_and_no_sample_comes_twice():
    for task, kinds in PAGE_TASKS.items():
        places = [place(task, position) for position in range(100)]
        assert len(set(places)) == 100
        for length in range(1, 100):
            counts = [sum(kind == one for one, _ in places[:length]) for kind in kinds]
            assert max(counts) - min(counts) <= 1


def test_every_pages_task_has_its_yaml_file():
    names = {lmms_eval_name(task, size) for task in PAGE_TASKS for size in SIZES}
    assert {path.stem for path in (OWN_FOLDER / "pages").glob("*.yaml")} == names
    assert {page_task(name) for name in names} == {(task, size) for task in PAGE_TASKS for size in SIZES}


def test_code_beside_a_task_is_part_of_its_fingerprint_and_its_place_is_not(own_task, tmp_path, tmp_path_factory):
    spec = own_task(include="base/common")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "common").write_text("repeats: 1\n")
    first = fingerprint(spec)
    (tmp_path / "notes.txt").write_text("not code")
    assert fingerprint(spec) == first
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "tasks"
    shutil.copytree(tmp_path, elsewhere)
    moved = spec_from_config("lmms_eval", {"task": spec.name, "include_path": str(elsewhere)})
    assert fingerprint(moved) == first
    prints = [first]
    with open(tmp_path / "utils.py", "a") as file:
        file.write("\nASKED = 'politely'\n")
    prints.append(fingerprint(spec))
    for added in ("prompt.py", "base/utils.py"):  # beside the YAML, and beside one that it includes
        (tmp_path / added).write_text("WORDS = 1\n")
        prints.append(fingerprint(spec))
    assert len(set(prints)) == 4


def test_code_of_every_task_of_this_project_is_told_apart_and_lmms_evals_is_its_version():
    for path in own_tasks().values():
        names = [line.split(":")[0] for line in task_code.digests(path)]
        assert names == sorted(file.name for file in path.parent.glob("*.py")) and "utils.py" in names
    assert task_code.digests(lmms_eval_tasks()[0]["docvqa_val"]) == []


def test_a_headline_metric_that_the_task_does_not_give_is_refused():
    node = {"task": "docvqa_val", "metrics": ["anlss"]}
    with pytest.raises(ConfigError, match=r"datasets\.docvqa_fixture\.metrics names 'anlss'.*did you mean 'anls'"):
        sample_refs(spec_from_config("docvqa", node, {"source": "fixture"}), 1)


@each("text", ["task: own_syntax\n  bad: [\n", "task: own_syntax\n<<<<\n"])
def test_a_task_file_that_is_no_yaml_is_one_sentence_with_its_line(tmp_path, text):
    (tmp_path / "own_syntax.yaml").write_text(text)
    spec = spec_from_config("lmms_eval", {"task": "own_syntax", "include_path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"own_syntax\.yaml, line \d.*is not valid YAML.*correct the file"):
        plain_config(task_file(spec))
