"""Promise: what a run prints and tracks is what its rows hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mmkv_bench.config.schema import resolve_path
from mmkv_bench.store import tracking
from mmkv_bench.store.store import Store
from mmkv_bench.tables.tracker_rows import tracked_rows
from tests.each import each
from tests.run import setting
from tests.run.setting import done, forked, go, responses
from tests.wandb_double import installed

WEIGHTS = Path(resolve_path("pkg://mmkv_bench/tiny/weights"))
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZE = r"([\d.]+) (B|KiB|MiB|GiB)"


# ---------------------------------------------------------------------- --json
@pytest.mark.slow
def test_the_last_line_is_one_json_document_with_the_metrics_of_the_rows(tmp_path):
    outcome = done(tmp_path, "dataset=pages_walk", "method=snapkv", "budget=[12,16]", "limit=2")
    document = json.loads(outcome.out.splitlines()[-1])
    assert {key: document[key] for key in ("status", "exit_code", "rows", "cells", "scored", "failed")} == {
        "status": "ok",
        "exit_code": 0,
        "rows": str(tmp_path),
        "cells": 3,
        "scored": 3,
        "failed": 0,
    }
    assert document["generated"] == {"pages_walk_small": 2} and document["seconds"] > 0
    by_key = sorted(document["metrics"], key=lambda row: (row["cell"], row["metric"]))
    assert by_key == setting.metrics(tmp_path)
    assert sum(row["metric"] == "exact_match" for row in by_key) == 3
    assert sum(line.startswith("{") for line in outcome.out.splitlines()) == 1


def test_a_run_that_stops_as_a_whole_ends_with_one_json_document_too(tmp_path):
    (tmp_path / "store.json").write_text("{}")
    broken = go(tmp_path, "dataset=pages_walk", "limit=1")
    assert (broken.code, broken.document["exit_code"], broken.document["status"]) == (1, 1, "error")
    assert broken.document["error"] in broken.err


# ---------------------------------------------------------------------- the card
def size(text: str) -> float:
    """Bytes of the one size that a text ends with."""
    number, unit = re.search(SIZE + "$", text).groups()
    return float(number) * UNITS[unit]


def close(bytes_: float):
    """Cards show four digits."""
    return pytest.approx(bytes_, rel=5e-4)


@pytest.mark.full
@each("protocol", ["paper", "strict", "query_agnostic"])
def test_the_card_says_what_the_rows_then_count(tmp_path, protocol):
    from safetensors import safe_open

    budgets = ("16", "20%", "5000")
    outcome = done(
        tmp_path, "dataset=pages_lookup", "method=keydiff", "budget=[16,'20%',5000]", "limit=1", f"protocol={protocol}"
    )
    card = outcome.out.split("**")[0]
    rows = {setting.cells(tmp_path)[cell]["method"]: row for (cell, _), row in responses(tmp_path).items()}
    kept = {
        str(row["budget_entries"]): row for row in responses(tmp_path).values() if row["budget_entries"] is not None
    }
    full = rows["full"]
    with safe_open(WEIGHTS / "model.safetensors", "numpy") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 (not a dict)
    numbers = 0
    for shape in shapes:
        count = 1
        for side in shape:
            count *= side
        numbers += count
    weights = 4 * numbers
    assert size(re.search(rf"{SIZE} weights", card)[0].removesuffix(" weights")) == close(weights)
    per_token = full["bytes_full"] / full["context_tokens"]
    assert size(re.search(rf"KV cache   {SIZE}", card)[0]) == close(per_token)
    tokens, visual = map(int, re.search(r"full +(\d+) tokens \((\d+) visual\)", card).groups())
    assert (tokens, visual) == (full["prompt_tokens"], full["visual_tokens"])
    assert visual == 16 * 16  # a token a cell of the page
    assert size(re.search(rf"first prompt: {SIZE}", card)[0]) == close(tokens * per_token)
    for budget in budgets:
        line = re.search(rf"budget +{budget}: (.*)", card)[1]
        entries, length, percent, total = re.match(
            r"(\d+) of (\d+) entries per KV head \(([\d.]+)%\), (\d+) in all", line
        ).groups()
        asked = {"16": 16, "20%": full["context_tokens"] // 5, "5000": 5000}[budget]
        row = kept[str(asked)]
        assert int(length) == row["context_tokens"]
        assert int(total) == row["entries_resident"] == sum(map(sum, row["kept"]))
        assert int(entries) == min(asked, row["context_tokens"])
        assert float(percent) == pytest.approx(100 * int(entries) / int(length), abs=0.06)
        assert size(re.search(rf"in all, {SIZE}", line)[0]) == close(row["bytes_device"])
        assert ("the first prompt is kept whole" in line) == (budget == "5000")
    assert f"protocol   {protocol}; reading paper" in card
    assert "1 samples x 4 cells" in card and "4 rows, 0 done, 4 to make" in card
    assert f"in {tmp_path}" in card


@pytest.mark.full
def test_a_cell_is_shown_under_the_name_that_was_asked_for_and_both_names_are_told(tmp_path):
    """What an earlier run stored as another method's variant is the same cell; its tables say what that variant is."""
    asked = ("budget=16", "dataset=pages_lookup", "limit=2", "fidelity=off")
    first = done(tmp_path, "method=[]", "variants.chance={base: random}", *asked)
    assert "chance: the method random with its default parameters, under another name." in first.out
    second = done(tmp_path, "method=random", *asked)
    assert second.generated == 0 and "| random |" in second.out and "| chance |" not in second.out
    assert "note: random is stored in these rows as chance" in second.out


@pytest.mark.full
def test_the_card_counts_what_is_there_already(tmp_path):
    done(tmp_path, "dataset=pages_lookup", "method=keydiff", "budget=16", "limit=1")
    more = done(tmp_path, "dataset=pages_lookup", "method=[keydiff,snapkv]", "budget=16", "limit=2")
    assert "2 of 6 rows there already" in more.out and "6 rows, 2 done, 4 to make" in more.out


# ---------------------------------------------------------------------- wandb
def read_back(root: Path, kind: str = "0of1-1") -> dict:
    """Configuration, steps, result table and exit code of one offline run below `root`, by wandb's own reader."""
    from wandb.proto import wandb_internal_pb2 as proto
    from wandb.sdk.internal.datastore import DataStore

    (path,) = root.glob(f"wandb/offline-run-*-{kind}/run-*.wandb")
    reader, found = DataStore(), {"config": {}, "steps": [], "table": None, "exit": None}
    reader.open_for_scan(str(path))
    while (data := reader.scan_data()) is not None:
        record = proto.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif record.HasField("history"):
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "results.path" in items:
                found["table"] = json.loads((path.parent / "files" / items["results.path"]).read_text())
            else:
                found["steps"].append({key: value for key, value in items.items() if not key.startswith("_")})
        elif record.HasField("exit"):
            found["exit"] = record.exit.exit_code
    return found


@pytest.mark.full
def test_wandb_shows_a_run_while_it_goes_on_and_its_rows_once(tmp_path):
    command = ("dataset=pages_lookup", "method=[snapkv]", "budget=16", "limit=3", "logger=wandb", "sharing=off")
    done(tmp_path, *command)
    run = read_back(tmp_path)
    assert run["exit"] == 0
    assert run["config"]["run"]["budget"] == 16 and run["config"]["run"]["limit"] == 3
    flat = {key: run["config"][key] for key in ("model", "dataset", "method", "budget", "protocol", "limit", "cells")}
    assert list(flat.values()) == ["tiny", "pages_lookup_small", "full,snapkv", "16", "paper", 3, 2]
    rows = list(responses(tmp_path).values())
    tokens = [[row["n_tokens"] for row in rows if row["doc_id"] == number] for number in range(3)]
    means = [sum(of) / len(of) for of in tokens]
    running = [sum(means[: i + 1]) / (i + 1) for i in range(3)]
    assert [step["pages_lookup_small/n_tokens"] for step in run["steps"]] == pytest.approx(running)
    assert [step["pages_lookup_small/failed"] for step in run["steps"]] == [0, 0, 0]
    stored = {row["cell"]: row for row in Store(tmp_path).metrics().to_pylist() if row["metric"] == "exact_match"}
    names = {row["cell"]: row["method"] for row in Store(tmp_path).cells().to_pylist()}
    last = run["steps"][-1]
    for cell, row in stored.items():  # the running score of all samples is the score; a cell by itself has its times
        label = f"pages_lookup_small/{'full' if names[cell] == 'full' else 'snapkv@16'}"
        assert last[f"{label}/exact_match"] == row["value"] and last[f"{label}/answers"] == 3
        assert last[f"{label}/ttft_s"] > 0 and last[f"{label}/peak_resident_bytes"] > 0
    table = read_back(tmp_path, "summary")["table"]
    lines = [dict(zip(table["columns"], line, strict=True)) for line in table["data"]]
    assert {line["cell"]: line["score"] for line in lines} == {cell: row["value"] for cell, row in stored.items()}
    assert all(line["ttft_s"] > 0 and line["peak_bytes"] > 0 for line in lines)
    before = sorted(tmp_path.glob("wandb/*"))
    done(tmp_path, *command)
    assert sorted(tmp_path.glob("wandb/*")) == before
    done(tmp_path / "shared", *command[:-2])
    rows = list(responses(tmp_path / "shared").values())
    for line in tracked_rows(Store(tmp_path / "shared")):  # times of a group stand under names of their own
        ours = [row for row in rows if row["cell"] == line["cell"]]
        for name in ("prefill_s", "decode_s"):
            assert line[f"group_{name}"] == sorted(row[name] for row in ours)[1] > 0
        assert line["group_peak_bytes"] == max(row["peak_resident_bytes"] for row in ours)
        assert line["ttft_s"] is line["tpot_s"] is line["peak_bytes"] is None


@pytest.mark.full
def test_a_wandb_that_fails_or_never_answers_costs_a_run_nothing(tmp_path, monkeypatch):
    command = ("dataset=pages_lookup", "method=[snapkv]", "budget=16", "limit=2")
    done(tmp_path / "alone", *command)
    monkeypatch.setattr(tracking, "PATIENCE_S", 0.2)
    installed(monkeypatch, tmp_path)
    for what in ("FAILS", "BLOCKS"):
        monkeypatch.setenv(what, "log")
        done(tmp_path / what, *command, "logger=wandb")
        assert setting.everything(tmp_path / what) == setting.everything(tmp_path / "alone")
        monkeypatch.setenv(what, "")


@pytest.mark.full
def test_a_run_with_failures_is_marked_failed_in_wandb(tmp_path, own_parts):
    failing = ("--config-dir", str(own_parts), "method=failing", "methods.failing.victim='000000'")
    forked(lambda: go(tmp_path, *failing, "dataset=pages_walk", "budget=16", "limit=1", "logger=wandb").code)
    run = read_back(tmp_path)
    assert run["exit"] == 1
    assert [step["pages_walk_small/failed"] for step in run["steps"]] == [1]
