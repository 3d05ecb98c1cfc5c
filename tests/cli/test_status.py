"""`mmkv-bench status` counts rows as a slow loop does, packed or not, and `mmkv-bench plan` shows what is missing of them."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.config.files import conf_dir
from mmkv_bench.store import store_notes
from mmkv_bench.store.compact import pack
from mmkv_bench.store.store import Store
from mmkv_bench.tables.status import status
from tests.cli.setting import verb
from tests.store.store_examples import cell, failed, response

RUN = json.dumps({"limit": 6, "datasets": {"pages": {"about": {"samples": 500}}}})


@pytest.fixture
def store(tmp_path):
    """Two cells of six samples: one has four answers, the other two, of which one failed; nothing is scored."""
    made = Store(tmp_path / "rows")
    made.write_cells([cell(name, config=RUN, budget_entries=number) for name, number in (("c0", 64), ("c1", 32))])
    with made.writer("w0") as writer:
        for rows in ([response(0), response(0, "c1")], [response(1), failed(1, "c1")], [response(2)], [response(3)]):
            writer.commit(rows)
    return made


def test_a_store_is_counted(store, capsys):
    for packed in (False, True):
        if packed:
            pack(store, slim=True)
        (found,) = status(store).datasets
        assert (found.cells, found.samples, found.planned, found.rows) == (2, 6, 12, 6)
        assert (found.complete, found.failed, found.scored, found.stale) == (0, 1, 0, 2)
        assert verb("status")([str(store.root), "--failed"]) == 0
        said = capsys.readouterr().out
        assert f"{store.root}: 6 of 12 answers" in said and "0 of 2 (2 to score)" in said
        assert "1 oom on pages: out of memory" in said
        assert "pages s0001 snapkv@32: oom, out of memory" in said
        assert verb("status")([str(store.root), "--json", "--failed"]) == 0
        (told,) = json.loads(capsys.readouterr().out)
        assert told["datasets"][0]["rows"] == 6 and told["failed"][0]["sample_id"] == "s0001"


def test_cells_that_jobs_in_a_queue_are_to_begin_are_planned(store, tmp_path, capsys):
    store_notes.note_planned(store, {"c0": ("pages", 6), "c2": ("pages", 6), "d0": ("charts", 10)})
    store_notes.note_planned(store, {"d1": ("charts", 10)})
    charts, pages = status(store).datasets
    assert (pages.cells, pages.samples, pages.planned, pages.rows) == (3, 6, 18, 6)
    assert (charts.cells, charts.samples, charts.planned, charts.rows, charts.complete) == (2, 10, 20, 0, 0)
    assert status(store).missing == 32
    store_notes.forget_planned(store, ["c0", "c2", "d0"])
    assert [(one.dataset, one.cells) for one in status(store).datasets] == [("charts", 1), ("pages", 2)]
    (store.root / "planned.json").write_text("{")  # a disk that was full
    assert [one.dataset for one in status(store).datasets] == ["pages"]
    waiting = Store(tmp_path / "waiting")
    store_notes.note_planned(waiting, {"c0": ("pages", 6)})  # and no job has begun
    assert verb("status")([str(waiting.root)]) == 0
    assert f"{waiting.root}: 0 of 6 answers" in capsys.readouterr().out
    store_notes.forget_planned(waiting, ["c0"])
    assert not (waiting.root / "planned.json").exists()


def test_a_published_store_is_whole(capsys):
    root = conf_dir().parent / "results" / "tiny" / "large"
    assert verb("status")([str(root)]) == 0
    said = capsys.readouterr().out
    assert "29000 of 29000 answers" in said and said.count("29 of 29") == 4


def test_a_folder_without_rows_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert verb("status")(["nowhere"]) == verb("status")([]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "nowhere is not a folder of result rows" in first and "no result rows below runs" in second


def test_a_plan_tells_cells_and_what_is_missing(tmp_path, capsys):
    """Of a dataset whose data are not here too: its file says how many samples it has."""
    words = [
        "dataset=[pages_walk,docvqa]",
        "method=[full,snapkv]",
        "budget=[64,20%]",
        "limit=300",
        f"out={tmp_path}/rows",
    ]
    assert verb("plan")([*words, "--json"]) == 0
    text, document = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "pages_walk_small: 300 samples, 300 with missing answers" in text
    assert "docvqa: 300 samples as documented, 300 with missing answers" in text
    lines = [line.split("  ") for line in text.splitlines() if line.startswith("  snapkv")]
    assert [[part.strip() for part in line if part.strip()] for line in lines] == [
        ["snapkv", "paper", "64, 20%", "-", "paper", "2", "600", "0", "0", "600"]
    ] * 2
    told = json.loads(document)
    assert [one["label"] for one in told["datasets"][0]["cells"]] == ["full", "snapkv@64", "snapkv@20%"]
    assert not (tmp_path / "rows").exists()
