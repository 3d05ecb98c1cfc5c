"""docs/models.md is what conf/model gives, and every model's file says enough for it."""

from __future__ import annotations

import re

import pytest

from mmkv_bench.config import files
from mmkv_bench.config.files import conf_dir, options
from mmkv_bench.config.names import UNAVAILABLE
from mmkv_bench.errors import ConfigError
from tests.each import each
from tools import models_page

OWN = """\
  - {dataset: needle, metric: needle_recall, expected: 9.0, tolerance: 1.0, scale: 1, source: a table}
  - {group: LongBench all, expected: 30.0, tolerance: 1.0, scale: 100, source: a table}
"""
"""Gates that bring numbers of their own."""


@pytest.mark.full
def test_the_committed_page_is_what_the_command_writes(tmp_path, capsys, monkeypatch):
    assert models_page.main([str(tmp_path)]) == 0
    committed = conf_dir().parent / "docs" / "models.md"
    made = (tmp_path / "models.md").read_text()
    assert committed.read_text() == made, "run `make docs`"
    monkeypatch.setattr(models_page, "page", lambda: made)  # seconds of work, done once
    (tmp_path / "models.md").write_text("old")
    assert models_page.main(["--check", str(tmp_path)]) == 1
    assert "run `make docs`" in capsys.readouterr().out
    for name in (*models_page.names(), *UNAVAILABLE):
        assert f"# {name}\n" in made, f"{name} has no section"
    row = next(line for line in made.splitlines() if line.startswith("| [qwen2_5_vl_7b]"))
    assert "| 8.29 B | 28 | 28/4 x 128 | 57344 | 128000 | 1536 |" in row


def test_every_model_of_the_issue_runs_or_says_why_not():
    files = {
        "smollm2_135m_q4_1",
        "smollm2_135m_q4_1_english",
        "gemma3_270m_q4_k_m",
        "reader",
        "reader_video",
    }  # docs/pretrained.md, docs/reader.md
    assert set(models_page.names()) | {"hf", "tiny"} | files == set(options("model"))
    assert not set(UNAVAILABLE) & set(options("model"))


@each(
    ("change", "words"),
    [
        (("  licence: ", "  license: "), "says nothing under about.licence"),
        (("dataset: needle", "dataset: neelde"), "has a gate of neelde, which is not in conf/dataset"),
        (
            ("metric: needle_recall", "metric: needle_recal"),
            "needle_recal, which no run of it gives; did you mean",
        ),
        (("metric: needle_recall, ", ""), "a gate has the keys dataset, metric, expected"),
        (
            ("group: LongBench all", "group: LongBench most"),
            "has a gate of LongBench most, which is not in conf/dataset",
        ),
        (("group: LongBench all, ", "group: LongBench all, metric: x, "), "a gate has the keys group, expected"),
        (
            (OWN, "  - {dataset: mmmu, metric: mmmu_acc, printed: prefixkv_table14}\n"),
            "prefixkv_table14 prints 0 scores of the full",
        ),
    ],
)
def test_a_file_that_does_not_say_enough_is_refused(tmp_path, monkeypatch, change, words):
    source = (conf_dir() / "model" / "llama_3_8b.yaml").read_text()
    source = re.sub(r"(?<=gates:\n)(  - .*\n)+", OWN, source)
    assert change[0] in source
    folder = tmp_path / "conf"
    (folder / "model").mkdir(parents=True)
    (folder / "dataset").symlink_to(conf_dir() / "dataset")
    (folder / "model" / "llama_3_8b.yaml").write_text(source.replace(*change))
    (tmp_path / "reference").symlink_to(files.reference_dir())
    monkeypatch.setattr(files, "conf_dir", lambda: folder)
    with pytest.raises(ConfigError, match=words):
        models_page.read("llama_3_8b")
