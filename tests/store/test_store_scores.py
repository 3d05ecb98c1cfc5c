"""Cells and scores: written whole, replaced whole."""

from __future__ import annotations

import json
import os
import signal

import pytest
from crash_points import die_before
from store_examples import cell, complete, failed, metric_row, plain, sample_score, write_scores

from mmkv_bench.errors import StoreError
from mmkv_bench.store.rows import redact
from mmkv_bench.store.store import Store
from tests.each import each


def test_cells_come_back_and_writing_them_again_changes_nothing(tmp_path):
    store = Store(tmp_path)
    rows = [cell("c1"), cell("c0", budget_kind="fraction", budget_entries=None, budget_fraction="0.2", seed=3)]
    store.write_cells(rows)
    first = store.cells()
    assert plain(first) == [complete(row, "cells") for row in reversed(rows)]
    Store(tmp_path).write_cells([cell("c1", device="another gpu", git_commit="abc"), cell("c2")])
    assert store.cells(["c0", "c1"]).sort_by("cell").equals(first)
    assert store.cells(["c2", "c9"])["cell"].to_pylist() == ["c2"]


@each(
    ("changes", "message"),
    [
        ({"transformers": "6.0"}, "transformers '5.23.0', but now it is '6.0'"),
        ({"parameters": '{"window":16}'}, "parameters"),
        ({"budget_entries": 65}, "budget_entries 64, but now it is 65"),
    ],
)
def test_one_hash_for_two_different_cells_is_refused_with_both_values(tmp_path, changes, message):
    store = Store(tmp_path)
    store.write_cells([cell()])
    with pytest.raises(StoreError, match=message):
        store.write_cells([cell(**changes)])
    store.write_cells([cell(parameters='{ "window": 32 }')])  # the same value, written otherwise


def test_every_column_that_the_hash_covers_is_held_to_what_is_stored(tmp_path):
    """Named here and not read from the schema, so that none of them can drop out of the identity unseen."""
    other = {
        "model_fingerprint": "m2",
        "dataset": "docs",
        "dataset_fingerprint": "d2",
        "base": "h2o",
        "reading": "released",
        "protocol": "strict",
        "budget_entries": 65,
        "seed": 1,
        "parameters": "{}",
        "dtype": "bfloat16",
        "attention": "eager",
        "generation": "{}",
        "numerics_version": 2,
        "torch": "9",
        "transformers": "9",
    }
    store = Store(tmp_path)
    store.write_cells([cell()])
    for column, value in other.items():
        with pytest.raises(StoreError, match=f"with {column} "):
            store.write_cells([cell(**{column: value})])
    with pytest.raises(StoreError, match="with budget_kind 'entries'"):
        store.write_cells([cell(budget_kind="fraction", budget_entries=None, budget_fraction="0.2")])


def test_secrets_in_a_cells_configuration_are_never_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret_value")
    config = {
        "judge": {"api_key": "sk-123", "url": "https://u:hf_very_secret_value@host"},
        "generation": {"max_new_tokens": 8, "n_tokens": "4"},
        "list": [{"password": "hunter2"}],
    }
    store = Store(tmp_path)
    store.write_cells([cell(config=json.dumps(config))])
    (text,) = store.cells()["config"].to_pylist()
    stored = json.loads(text)
    assert stored["generation"] == config["generation"]
    assert not any(secret in text for secret in ("sk-123", "hf_very_secret_value", "hunter2"))
    assert stored["judge"]["api_key"] == stored["list"][0]["password"] == "<redacted>"


def test_secrets_among_a_cells_parameters_are_never_stored_and_its_rows_continue(tmp_path, monkeypatch):
    args = {"args": {"api_key": "sk-123", "url": "https://host?k=hf_very_secret_value", "window": 32}}
    row = cell(
        parameters=json.dumps(args),
        generation=json.dumps({"stop": "hf_very_secret_value"}),
        model="org/hf_very_secret_value",
    )
    old, store = Store(tmp_path / "old"), Store(tmp_path / "new")
    old.write_cells([row])  # where the variable is not known, its value is no secret
    assert "hf_very_secret_value" in old.cells()["parameters"].to_pylist()[0]
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret_value")
    for one in (store, store, old):  # again, and over what another environment stored
        one.write_cells([row])
    (stored,) = store.cells().to_pylist()
    assert not any(secret in str(stored) for secret in ("sk-123", "hf_very_secret_value"))
    assert json.loads(stored["parameters"])["args"]["window"] == 32 and stored["cell"] == row["cell"]


def test_a_key_in_an_error_message_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVICE_API_KEY", "sk-0123456789")
    store = Store(tmp_path)
    with store.writer("w") as writer:
        writer.commit([failed(0) | {"error": "HTTPError: 401 for sk-0123456789"}])
    assert store.responses()["error"].to_pylist() == ["HTTPError: 401 for <redacted>"]


def test_the_stored_configuration_does_not_say_where_a_machine_has_its_folders() -> None:
    config = {
        "out": "/home/me/runs/x/",
        "model": {"path": "~/models/vlm"},
        "data": {"root": "runs/data"},
        "url": "http://h/v1",
    }
    assert redact(config) == {
        "out": ".../x",
        "model": {"path": ".../vlm"},
        "data": {"root": "runs/data"},
        "url": "http://h/v1",
    }


def test_scores_come_back_and_are_replaced_whole(tmp_path):
    store = Store(tmp_path)
    samples = [sample_score(0), sample_score(1, status="oom", value=None), sample_score(0, metric="f1", value=0.25)]
    metrics = [metric_row(n_ok=1, value_failures_zero=0.5, lmms_eval_reason="1 of 2 samples failed")]
    write_scores(store, samples, metrics)
    write_scores(store, [sample_score(0, "c1")], [metric_row("c1", value=1.0, low=0.2, high=1.0)])
    assert plain(store.samples(["c0"])) == [complete(row, "samples") for row in samples]
    expected = [complete(row, "metrics") for row in metrics]
    assert plain(store.metrics(["c0"])) == [
        {name: row[name] for name in row if name != "row_digest"} for row in expected
    ]
    assert store.samples().num_rows == 4
    assert store.metrics().num_rows == 2
    write_scores(store, [sample_score(5, value=0.0)], [metric_row(value=0.0)])
    assert store.samples(["c0"])["sample_id"].to_pylist() == ["s0005"]
    assert store.metrics(["c0"])["value"].to_pylist() == [0.0]
    assert not list(tmp_path.rglob("*.tmp"))


def test_refused_scores_leave_the_old_ones(tmp_path):
    store = Store(tmp_path)
    write_scores(store, [sample_score(0)], [metric_row(value=1.0)])
    with pytest.raises(StoreError):
        write_scores(store, [sample_score(1)], [metric_row(value=float("nan"))])
    assert store.samples()["sample_id"].to_pylist() == ["s0000"]
    assert store.metrics()["value"].to_pylist() == [1.0]


@pytest.mark.full
def test_kill_while_scores_are_replaced_never_pairs_old_metrics_with_new_samples(tmp_path):
    old = ([sample_score(0, value=1.0)], [metric_row(value=1.0)])
    new = ([sample_score(0, value=0.0)], [metric_row(value=0.0)])
    seen = set()
    for n in range(1, 100):
        store = Store(tmp_path / str(n))
        write_scores(store, *old)
        child = os.fork()
        if child == 0:
            try:
                die_before(n, str(store.root))
                write_scores(store, *new)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        state = (store.samples()["value"].to_pylist(), store.metrics()["value"].to_pylist())
        assert state in (([1.0], [1.0]), ([0.0], [0.0]))
        seen.add(str(state))
        write_scores(store, *new)
        assert store.metrics()["value"].to_pylist() == [0.0]
        if code == 0:
            break
    assert len(seen) == 2
