"""Promise: however a run is divided, over shards, processes, prefills, stages or time, its rows are the same."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from mmkv_bench.cli.main import main
from mmkv_bench.protocols import SINGLE, protocol
from mmkv_bench.run import launch
from tests.run import setting
from tests.run.setting import answers, done, go, responses

METHODS = "method=[random,streamingllm,snapkv,keydiff,expected_attention,mmshift]"
COMMAND = ("dataset=[pages_walk,pages_multi_image]", "method=[snapkv,random]", "budget=16", "limit=6")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "rows"
    done(root, *COMMAND)
    return root


@pytest.mark.full
def test_answers_of_the_reference_differ(whole):
    """Else nothing below could fail: rows of different samples and cells must be told apart by their answers."""
    found = responses(whole)
    assert len(found) == 2 * 3 * 6
    assert len({row["answer"] for row in found.values()}) > 6
    assert len({row["kept_digest"] for row in found.values()}) > 12


# ---------------------------------------------------------------------- shards and processes
@pytest.mark.full
@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.full)])
def test_shards_together_are_the_whole_run_row_for_row(whole, tmp_path, parts):
    sizes = [done(tmp_path, *COMMAND, f"shard={part}/{parts}").generated for part in range(parts)]
    assert sum(sizes) == 12 and len([size for size in sizes if size]) > 1
    assert setting.everything(tmp_path) == setting.everything(whole)
    assert {row["shard"] for row in responses(tmp_path).values()} == {f"{i}/{parts}" for i in range(parts) if sizes[i]}
    assert done(tmp_path, *COMMAND).generated == 0


@pytest.mark.slow
def test_a_shard_without_samples_says_so_and_ends_well(tmp_path):
    one = ("dataset=pages_walk", "method=snapkv", "budget=16", "limit=1")
    sizes = []
    for part in range(3):
        ended = done(tmp_path / str(part), *one, f"shard={part}/3")
        sizes.append(ended.generated)
        assert (f"no sample of this run belongs to shard {part}/3" in ended.out) == (sizes[-1] == 0)
        assert ("| snapkv" in ended.out) == (sizes[-1] == 1)
    assert sorted(sizes) == [0, 0, 1]


@pytest.mark.full
def test_two_real_processes_of_launch_are_one_process_row_for_row(whole, tmp_path, capfd):
    command = ["launch", "--processes", "2", *COMMAND, "model.device=cpu", f"out={tmp_path}/rows"]
    assert main(command) == 0
    captured = capfd.readouterr()
    root = tmp_path / "rows"
    assert setting.everything(root) == setting.everything(whole)
    assert "[0/2] " in captured.err and "[1/2] " in captured.err
    assert captured.out.count("**pages_walk_small, exact_match**") == 1
    assert sorted(path.name for path in (root / "logs").iterdir()) == ["process-0-of-2.log", "process-1-of-2.log"]


@pytest.mark.full
def test_what_a_killed_process_of_launch_was_at_is_answered_by_the_other(tmp_path, capfd, monkeypatch):
    command = ("dataset=[pages_walk,pages_lookup]", "method=[snapkv,random]", "budget=16", "limit=30")
    done(tmp_path / "alone", *command)
    root, started = tmp_path / "rows", []
    real = launch.subprocess.Popen

    def popen(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    def kill():
        """One that has just stored a second answer, which it may not have told yet: it is at the next."""
        while True:
            for file in (root / "journal").glob("*.jsonl"):
                for process in started:
                    if f"w{process.pid}-" in file.name and file.read_bytes().count(b"\n") > 1:
                        process.kill()
                        return
            time.sleep(0.001)

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    assert main(["launch", "--processes", "2", *command, "model.device=cpu", f"out={root}"]) == 0
    err = capfd.readouterr().err
    assert "ended with exit code -9" in err and "the others answered what was left" in err
    assert setting.everything(root) == setting.everything(tmp_path / "alone")
    assert len({row["worker"] for row in responses(root).values()}) == 2


@pytest.mark.full
def test_launch_scores_when_failed_rows_are_all_that_went_wrong(tmp_path, own_parts, capfd, monkeypatch):
    """Processes that end with 1 because of failed rows have done their work; here forks stand in for them."""
    failing = "variants.broken={base: failing, fault: error, victim: '000000'}"
    command = ["--config-dir", str(own_parts), "dataset=pages_walk", "method=snapkv", failing, "budget=16", "limit=2"]
    root = tmp_path / "rows"
    for part in range(2):
        go(root, *command, f"shard={part}/2", "stage=generate")
    overrides = [f"hydra.searchpath=['file://{own_parts}']", *command[2:], "model.device=cpu", f"out={root}"]
    monkeypatch.setattr(launch, "_RUN", ("false",))
    assert launch.launch(overrides, 2) == 1  # `false` ends with 1 and does nothing
    captured = capfd.readouterr()
    assert "1/2 ok: " in captured.out and "1 rows failed" in captured.out
    assert "process 0/2 ended with exit code 1; see" in captured.err
    assert "run the same command again" not in captured.err
    assert launch.launch([*overrides, "limit=3"], 2) == 1
    assert "run the same command again" in capfd.readouterr().err


# ---------------------------------------------------------------------- prefills
@pytest.mark.full
def test_sharing_on_equals_sharing_off_for_every_method_and_protocol(tmp_path):
    names = [name for name in SINGLE if not protocol(name).streams]  # pages: one question each, and no videos
    grid = (METHODS, f"protocol=[{','.join(names)}]", "budget=[12,'20%']", "dataset=pages", "limit=2")
    shared, alone = tmp_path / "on", tmp_path / "off"
    done(shared, *grid, "stage=generate", "seed=[0,1]")
    done(alone, *grid, "stage=generate", "seed=[0,1]", "sharing=off")
    how = ("measured", "fork_group", "fork_batch", "forced_agree")  # alone nothing is measured besides the answer
    found = answers(shared, how)
    assert (
        len(found) == len(names) * (1 + (4 + 2 * 2) * 2) * 2
    )  # full, four methods, and random and mmshift with two seeds
    assert found == answers(alone, how)
    assert {row["measured"] for row in responses(shared).values()} == {"group"}
    assert {row["measured"] for row in responses(alone).values()} == {"own"}
    assert len({row["kept_digest"] for row in found.values()}) > 60
    assert len({tuple(row["token_ids"]) for row in found.values()}) > 6


# ---------------------------------------------------------------------- order
@pytest.mark.full
def test_the_order_of_methods_and_datasets_changes_no_row(whole, tmp_path):
    done(tmp_path, "dataset=[pages_multi_image,pages_walk]", "method=[random,snapkv]", "budget=16", "limit=6")
    assert setting.everything(tmp_path) == setting.everything(whole)


@pytest.mark.full
def test_one_dataset_and_one_method_at_a_time_are_the_whole_run(whole, tmp_path):
    for dataset in ("pages_multi_image", "pages_walk"):
        for method in ("random", "snapkv"):
            done(tmp_path, f"dataset={dataset}", f"method={method}", "budget=16", "limit=6")
    assert setting.everything(tmp_path) == setting.everything(whole)


@pytest.mark.full
def test_samples_in_two_portions_are_the_whole_run(whole, tmp_path):
    assert done(tmp_path, *COMMAND, "limit=2").generated == 2 * 2
    assert done(tmp_path, *COMMAND).generated == 2 * 4
    assert setting.everything(tmp_path) == setting.everything(whole)


@pytest.mark.full
def test_generating_first_and_scoring_later_are_both_at_once(whole, tmp_path):
    generated = done(tmp_path, *COMMAND, "stage=generate")
    assert (generated.generated, generated.document["scored"]) == (12, 0)
    assert "exact_match" not in generated.out and not setting.scores(tmp_path)
    scored = done(tmp_path, *COMMAND, "stage=score")
    assert (scored.generated, scored.document["scored"]) == (0, 6)
    assert "**pages_walk_small, exact_match**" in scored.out
    assert setting.everything(tmp_path) == setting.everything(whole)


def test_scoring_before_any_answer_is_refused(tmp_path):
    refused = go(tmp_path / "rows", *COMMAND, "stage=score")
    assert refused.code == 2 and "has no result rows" in refused.err
    assert not (tmp_path / "rows").exists()
