"""Promise: a judged dataset runs without a judge, and a judge that is there later scores what is missing, once."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from mmkv_bench.cli.main import main
from mmkv_bench.store.store import Store
from tests.judging import judge_server
from tests.run.setting import done

SAMPLES = 3
COMMAND = (
    "dataset=mmvet",
    "data=fixture",
    "method=snapkv",
    "budget=64",
    f"limit={SAMPLES}",
    "fidelity=off",
    "datasets.mmvet.generation.max_new_tokens=3",
)
KEY = "sk-judge-0123456789abcdef"
METRIC = "gpt_eval_score"


@pytest.fixture(scope="module")
def unjudged(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("judged") / "rows"
    done(root, *COMMAND)
    return root


@pytest.fixture
def root(unjudged, tmp_path) -> Path:
    """The answers, not judged yet."""
    return Path(shutil.copytree(unjudged, tmp_path / "rows"))


@pytest.fixture
def server():
    with judge_server.serving(lambda messages: "0.5") as running:
        yield running


def asking(server, *more: str) -> tuple[str, ...]:
    judge = ("judge=local", f"judge.url={server.url}", "judge.model=judge-7b", "judge.backoff_s=0.001")
    return *COMMAND, "stage=score", *judge, *more


def metrics(root: Path) -> list[dict]:
    return [row for row in Store(root).metrics().to_pylist() if row["metric"] == METRIC]


def scores(root: Path) -> list[float | None]:
    return [row["value"] for row in Store(root).samples().to_pylist() if row["metric"] == METRIC]


def files(root: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in root.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_without_a_judge_rows_say_not_judged_and_a_finished_run_does_nothing(unjudged):
    assert scores(unjudged) == [None] * 2 * SAMPLES
    for row in metrics(unjudged):
        assert (row["value"], row["value_failures_zero"], row["lmms_eval"], row["judge"]) == (None,) * 4
        assert row["lmms_eval_reason"] == "not judged: 3 of 3 samples: no judge was asked (judge=none)"
        assert (row["n"], row["n_ok"]) == (SAMPLES, 0)
    before = files(unjudged)
    again = done(unjudged, *COMMAND)
    assert "not judged: 3/3" in again.out and "judge=local" in again.out
    assert again.document["scored"] == 0
    assert files(unjudged) == before
    assert not (unjudged / "judge").exists()


@pytest.mark.full
def test_a_judge_scores_what_is_missing_once_and_stands_in_the_rows(root, server):
    before = Store(root).responses().to_pylist()
    bad = server.behaviours = [judge_server.says("fine"), judge_server.says("good")]
    first = done(root, *asking(server, "judge.retries=0", "judge.concurrency=1"))
    assert bad == []
    found = scores(root)
    assert 0.5 in found and None in found and 0.0 not in found
    assert "questions without an answer" in first.out
    number = len(server.requests)
    second = done(root, *asking(server))
    assert scores(root) == [0.5] * 2 * SAMPLES
    assert len(server.requests) - number == 2  # only what had no answer yet
    assert second.document["scored"] >= 1
    for row in metrics(root):
        assert (row["value"], row["lmms_eval"], row["lmms_eval_reason"]) == (0.5, 50.0, None)
        assert (row["judge"], row["judge_temperature"]) == ("judge-7b", 0.0)
        assert len(row["judge_prompts"]) == 64
    settled = files(root)
    for command in (asking(server), COMMAND):
        assert done(root, *command).document["scored"] == 0
    assert files(root) == settled
    assert len(server.requests) == number + 2
    assert Store(root).responses().to_pylist() == before


@pytest.mark.full
def test_another_judge_scores_anew_and_the_first_ones_answers_are_kept(root, server):
    done(root, *asking(server))
    number = len(server.requests)
    server.reply = lambda messages: "1.0"
    done(root, *asking(server, "judge.model=judge-70b"))
    assert {(row["judge"], row["value"]) for row in metrics(root)} == {("judge-70b", 1.0)}
    assert len(server.requests) == 2 * number
    done(root, *asking(server))
    assert {(row["judge"], row["value"]) for row in metrics(root)} == {("judge-7b", 0.5)}
    assert len(server.requests) == 2 * number


@pytest.mark.full
def test_a_dead_judge_leaves_everything_as_it_was_and_says_so(root, server):
    url = judge_server.dead_address()
    outcome = done(root, *asking(server, f"judge.url={url}", "judge.retries=1"))
    assert f"{url}/chat/completions cannot be reached" in outcome.out
    assert scores(root) == [None] * 2 * SAMPLES
    assert {row["judge"] for row in metrics(root)} == {None}
    assert done(root, *asking(server)).code == 0
    assert scores(root) == [0.5] * 2 * SAMPLES


@pytest.mark.full
def test_a_judge_that_is_dead_leaves_what_another_one_scored(root, server):
    done(root, *asking(server))
    before, rows = metrics(root), Store(root).samples().to_pylist()
    dead = asking(server, f"judge.url={judge_server.dead_address()}", "judge.model=judge-70b", "judge.retries=0")
    outcome = done(root, *dead)
    assert "cannot be reached" in outcome.out and "scores of judge-7b stand" in outcome.out
    assert scores(root) == [0.5] * 2 * SAMPLES
    assert metrics(root) == before and Store(root).samples().to_pylist() == rows
    server.reply = lambda messages: "1.0"
    done(root, *asking(server, "judge.model=judge-70b"))
    assert {(row["judge"], row["value"]) for row in metrics(root)} == {("judge-70b", 1.0)}


@pytest.mark.full
def test_more_samples_without_a_judge_keep_the_scores_of_the_first_ones(root, server):
    done(root, *asking(server))
    more = f"limit={SAMPLES + 1}"
    done(root, *COMMAND, more)
    assert sorted(scores(root), key=str) == [0.5] * 2 * SAMPLES + [None] * 2
    for row in metrics(root):
        assert (row["n"], row["n_ok"], row["value"], row["lmms_eval"]) == (SAMPLES + 1, SAMPLES, None, None)
        assert row["lmms_eval_reason"] == "not judged: 1 of 4 samples: no judge was asked (judge=none)"
        assert row["judge"] == "judge-7b"
    number = len(server.requests)
    done(root, *asking(server, more))
    assert scores(root) == [0.5] * 2 * (SAMPLES + 1)
    assert {(row["value"], row["lmms_eval"], row["judge"]) for row in metrics(root)} == {(0.5, 50.0, "judge-7b")}
    assert 1 <= len(server.requests) - number <= 2  # only the new sample's; equal answers are asked about once


@pytest.mark.full
def test_the_scores_of_two_judges_are_never_mixed_in_one_metric(root, server):
    done(root, *asking(server))
    server.behaviours = [judge_server.says("1.0"), judge_server.says("fine")]
    server.reply = lambda messages: "fine"  # unreadable
    other = ("judge.model=judge-70b", "judge.retries=0", "judge.concurrency=1")
    done(root, *asking(server, *other))
    by_cell = {row["cell"]: row["judge"] for row in metrics(root)}
    for row in Store(root).samples().to_pylist():
        if row["metric"] == METRIC:
            assert row["value"] == {"judge-7b": 0.5, "judge-70b": 1.0}[by_cell[row["cell"]]]
    assert "judge-7b" in by_cell.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("judge.model=null", "judge.model=<id>"),
        ("judge.url=nowhere", "judge.url=nowhere is not an address"),
        ("judge.url=http://me:secret@host/v1", "judge.key_env"),
        ("judge.retries=-1", "judge.retries=-1 is out of range"),
        ("judge.concurrency=0", "judge.concurrency=0 is out of range"),
        ("judge.timeout_s=0", "judge.timeout_s=0"),
        ("judge.temperature=-1", "judge.temperature=-1"),
    ],
)
def test_judge_settings_that_cannot_be_meant_are_refused_before_any_work(root, server, override, said):
    before = files(root)
    outcome = refused(root, *asking(server, override))
    assert said in outcome and "secret" not in outcome
    assert files(root) == before
    assert server.requests == []


def refused(root: Path, *command: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main([f"out={root}", *command]) == 2
    return out.getvalue() + err.getvalue()


@pytest.mark.slow
def test_a_run_keeps_the_key_out_of_rows_logs_and_cache(root, server, monkeypatch, capfd, caplog):
    server.wanted_key = KEY
    server.behaviours = [judge_server.fails(500, f"internal error while handling {KEY}")]
    monkeypatch.setenv("MY_JUDGE_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai-0123456789abcdef")
    assert main(["model.device=cpu", f"out={root}", *asking(server, "judge.key_env=MY_JUDGE_KEY")]) == 0
    said = capfd.readouterr()
    assert scores(root) == [0.5] * 2 * SAMPLES
    assert set(server.keys) == {f"Bearer {KEY}"}
    kept = b"".join(file.read_bytes() for file in root.rglob("*") if file.is_file())
    for secret in (KEY, "sk-openai-0123456789abcdef"):
        assert secret not in said.out + said.err + caplog.text
        assert secret.encode() not in kept
    assert list((root / "judge").rglob("*.json"))
