"""Promise: tables of costs are medians of rows with ratios to `full` of the same sample or repeat, and never a group's times."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from mmkv_bench.store.store import Store
from mmkv_bench.tables.cost_rows import KNOWN, split_costs
from mmkv_bench.tables.cost_text import tables_of_costs
from mmkv_bench.tables.costs import cost_tables, roofline_inputs, set_limits
from mmkv_bench.tables.formats import write
from mmkv_bench.tables.text import number, unit_of
from tests.cli.setting import verb
from tests.tables.examples import Example, cell_row
from tests.tables.test_tables_command import printed, refusal

main = verb("tables")
N = 21


def measured(root: Path, **changed) -> Path:
    """Own times of some samples, two per page: `full`, random of two seeds, snapkv at two budgets."""
    made, draw = Example(), np.random.default_rng(1)
    for method, budget, seed, pace in (
        ("full", None, None, 1.0),
        ("random", 64, 0, 0.6),
        ("random", 64, 1, 0.8),
        ("snapkv", 64, None, 0.5),
        ("snapkv", 128, None, 0.7),
    ):
        cell = made.add(method, budget, [1.0] * N, seed=seed)
        for place, row in enumerate(row for row in made.responses if row["cell"] == cell):
            row |= {"measured": "own", "cluster": f"page-{place // 2}", "tpot_s": pace * draw.uniform(0.02, 0.03)}
            row |= {"ttft_s": 1 + place / 10, "bytes_held": int(pace * 2**20) + place, "peak_resident_bytes": 2**30}
            row |= changed if method == "snapkv" else {}
    pages = {(row["cell"], row["sample_id"]): row["cluster"] for row in made.responses}
    for row in made.samples:
        row["cluster"] = pages[row["cell"], row["sample_id"]]
    return made.write(root)


def table_of(root: Path, *names: str, **given):
    (table,) = cost_tables(root, split_costs(names)[1], **given)
    return table


def per_sample(root: Path, method: str, column: str, budget: int | None = None) -> dict[str, float]:
    """Sample -> the mean over seeds, row by row."""
    cells = {
        row["cell"]
        for row in Store(root).cells().to_pylist()
        if row["method"] == method and row["budget_entries"] == budget
    }
    rows = [row for row in Store(root).responses().to_pylist() if row["cell"] in cells]
    return {
        sample: float(np.mean([row[column] for row in rows if row["sample_id"] == sample]))
        for sample in {row["sample_id"] for row in rows}
    }


def test_answers_medians_and_paired_ratios_are_those_of_a_slow_reference(tmp_path):
    root = measured(tmp_path)
    table = table_of(root, "tpot_s", "bytes", "n_tokens")
    assert [(line.label, budget) for line, budget in table.lines()] == [
        ("full", ""),
        ("random", "64"),
        ("snapkv", "64"),
        ("snapkv", "128"),
    ]
    for cost, column in (("tpot_s", "tpot_s"), ("bytes_held", "bytes_held")):
        full = per_sample(root, "full", column)
        for method, budget in (("full", None), ("random", 64), ("snapkv", 64), ("snapkv", 128)):
            own = per_sample(root, method, column, budget)
            entry = table.entries[method, str(budget or "")][cost]
            assert entry.value == pytest.approx(median(own.values()))
            assert entry.ratio == pytest.approx(median(own[sample] / full[sample] for sample in own))
            assert entry.n == entry.known == entry.paired == N
            assert entry.low <= entry.value <= entry.high
    assert table.entries["snapkv", "64"]["n_tokens"].value == 13


@pytest.mark.slow
def test_times_of_shared_runs_are_refused_and_their_bytes_shown(tmp_path, capsys):
    root = measured(tmp_path)
    shared = Example()
    shared.add("full", None, [1.0] * 3, answer={"tpot_s": 0.1, "bytes_held": 10})
    shared.add("snapkv", 64, [1.0] * 3, answer={"tpot_s": 0.1, "bytes_held": 4})
    shared = shared.write(tmp_path / "shared")
    said = refusal(capsys, shared, "--metric", "bytes,tpot_s,peak")
    assert "tpot_s and peak of these rows come from runs that share prefills" in said and "scenario=efficiency" in said
    text = printed(capsys, shared, "--metric", "bytes")
    assert "| snapkv | 64     | 4" in text and "0.400" in text
    partly = measured(tmp_path / "partly", measured="group")
    entry = table_of(partly, "tpot_s").entries["snapkv", "64"]["tpot_s"]
    assert (entry.value, entry.known, entry.n) == (None, 0, N)
    assert table_of(root, "tpot_s").entries["snapkv", "64"]["tpot_s"].value > 0


def test_a_line_with_a_failure_has_no_median(tmp_path):
    made = Example()
    made.add("full", None, [1.0, 1.0, 1.0], answer={"bytes_held": 8})
    made.add("snapkv", 64, [1.0, None, 1.0], answer={"bytes_held": 4})
    entries = table_of(made.write(tmp_path), "bytes").entries
    assert entries["full", ""]["bytes_held"].value == 8
    entry = entries["snapkv", "64"]["bytes_held"]
    assert (entry.value, entry.ratio, entry.known, entry.n, entry.failed) == (None, None, 2, 3, "oom")


def timed(
    root: Path, steps: dict[tuple[str, int], list[list[float]]], oom: tuple[str, int] | None = None, cpus=None
) -> Path:
    """A store of passes: (method, length) -> steps of each repeat; what is named `oom` fails in the pass that is timed first."""
    store = Store(root)
    names = {method: f"c{place}" for place, method in enumerate(dict.fromkeys(method for method, _ in steps))}
    store.write_cells(
        cell_row(
            name, method, None if method == "full" else "0.1", dataset="made_up_text", cpu=(cpus or {}).get(method)
        )
        for method, name in names.items()
    )
    for place, ((method, tokens), repeats) in enumerate(steps.items()):
        common = {
            "cell": names[method],
            "dataset": "made_up_text",
            "prompt_tokens": tokens,
            "visual_tokens": 0,
            "batch": 2,
            "new_tokens": 4,
            "status": "ok",
            "place": place,
            "order_seed": 0,
            "measured": "own",
        }
        held = {"bytes_held": tokens, "bytes_useful_step": tokens, "bytes_read_step": tokens}
        peaks = {"total": 100 * tokens, "decode": 10 * tokens}
        store.write_timings(
            common | {"repeat": None, "phase": phase, "peak_allocated": peak} | (held if phase == "decode" else {})
            for phase, peak in peaks.items()
        )
        for repeat, own in enumerate(repeats):
            if (method, tokens) == oom:
                store.write_timings([common | {"repeat": 0, "phase": "total", "status": "oom", "error": "no memory"}])
                break
            phases = {
                "score": 1.0,
                "select": 2.0,
                "reduce": 3.0,
                "ttft": 5.0 + repeat,
                "total": 9.0,
                "decode": sum(own),
            }
            rows = [common | {"repeat": repeat, "phase": phase, "seconds": value} for phase, value in phases.items()]
            rows[-1] |= held | {"steps_s": own}
            rows[-2] |= {"disturbed": ["clock held down"] if repeat else [], "fallback": []}
            rows[-2] |= {"load": 1.5 + 2 * repeat, "threads": 2}
            store.write_timings(rows)
    return root


STEPS = {
    ("full", 64): [[0.4, 0.2, 0.3], [0.5, 0.5, 0.2], [0.3, 0.3, 0.3]],
    ("snapkv", 64): [[0.1, 0.2, 0.1], [0.2, 0.2, 0.3], [0.1, 0.1, 0.1]],
    ("full", 32): [[0.2, 0.2, 0.2]],
    ("snapkv", 32): [[0.1, 0.1, 0.1]],
}


def test_passes_have_a_table_per_shape_with_ratios_of_the_same_repeat(tmp_path):
    costs = split_costs(["tpot_s", "ttft", "peak", "peak_decode", "bytes", "compress_s", "tokens_s"])[1]
    short, long = cost_tables(timed(tmp_path, STEPS), costs)
    assert [table.shape["prompt_tokens"] for table in (short, long)] == [32, 64]
    entry = long.entries["snapkv", "0.1"]["tpot_s"]
    own, full = ([median(steps) for steps in STEPS[method, 64]] for method in ("snapkv", "full"))
    assert entry.value == pytest.approx(median(own)) and (entry.low, entry.high) == (min(own), max(own))
    assert entry.level == 0.75  # of three values
    assert entry.ratio == pytest.approx(median(a / b for a, b in zip(own, full, strict=True)))
    line = {key: each.value for key, each in long.entries["full", ""].items()}
    assert line["tokens_s"] == pytest.approx(median(2 * 3 / sum(steps) for steps in STEPS["full", 64]))
    del line["tpot_s"], line["tokens_s"]
    assert line == {"ttft_s": 6, "peak_total": 6400, "peak_decode": 640, "bytes_held": 64, "compress_s": 6}
    held, busy = long.disturbed
    assert held == "clock held down" and not short.disturbed
    assert busy.startswith("other work on the machine, whose load was 3.5 (median) beside passes of 2 threads")


def test_sizes_that_a_search_only_tried_are_in_no_table_and_two_ways_of_a_batch_are_two_shapes(tmp_path):
    store = Store(timed(tmp_path, {key: value for key, value in STEPS.items() if key[1] == 64}))
    rows = [row for row in store.timings().to_pylist() if row["cell"] == "c1"]
    for row in rows:
        del row["schema_version"], row["committed_at"]
    tried = [row | {"batch": 4, "searched": True} for row in rows if row["repeat"] is None]
    store.write_timings(tried)
    failed = {"batch": 8, "phase": "total", "status": "oom", "error": "no memory", "peak_allocated": None}
    store.write_timings([tried[0] | failed])
    for repeat in {row["repeat"] for row in rows}:
        store.write_timings(row | {"batch_prefill": "together"} for row in rows if row["repeat"] == repeat)
    tables = cost_tables(tmp_path, split_costs(["tpot_s"])[1])
    assert [(table.shape["batch"], table.shape["batch_prefill"]) for table in tables] == [
        (2, "one_by_one"),
        (2, "together"),
    ]


def test_what_ran_out_of_memory_says_so_in_its_place(tmp_path, capsys):
    text = printed(capsys, timed(tmp_path, STEPS, ("snapkv", 64)), "--metric", "tpot_s,peak_decode")
    long = text.split("64 prompt tokens")[1]
    assert "| oom" in long and "1/2 ok" in long


@pytest.mark.slow
def test_the_three_forms_say_the_same_numbers(tmp_path, capsys):
    root = timed(tmp_path, STEPS)
    lines = list(csv.DictReader(io.StringIO(printed(capsys, root, "--metric", "tpot_s,peak", "--format", "csv"))))
    assert len(lines) == 2 * 2 * 2
    (line,) = (
        line for line in lines if (line["method"], line["prompt_tokens"], line["metric"]) == ("snapkv", "64", "tpot_s")
    )
    assert (line["median"], line["unit"], line["ratio_to_full"][:6]) == ("0.1", "seconds", "0.3333")
    for form in ("md", "latex"):
        text = (
            printed(capsys, root, "--metric", "tpot_s,peak", "--format", form)
            .replace("\\scriptsize ", "")
            .translate(str.maketrans("", "", "\\{}"))
        )
        assert "100 [100, 200]" in text and "tpot_s [ms]" in text and "0.333 [0.333, 0.400]" in text
        assert "75% intervals" in text
        assert "[100, 200]" not in printed(capsys, root, "--metric", "tpot_s", "--format", form, "--no-interval")


class OneByte:
    """A device that reads a byte in a millisecond."""

    bandwidth, device = 2e9, "a-slow-device"  # as it says

    def step_s(self, useful: float, batch: int) -> float:
        return useful * batch / 1000


def test_the_least_time_of_a_step_stands_beside_its_time_and_what_it_is_made_of_does_not(tmp_path):
    costs = split_costs(["peak", "tpot_s"])[1]
    tables = cost_tables(timed(tmp_path, STEPS, ("snapkv", 64)), costs, beside=roofline_inputs(costs))
    tables = set_limits(tables, costs, lambda context: OneByte() if context["device"] == "cpu" else None)
    long = tables_of_costs(tables)[1]
    (grid,) = long.grids
    assert grid.header[-3:] == ["tpot_s [ms]", "/ full", "limit [ms]"] and "bytes_useful_step" not in str(grid.header)
    assert [row[-1] for row in grid.rows] == [
        "128",
        "-",
    ]  # 64 bytes in a batch of two; of failed passes nothing is known
    assert any("at 2.0 GB/s (read-only, a-slow-device)" in note.text for note in long.notes)
    records = list(csv.DictReader(io.StringIO(write(tables_of_costs(tables), "csv"))))
    assert {(one["metric"], one["prompt_tokens"]): one["limit"] for one in records if one["method"] == "full"} == {
        ("peak", "32"): "",
        ("peak", "64"): "",
        ("tpot_s", "32"): "0.064",
        ("tpot_s", "64"): "0.128",
    }


def test_times_of_two_kinds_of_cpu_stand_in_no_table_together(tmp_path):
    costs = split_costs(["tpot_s"])[1]
    apart = timed(tmp_path / "apart", STEPS, cpus={"full": "AMD", "snapkv": "Intel"})
    tables = cost_tables(apart, costs)
    assert [table.context["processor"] for table in tables] == ["AMD", "AMD", "Intel", "Intel"]
    assert all(table.entries["snapkv", "0.1"]["tpot_s"].ratio is None for table in tables[2:])
    assert "processor=Intel" in str(tables_of_costs(tables))


def test_without_a_measured_device_a_table_of_step_times_says_that_no_limit_is_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "empty"))
    text = printed(capsys, timed(tmp_path / "rows", STEPS), "--metric", "tpot_s")
    assert (
        "| limit" not in text
        and "No roofline beside tpot_s: the model's shape is unknown or this device was not measured" in text
    )


def test_passes_that_know_only_what_limits_are_made_of_have_no_table(tmp_path, capsys):
    root = timed(measured(tmp_path), {("keydiff", 64): []})  # a pass that counts memory and none that is timed
    costs = split_costs(["tpot_s"])[1]
    tables = cost_tables(root, costs, beside=roofline_inputs(costs))
    assert [table.per_pass for table in tables] == [False, True]
    assert set_limits(tables, costs, lambda context: OneByte()) == tables[:1]
    assert "made_up_text" not in printed(capsys, root, "--metric", "tpot_s")


@pytest.mark.slow
def test_scores_and_costs_are_asked_in_one_call(tmp_path, capsys):
    root = measured(tmp_path)
    both = printed(capsys, root, "--metric", "exact_match,bytes,tpot_s")
    assert both == "\n".join(printed(capsys, root, "--metric", each) for each in ("exact_match", "bytes,tpot_s"))
    assert "different columns in csv" in refusal(capsys, root, "--metric", "exact_match,bytes", "--format", "csv")
    assert "did you mean" in refusal(capsys, root, "--metric", "exact_match,tpott_s")
    assert "These rows have no tokens_s" in refusal(capsys, root, "--metric", "tokens_s")
    assert "--pairs does not work with costs" in refusal(capsys, root, "--metric", "bytes", "--pairs")
    assert "--against does not work with csv" in refusal(capsys, root, "--against", "snapkv", "--format", "csv")
    for option in (["--ranks"], ["--methods", "snapkv"], ["--pairs"], ["--budgets", "8"]):
        assert f"{option[0]} does not work with --metric fidelity" in refusal(
            capsys, root, "--metric", "fidelity", *option
        )


def test_every_column_of_numbers_has_a_name():
    assert {"prompt_tokens", "bytes_padding", "entries_resident", "peak_prefill", "second_token_s", "load"} <= {*KNOWN}
    assert split_costs(["x", "peak", "prefill", "prefill_s"])[0] == ["x"]


def test_numbers_are_readable():
    assert [number(value) for value in (0.012345, 12.345, 1234.5, 3.0, 0.0, None)] == [
        *("0.0123", "12.3", "1234", "3", "0", "-")
    ]
    assert unit_of("seconds", [0.1, 0.9]) == (1e-3, "ms") and unit_of("bytes", [5e6]) == (
        2**20,
        "MiB",
    )
