"""Promise: the dataset of docs/own_data.md is made and answered as the page says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from mmkv_bench.cli.main import main
from mmkv_bench.store.store import Store

PAGE = Path("docs/own_data.md")


@pytest.mark.slow
def test_the_pages_files_make_a_dataset_that_is_checked_and_answered(tmp_path, monkeypatch, capsys):
    text = PAGE.read_text(encoding="utf-8")
    files = dict(re.findall(r"^`([\w/]+\.\w+)` [^\n]+:\n\n```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert {*files} == {"make.py", "task/shapes.yaml", "task/utils.py"}
    for folder in ("task", "shapes/data"):
        (tmp_path / folder).mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("make.py")
    settings = re.search(r"data check lmms_eval (.*)", text)[1].split()
    assert main(["data", "check", "lmms_eval", *settings]) == 0
    words = ["method=snapkv", "budget=16", "limit=2", "out=rows", "dataset.cluster_key=picture"]
    assert main(["run", "dataset=lmms_eval", *settings, *words]) == 0, capsys.readouterr().err
    rows = Store(tmp_path / "rows").responses(None, ["status", "cluster"]).to_pylist()
    assert [row["status"] for row in rows] == ["ok"] * 4 and {row["cluster"] for row in rows} == {"0"}
