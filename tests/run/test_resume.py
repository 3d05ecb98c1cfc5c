"""Promise: a run that is stopped anywhere continues where it was, a finished one does nothing, and rows are reused for
exactly the cells and samples whose answers they are."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmkv_bench.config.schema import resolve_path
from mmkv_bench.store.parts import parquet_bytes
from mmkv_bench.store.store import Store
from tests import cover
from tests.run import setting
from tests.run.setting import answers, cell_of, commits, done, go, responses

SAMPLES = 6
COMMAND = ("dataset=pages", "method=[snapkv,random]", "budget=16", f"limit={SAMPLES}")
PATIENCE = 300  # seconds; a forked run that does not move would otherwise be waited for without end


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("uninterrupted") / "rows"
    done(root, *COMMAND)
    return root


def grid(root: Path, samples: int) -> set[tuple[str, str]]:
    """Every (cell, sample) that a finished run of `samples` samples has."""
    ids = {sample for _, sample in responses(root)}
    assert len(ids) == samples
    return {(cell, sample) for cell in setting.cells(root) for sample in ids}


# ---------------------------------------------------------------------- killed
def killed(root: Path, rng: random.Random) -> int:
    """The exit code of a forked run of COMMAND, shot at a random moment: before, between or after its next commits."""
    store = Store(root)
    present = committed(store)
    target = min(SAMPLES, present + rng.randint(0, 3))
    delay = rng.uniform(0.0, 0.6 if target in (present, SAMPLES) else 0.15)
    child, reading = setting.fork(lambda: go(root, *COMMAND).code)
    deadline = time.monotonic() + PATIENCE
    try:
        while committed(store) < target and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < deadline, f"no further sample in {PATIENCE} s"
            time.sleep(0.005)
        time.sleep(delay)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(reading)
    return code


def committed(store: Store) -> int:
    return len(set(store.responses(columns=["sample_id"])["sample_id"].to_pylist()))


@pytest.mark.full
@pytest.mark.parametrize("kills_wanted", [4, pytest.param(20, marks=pytest.mark.full)])
def test_kill_at_random_moments_then_the_same_command_ends_with_the_rows_of_an_uninterrupted_run(
    uninterrupted, tmp_path, kills_wanted
):
    rng = random.Random(20)
    expected = setting.everything(uninterrupted)
    stopped_at: list[int] = []
    kills = rounds = 0
    while kills < kills_wanted:
        rounds += 1
        assert rounds <= 3 * kills_wanted, f"only {kills} of {rounds} runs were killed in time"
        root = tmp_path / f"run{rounds}"
        for _ in range(rng.randint(1, 4)):
            before = commits(root)
            code = killed(root, rng)
            if code == 0:
                break
            assert code == -signal.SIGKILL
            kills += 1
            after = commits(root)
            assert {key: after[key] for key in before} == before, "a row that was there has been made again"
            assert len(after) % 3 == 0, "a sample has some of its cells only"
            found = answers(root)
            assert found == {key: expected["answers"][key] for key in found}
            assert setting.in_order(root) == list(range(len(after) // 3)), "not the first missing sample"
            stopped_at.append(len(after) // 3)
        present = commits(root)
        again = done(root, *COMMAND)
        assert again.generated == SAMPLES - len(present) // 3
        assert {key: value for key, value in commits(root).items() if key in present} == present
        assert setting.everything(root) == expected
        assert not list((root / "journal").glob("*.jsonl"))
    assert len({*stopped_at} - {0, SAMPLES}) >= min(2, kills_wanted // 3), (
        f"too few kills amid the samples: {stopped_at}"
    )


# ---------------------------------------------------------------------- finished
def test_a_finished_run_says_so_and_writes_nothing(uninterrupted):
    before = setting.tree(uninterrupted)
    again = done(uninterrupted, *COMMAND, "logger=wandb")
    assert "Nothing to do: every cell has every sample, and all answers are scored." in again.out
    assert "18 rows, 18 done, nothing to generate" in again.out
    assert "**pages_small, exact_match**" in again.out
    assert (again.generated, again.document["scored"]) == (0, 0)
    assert setting.tree(uninterrupted) == before


def test_a_finished_stage_says_what_it_has_not_to_do(uninterrupted):
    before = setting.tree(uninterrupted)
    assert "Nothing to do: every cell has every sample.\n" in done(uninterrupted, *COMMAND, "stage=generate").out
    assert "and all answers are scored" in done(uninterrupted, *COMMAND, "stage=score").out
    more = done(uninterrupted, *COMMAND, "limit=7", "stage=score")
    assert "Nothing to score" in more.out and more.generated == 0
    assert setting.tree(uninterrupted) == before


CHEAP = """
import json, os, sys
from mmkv_bench.cli.main import main
root, *words = sys.argv[1:]
for command in (["run", *words], ["score", *words], ["plan", *words], ["tables", root], ["status", root]):
    assert main(command) == 0, command
    heavy = {"torch", "transformers", "lmms_eval", "datasets"} & {*sys.modules}
    assert not heavy, (command, heavy)
left = [file for _, _, files in os.walk(os.environ["MMKV_BENCH_CACHE"]) for file in files]
assert left in ([], ["checksums.json"]), left
"""


def test_what_is_finished_needs_no_torch_and_draws_no_page(uninterrupted, tmp_path):
    environment = os.environ | {"MMKV_BENCH_CACHE": str(tmp_path)}
    words = [sys.executable, "-c", CHEAP, str(uninterrupted), *COMMAND, "model.device=cpu", f"out={uninterrupted}"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("**pages_small, exact_match**") == 3
    assert "pages_small  3      6        18 of 18  3 of 3    0       3 of 3" in ended.stdout
    assert "rows       18 rows, 18 done, nothing to generate" in ended.stdout


# ---------------------------------------------------------------------- changed
@pytest.mark.full
@cover.few(
    "change",
    [
        ("methods.snapkv.window=8", "methods.random.sinks=2"),
        ("budget=17",),
        ("protocol=strict",),
        ("seed=1", "methods.snapkv.reading=released"),
        ("page_size=large",),
        ("datasets.pages.split=dev",),
        ("datasets.pages.generation.max_new_tokens=3",),
        ("model.attention=eager",),
    ],
    keep=2,
)
def test_a_changed_setting_reuses_no_row_of_the_cells_it_changes(uninterrupted, tmp_path, change):
    root = shutil.copytree(uninterrupted, tmp_path / "rows")
    old, before = setting.cells(root), commits(root)
    changed = done(root, *COMMAND, "limit=1", "stage=generate", *change)
    assert changed.generated == 1
    new = {name: row for name, row in setting.cells(root).items() if name not in old}
    assert {row["method"] for row in new.values()} >= {"snapkv", "random"}
    assert {cell for cell, _ in commits(root).keys() - before.keys()} == set(new)
    assert {key: commits(root)[key] for key in before} == before


def test_changed_weights_reuse_no_row(uninterrupted, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(resolve_path("pkg://mmkv_bench/tiny/weights"), tmp_path / "weights")
    weights = load_file(folder / "model.safetensors")
    name = min(weights)
    save_file(weights | {name: weights[name] * 1.0001}, folder / "model.safetensors", metadata={"format": "pt"})
    root = shutil.copytree(uninterrupted, tmp_path / "rows")
    changed = done(root, *COMMAND, "limit=1", "stage=generate", f"model.path={folder}")
    assert changed.generated == 1
    assert len(setting.cells(root)) == 6 and len(commits(root)) == 3 * SAMPLES + 3


def test_how_a_run_is_carried_out_is_no_change(uninterrupted, tmp_path):
    root = shutil.copytree(uninterrupted, tmp_path / "rows")
    how = ("fork_batch=1", "fork_memory=1MiB", "timeout_s=99", "model.name=renamed", "limit=2")
    assert done(root, *COMMAND, *how).generated == 0
    assert commits(root) == commits(uninterrupted)


def test_rows_of_a_shared_run_are_not_taken_for_separate_measurements(uninterrupted, tmp_path):
    root = shutil.copytree(uninterrupted, tmp_path / "rows")
    with pytest.raises(AssertionError, match="measured=own.*measured=group"):  # `done` shows the refusal
        done(root, *COMMAND, "sharing=off")
    assert commits(root) == commits(uninterrupted)


def test_measurements_of_the_other_kind_are_not_reused(uninterrupted):
    before = setting.tree(uninterrupted)
    refused = go(uninterrupted, *COMMAND, "sharing=off")
    assert refused.code == 2 and "measured=group" in refused.err
    assert setting.tree(uninterrupted) == before


# ---------------------------------------------------------------------- more of it
@pytest.mark.full
def test_a_method_a_budget_and_more_samples_generate_only_what_is_missing(tmp_path):
    small = ("dataset=pages_walk", "method=[snapkv]", "budget=12", "limit=2")
    large = ("dataset=pages_walk", "method=[snapkv,keydiff]", "budget=[12,'20%']", "limit=3")
    root = tmp_path / "grown"
    done(root, *small)
    before = commits(root)
    assert len(before) == 2 * 2
    grown = done(root, *large)
    assert grown.generated == 3  # samples 0 and 1 for the new cells, sample 2 for all
    after = commits(root)
    assert set(after) == grid(root, 3) and len(after) == 5 * 3
    assert {key: after[key] for key in before} == before
    done(tmp_path / "at_once", *large)
    assert setting.everything(root) == setting.everything(tmp_path / "at_once")


def test_a_missing_row_in_the_middle_is_generated_alone(uninterrupted, tmp_path):
    """Rows of one cell and sample are taken out of the store, as if that cell had joined later."""
    import pyarrow.parquet as pq

    root = shutil.copytree(uninterrupted, tmp_path / "rows")
    cell = cell_of(root, "snapkv")
    for path in (root / "responses").glob("*.parquet"):
        rows = pq.read_table(path)
        kept = [
            not (c == cell and d == 2) for c, d in zip(*(rows[n].to_pylist() for n in ("cell", "doc_id")), strict=True)
        ]
        path.write_bytes(parquet_bytes(rows.filter(kept)))
    before = commits(root)
    assert len(before) == 3 * SAMPLES - 1
    assert done(root, *COMMAND).generated == 1
    after = commits(root)
    assert {key: after[key] for key in before} == before
    assert [responses(root)[key]["doc_id"] for key in after.keys() - before.keys()] == [2]
    assert setting.everything(root) == setting.everything(uninterrupted)


def test_a_refused_run_leaves_the_rows_alone(uninterrupted):
    before = setting.tree(uninterrupted)
    refused = go(uninterrupted, *COMMAND, "budget=0")
    assert (refused.code, refused.document["status"]) == (2, "error")
    assert json.loads(refused.out)["error"] in refused.err
    assert setting.tree(uninterrupted) == before
