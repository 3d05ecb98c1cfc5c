"""`python -m mmkv_bench data`, and what a run says of data that are not as they should be."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmkv_bench.config.files import options
from tests.cli.setting import CHECKOUT, verb
from tests.datasets.test_data_sources import CLIP, PAGE, write
from tests.each import each
from tests.run.setting import go

main = verb("data")
FILE = "docvqa/data/validation-00000-of-00001.parquet"


@pytest.fixture(autouse=True)
def _caches(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture
def root(tmp_path) -> Path:
    write(tmp_path / "root" / FILE, [PAGE, PAGE])
    return tmp_path / "root"


def report(capsys, *words: str) -> tuple[int, dict]:
    """Exit code and document of `check ... --json`."""
    code = main(["check", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)[0]


def test_the_list_names_every_dataset(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1:]} == set(options("dataset"))
    assert main(["list", "--json"]) == 0
    rows = {row["dataset"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mmvet"]["judge"] == "needed" and rows["docvqa"]["samples"] == "5349 (of 1286 pages)"
    assert rows["ocrbench"]["fixture"] and not rows["lmms_eval"]["fixture"]


@pytest.mark.full
def test_every_dataset_can_be_checked_where_nothing_is(capsys):
    names = [name for name in options("dataset") if name != "lmms_eval"]
    assert main(["check", *names, "--json"]) == 2
    every = json.loads(capsys.readouterr().out)
    assert [found["dataset"].removesuffix("_small") for found in every] == names
    for name, found in zip(names, every, strict=True):
        assert found["ready"] == name.startswith("pages"), name
        assert bool(found["missing"]) != found["ready"], name
        assert found["licence"] and found["expected_size"] and found["judge"], name
    ready = [name for name in names if name.startswith("pages")]
    assert main(["check", *ready]) == 0


@pytest.mark.slow
def test_data_that_are_there_are_counted_and_their_columns_compared(root, capsys):
    code, found = report(capsys, "docvqa", f"data.root={root}")
    assert code == 0 and found["ready"] and found["missing"] == []
    assert (found["files"], found["rows"], found["bytes"]) == (1, 2, (root / FILE).stat().st_size)
    assert set(found["columns"]) == {"question", "answers", "ucsf_document_id", "image"}
    assert main(["check", "docvqa", f"data.root={root}"]) == 0
    text = capsys.readouterr().out
    assert f"folder {root}/docvqa (1 file, " in text and "2 rows" in text and text.endswith("  ready\n")


def emptied(file: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(file).slice(0, 0), file)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), "has no data files"),
        (lambda file: file.write_bytes(file.read_bytes()[:300]), "is truncated or not a parquet file"),
        (
            lambda file: file.rename(file.with_name("test-00000-of-00001.parquet")),
            "no split 'validation'; allowed: test",
        ),
        (lambda file: write(file, [{"question": "?", "answers": ["a"]}]), "lack column ucsf_document_id"),
        (lambda file: write(file, [PAGE], picture=None), "lack column image"),
        (lambda file: emptied(file), "split validation of .*/docvqa has no rows; give the upstream files"),
    ],
)
def test_what_is_wrong_is_one_sentence_of_the_check_and_of_a_run(root, capsys, damage, words):
    damage(root / FILE)
    code, found = report(capsys, "docvqa", f"data.root={root}")
    assert code == 2 and len(found["missing"]) == 1 and re.search(words, found["missing"][0])
    run = go(root / "rows", "dataset=docvqa", f"data.root={root}", "limit=1")
    assert run.code == 2 and re.search(words, run.err) and "Traceback" not in run.err
    assert run.err.count("mmkv_bench: ") == 1 and (run.document["status"], run.document["exit_code"]) == ("error", 2)


def test_a_body_that_is_damaged_behind_a_whole_footer_is_found(root, capsys):
    whole = (root / FILE).read_bytes()
    (root / FILE).write_bytes(whole[:4] + bytes(200) + whole[204:])
    code, found = report(capsys, "docvqa", f"data.root={root}")
    assert code == 2 and re.search(rf"{FILE} cannot be read .*copy or download it again", found["missing"][0])


@pytest.mark.parametrize(
    ("text", "code"),
    [('[{"a": 1}]', 0), ('{"a": 1}\n{"a": "\u2028"}\n\n', 0), ('[{"a": 1}, {"a"', 2), ('{"a": 1}\n{"a"', 2)],
)
def test_json_files_are_read_to_their_end(root, capsys, text, code):
    (root / FILE).unlink()
    (root / "docvqa" / "validation.json").write_text(text)
    found = report(capsys, "docvqa", f"data.root={root}")
    assert found[0] == code and ("validation.json cannot be read" in str(found[1]["missing"])) == bool(code)


@pytest.mark.full
def test_a_run_in_a_process_of_its_own_ends_with_the_sentence(root):
    (root / FILE).write_bytes(b"PAR1")
    command = [sys.executable, "-m", "mmkv_bench", "dataset=docvqa", f"data.root={root}", f"out={root / 'rows'}"]
    ended = subprocess.run(command, env=CHECKOUT, capture_output=True, text=True, timeout=3600)
    assert ended.returncode == 2 and ended.stderr.splitlines()[-1].startswith(f"mmkv_bench: {root / FILE} is truncated")
    assert "Traceback" not in ended.stderr


def test_a_split_of_the_command_line_is_the_one_that_is_looked_for(root, capsys):
    code, found = report(capsys, "docvqa", f"data.root={root}", "dataset.split=test")
    assert code == 2 and "no split 'test'; allowed: validation" in found["missing"][0]


def test_a_clone_in_the_hub_cache_is_found(root, tmp_path, capsys):
    snapshot = tmp_path / "hub" / "datasets--lmms-lab-encoder--DocVQA" / "snapshots" / "0123"
    write(snapshot / "DocVQA" / "validation-00000-of-00001.parquet", [PAGE] * 3)
    write(snapshot / "InfographicVQA" / "validation-00000-of-00001.parquet", [PAGE])
    code, found = report(capsys, "docvqa")
    assert (code, found["rows"], found["place"]) == (0, 3, f"hub cache {snapshot}")


@pytest.mark.slow
def test_videos_are_counted_by_the_names_that_the_task_will_ask_for(tmp_path, capsys):
    name, ids = "videochatgpt_temporal", ("v_one", "v_two", "v_three", "v_one")
    folder = tmp_path / "root" / name
    write(folder / "data" / "test-00000-of-00001.parquet", [CLIP | {"video_name": i} for i in ids], picture=None)
    code, found = report(capsys, name, f"data.root={tmp_path / 'root'}")
    assert code == 2 and "videos are expected in" in found["missing"][0]
    videos = folder / "media" / "videochatgpt" / "Test_Videos"
    videos.mkdir(parents=True)
    code, found = report(capsys, name, f"data.root={tmp_path / 'root'}")
    assert code == 2 and "3 of 3 videos are missing" in found["missing"][0]
    (videos / "v_one.mp4").write_bytes(b"x")
    (videos / "v_two.mkv").write_bytes(b"x")
    code, found = report(capsys, name, f"data.root={tmp_path / 'root'}")
    assert code == 0 and found["media"] == f"2 of 3 videos in {videos.parent}"
    assert found["notes"] == ["1 of 3 videos are missing (v_three); their samples become errors"]
    (videos / "v_two.mkv").write_bytes(b"")
    (videos / "v_three.mp4").write_bytes(b"")
    code, found = report(capsys, name, f"data.root={tmp_path / 'root'}")
    assert code == 0 and found["media"] == f"1 of 3 videos in {videos.parent}"
    assert found["notes"] == ["2 of 3 videos are empty files (v_three, v_two); their samples become errors"]
    (videos / "v_one.mp4").write_bytes(b"")
    code, found = report(capsys, name, f"data.root={tmp_path / 'root'}")
    assert code == 2 and "3 of 3 videos are empty files" in found["missing"][0]


def test_a_fixture_is_ready(capsys):
    code, found = report(capsys, "ocrbench", "data=fixture")
    assert (code, found["dataset"], found["missing"]) == (0, "ocrbench_fixture", []) and found["rows"] >= 4


@each(
    ("words", "sentence"),
    [
        (["chekc", "docvqa"], "what: invalid choice: 'chekc' (choose from 'list', 'check')"),
        (["check"], "needs the name of a dataset"),
        (["check", "docvq"], "unknown dataset 'docvq'; did you mean 'docvqa'"),
        (["check", "docvqa", "--onlin"], "unknown flag '--onlin' of `mmkv-bench data`; did you mean '--online'"),
        (["check", "docvqa", "data.root=/none"], "data.root=/none has no folder docvqa"),
        (["check", "docvqa", "dataset.splt=x"], "did you mean 'split'"),
        (["check", "lmms_eval"], "datasets.lmms_eval.task is empty"),
        (["check", "lmms_eval", "dataset.task=docvqa_vla"], "docvqa_val"),
        (["list", "docvqa"], "check <name>"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words, sentence, capsys):
    assert main(words) == 2
    assert sentence in capsys.readouterr().err
