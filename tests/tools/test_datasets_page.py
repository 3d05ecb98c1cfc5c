"""The pages of data sets are what the configs give, and every dataset file says enough for its page and says it truly."""

from __future__ import annotations

from functools import cache

import pytest

from mmkv_bench.config.files import conf_dir, content, options
from mmkv_bench.datasets.drawn_page_tasks import PAGE_TASKS
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.datasets.task_yaml import plain_config, task_file
from mmkv_bench.errors import ConfigError
from tests.each import each
from tools import datasets_page

NAMES = [name for name in options("dataset") if name != datasets_page.ANY]
SHIPPED = (
    "chartqa",
    "docvqa",
    "hrbench4k",
    "hrbench8k",
    "mmmu",
    "mmvet",
    "muirbench",
    "nextqa",
    "ocrbench",
    "synthdog",
)
SHIPPED += ("textcaps", "textvqa", "vatex", "vstar", "worldqa")
SHIPPED += ("videochatgpt_gen", "videochatgpt_temporal", "videochatgpt_consistency")


@cache
def node(name: str) -> dict:
    return content("dataset", name)


@cache
def task_yaml(name: str) -> dict:
    return plain_config(task_file(spec_from_config(name, {k: v for k, v in node(name).items() if k != "size"})))


def test_the_datasets_of_the_papers_are_all_there():
    assert set(SHIPPED) <= set(NAMES)


@each("name", NAMES)
def test_every_dataset_says_what_it_is(name):
    made = datasets_page.read(name)
    assert all(made.facts[key] for key in ("title", "hub", "licence", "size", "samples", "scale", "metrics", "traps"))
    assert made.judge in ("none", "needed", "fallback")
    about = node(name)["about"]
    assert isinstance(about["traps"], list) and isinstance(about["papers"], list)
    if name not in PAGE_TASKS:
        assert about["columns"], "a run tells a schema that lacks a column by these"


def test_a_length_that_is_said_to_be_lmms_evals_is_that_of_its_task():
    said = {name: str(node(name)["about"]["generation"].get("lmms-eval", "")).split(" ")[0] for name in NAMES}
    said = {name: length for name, length in said.items() if length}
    lengths = {name: (task_yaml(name).get("generation_kwargs") or {}).get("max_new_tokens") for name in said}
    assert said == {name: "none" if length is None else str(length) for name, length in lengths.items()}
    assert len(said) > 20


@each("name", [name for name in NAMES if name not in PAGE_TASKS])
def test_every_dataset_decodes_greedily_to_a_length_of_its_own(name):
    generation = node(name)["generation"]
    assert generation["max_new_tokens"] >= 1 and not generation.get("do_sample", False)
    assert not {"temperature", "top_p", "top_k"} & set(generation)


def test_videos_are_said_to_be_where_the_task_looks_for_them():
    wanted = {name: task_yaml(name).get("dataset_kwargs") or {} for name in NAMES}
    wanted = {name: kwargs["cache_dir"].strip() for name, kwargs in wanted.items() if kwargs.get("video")}
    assert len(wanted) >= 8
    for name, folder in wanted.items():
        assert str(node(name)["about"]["media"]).startswith(f"{folder}/"), name


def test_the_committed_pages_are_what_the_command_writes(tmp_path, capsys):
    assert datasets_page.main([str(tmp_path)]) == 0
    made = {file.relative_to(tmp_path): file.read_text() for file in tmp_path.rglob("*.md")}
    docs = conf_dir().parent / "docs"
    committed = [docs / "datasets.md", *(docs / "datasets").glob("*.md")]
    assert made == {file.relative_to(docs): file.read_text() for file in committed}, "run `make docs`"
    assert datasets_page.main(["--check"]) == 0
    (tmp_path / "datasets" / "mmmu.md").unlink()
    assert datasets_page.main(["--check", str(tmp_path)]) == 1
    assert "datasets/mmmu.md: out of date; run `make docs`" in capsys.readouterr().out


def test_a_family_of_many_shares_a_page_and_loses_nothing():
    pages = datasets_page.pages()
    assert all(f"| [{name}](datasets/" in pages["datasets.md"] for name in NAMES)
    section = pages["datasets/milebench.md"]
    family = [name for name in NAMES if name.startswith("milebench_")]
    assert len(family) == 29 and all(f"| `{name}` |" in section for name in family)
    for name in family:
        about = node(name)["about"]
        assert all(str(about[key]) in section for key in ("hub", "licence", "size", "scale"))
        assert all(trap in section for trap in about["traps"])


def test_the_page_tells_papers_lengths_and_judges():
    section = datasets_page.pages()["datasets/videochatgpt_gen.md"]
    for words in ("HybridKV: 128 (table 3", "lmms-eval: 1024", "needed: without one", "gpt-4o-mini"):
        assert words in section


@each(
    ("change", "words"),
    [
        (("  licence: ", "  license: "), "says nothing under about.licence"),
        (("here: 32", "here: 64"), "generates 32 tokens and says 64"),
    ],
)
def test_a_dataset_that_does_not_explain_itself_is_refused(tmp_path, monkeypatch, change, words):
    source = (conf_dir() / "dataset" / "docvqa.yaml").read_text()
    assert change[0] in source
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "docvqa.yaml").write_text(source.replace(*change))
    monkeypatch.setattr("mmkv_bench.config.files.conf_dir", lambda: tmp_path)
    with pytest.raises(ConfigError, match=words):
        datasets_page.read("docvqa")
