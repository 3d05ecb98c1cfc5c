"""Tables: members that differ in a few columns, each as a file of its own would have it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hydra.core.config_search_path import SearchPathElement

from mmkv_bench.config import files, overrides
from mmkv_bench.config.compose import OwnFolder, compose
from mmkv_bench.config.files import conf_dir, options
from mmkv_bench.errors import ConfigError

TABLE = """
template:
  task: "{name}"
  title: "{short} of {benchmark}"
  samples: "{samples}"
  length: {here: "{samples}", theirs: "{theirs}"}
  traps: ["{own}", "for {name}"]
  plain: [1, null]
columns: {samples: 200, benchmark: "bench {edition}", edition: 2, theirs: null, own: []}
kinds:
  large: {samples: 900, theirs: 16}
rows:
  one: {short: First}
  two: {short: Second, edition: 3, own: [a, "{short}"], kinds: [large]}
"""
ONE = {
    "task": "one",
    "title": "First of bench 2",
    "samples": 200,
    "length": {"here": 200},
    "traps": ["for one"],
    "plain": [1, None],
}
TWO = {
    "task": "two",
    "title": "Second of bench 3",
    "samples": 900,
    "length": {"here": 900, "theirs": 16},
    "traps": ["a", "Second", "for two"],
    "plain": [1, None],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "dataset" / "tables").mkdir(parents=True)
    (tmp_path / "dataset" / "tables" / "bench.yaml").write_text(TABLE)
    return tmp_path


def test_a_row_is_the_template_with_its_columns_and_those_of_its_kinds(folder):
    assert files.members(folder / "dataset") == {"one", "two"}
    assert files.read(folder / "dataset", "one", dict) == ONE
    assert files.read(folder / "dataset", "two", dict) == TWO
    assert files.read(folder / "dataset", "three", dict) is None


def test_a_table_of_the_users_own_folder_offers_its_rows_as_files_do(folder):
    assert {"one", "two"} <= set(options("dataset", (str(folder),))) and "bench" not in options(
        "dataset", (str(folder),)
    )
    found = compose([f"hydra.searchpath=['{folder}']", "dataset=[two]"]).datasets
    assert found == {"two": TWO}
    with pytest.raises(ConfigError, match="unknown dataset 'three'"):
        compose([f"hydra.searchpath=['{folder}']", "dataset=three"])


def test_a_file_that_is_no_table_is_named(folder):
    (folder / "dataset" / "tables" / "bench.yaml").write_text("rows: {}")
    with pytest.raises(ConfigError, match=r"bench\.yaml is not a table; a table needs the keys template and rows"):
        files.members(folder / "dataset")


def test_only_conf_and_folders_named_with_it_are_read_this_way():
    path = [SearchPathElement("main", f"file://{conf_dir()}"), SearchPathElement("main", "file:///of/another/program")]
    OwnFolder().manipulate_search_path(SimpleNamespace(get_path=lambda: path))
    assert [element.path for element in path] == [f"mmkv://{conf_dir()}", "file:///of/another/program"]
    assert overrides.located("file:///x") == overrides.located("/x") == "mmkv:///x"
    assert overrides.located("pkg://theirs.conf") == "pkg://theirs.conf"
