"""Promise: `scenario=efficiency` keeps every raw time of every pass, computes what it prints from them alone, tries what failed
once only, and does nothing where all is there."""

from __future__ import annotations

import csv
import io
import math
import shutil
import subprocess
import sys
from functools import cache
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from mmkv_bench.config.compose import compose
from mmkv_bench.efficiency.measure import Bench
from mmkv_bench.efficiency.plan import PassId, order, plan_passes
from mmkv_bench.efficiency.run import missing_passes, stored_outcomes
from mmkv_bench.efficiency.summary import document, summary_lines
from mmkv_bench.efficiency.text import text
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.forecast.device_speed import DeviceSpeed, save
from mmkv_bench.forecast.roofline import Roofline
from mmkv_bench.models.load import LoadedModel
from mmkv_bench.models.shape import decoder_of
from mmkv_bench.models.source import Source
from mmkv_bench.plan.planner import make_plan, outline
from mmkv_bench.plan.validate import validate
from mmkv_bench.store.compact import pack
from mmkv_bench.store.schema import PHASES
from mmkv_bench.store.store import Store
from mmkv_bench.tables.status import status
from tests import zoo
from tests.cli.setting import CHECKOUT, verb
from tests.each import each
from tests.efficiency.conftest import BANDWIDTH, RATE
from tests.generation import common
from tests.run.setting import done, go, tree
from tests.second_device import far, second_device, there
from tests.wandb_double import installed

ASKED = ["scenario=efficiency", "method=snapkv", "budget=24", "lengths=[40,96]", "repeats=2", "new_tokens=4"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Folder and outcome of one run: two methods (`full` is always one), two lengths, two repeats."""
    root = tmp_path_factory.mktemp("ran")
    return root, done(root, *ASKED)


@pytest.fixture(scope="module")
def plan(ran):
    """The plan of that run."""
    return planned(ran[0])


def passes(root) -> dict[PassId, dict[str, dict]]:
    """Pass -> phase -> its row."""
    found: dict[PassId, dict[str, dict]] = {}
    for row in Store(root).timings().to_pylist():
        unit = PassId(row["cell"], row["prompt_tokens"], row["batch"], row["repeat"])
        assert found.setdefault(unit, {}).setdefault(row["phase"], row) is row, "a phase twice"
    return found


@pytest.mark.slow
def test_every_pass_keeps_every_raw_time_and_its_bytes(ran):
    found = passes(ran[0])
    assert len(found) == 2 * 2 * (1 + 2)
    assert sorted(row["place"] for phases in found.values() for row in [phases["total"]]) == [*range(12)]
    for unit, rows in found.items():
        assert {row["measured"] for row in rows.values()} == {"own"}
        assert rows["decode"]["bytes_useful_step"] == rows["decode"]["bytes_read_step"] <= rows["decode"]["bytes_held"]
        if unit.repeat is None:
            assert all(row["seconds"] is None and row["peak_allocated"] > 0 for row in rows.values())
            assert max(row["peak_allocated"] for row in rows.values()) == rows["total"]["peak_allocated"]
            continue
        assert {*rows} == {*PHASES} - {"vision", "join"}
        seconds = {name: row["seconds"] for name, row in rows.items()}
        assert all(value >= 0 for value in seconds.values())
        parts = sum(seconds[name] for name in ("prefill", "score", "select", "reduce", "first_token"))
        assert math.isclose(parts, seconds["ttft"], rel_tol=1e-9)
        steps = rows["decode"]["steps_s"]
        assert len(steps) == 3
        assert math.isclose(sum(steps), seconds["decode"], rel_tol=1e-9)
        assert math.isclose(seconds["ttft"] + steps[0], seconds["second_token"], rel_tol=1e-9)
        assert math.isclose(seconds["ttft"] + sum(steps), seconds["total"], rel_tol=1e-9)


@pytest.mark.slow
def test_useful_bytes_are_those_of_the_entries_that_are_kept_and_of_the_step_itself(ran):
    token = 2 * 4 * 2 * 32 * 4  # K and V, layers, KV heads, channels, float32
    for unit, rows in passes(ran[0]).items():
        kept = unit.tokens if unit.cell == full_of(ran[1]) else 24
        assert rows["decode"]["bytes_useful_step"] == (kept + 1) * token


def full_of(outcome) -> str:
    """The cell of `full`: the one whose ratios are all 1."""
    lines = outcome.document["efficiency"]
    return next(line["cell"] for line in lines if line["tpot_ratio_low"] == line["tpot_ratio_high"] == 1)


def quartiles(values) -> dict[str, float]:
    ordered = sorted(values)

    def at(share):
        place = share * (len(ordered) - 1)
        low = int(place)
        return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])

    return {"low": at(0.25), "median": at(0.5), "high": at(0.75)}


def test_every_derived_number_is_that_of_a_slow_loop_over_the_raw_ones(ran):
    found, lines, full = passes(ran[0]), ran[1].document["efficiency"], full_of(ran[1])
    shape = decoder()
    assert len(lines) == 4
    rooflines = {line["prompt_tokens"]: line["roofline_ms"] for line in lines if line["cell"] == full}
    for line in lines:
        allowed = None if line["cell"] == full else rooflines[line["prompt_tokens"]] / line["roofline_ms"]
        assert line["speed_up_allowed"] == allowed and (allowed is None or allowed > 1)
        timed = [found[PassId(line["cell"], line["prompt_tokens"], 1, repeat)] for repeat in range(2)]
        base = [found[PassId(full, line["prompt_tokens"], 1, repeat)] for repeat in range(2)]
        memory = found[PassId(line["cell"], line["prompt_tokens"], 1, None)]
        wanted = {
            "ttft": [rows["ttft"]["seconds"] for rows in timed],
            "second_token": [rows["second_token"]["seconds"] for rows in timed],
            "total": [rows["total"]["seconds"] for rows in timed],
            "compression": [sum(rows[name]["seconds"] for name in ("score", "select", "reduce")) for rows in timed],
            "tpot": [step for rows in timed for step in rows["decode"]["steps_s"]],
            "tokens_s": [3 / rows["decode"]["seconds"] for rows in timed],
            "total_ratio": [b["total"]["seconds"] / a["total"]["seconds"] for a, b in zip(base, timed, strict=True)],
            "tpot_ratio": [
                median(b["decode"]["steps_s"]) / median(a["decode"]["steps_s"])
                for a, b in zip(base, timed, strict=True)
            ],
        }
        for name, values in wanted.items():
            for which, value in quartiles(values).items():
                assert math.isclose(line[f"{name}_{which}"], value, rel_tol=1e-9), (name, which)
        kv = memory["decode"]["bytes_useful_step"]
        entries = kv / (2 * 4 * 2 * 32 * 4)
        read = 4 * (shape.blocks + 112 * 128) + kv
        products = 2 * (shape.multiplied + 112 * 128) + 4 * 4 * 4 * 32 * entries
        assert math.isclose(line["mbu"], read / line["tpot_median"] / BANDWIDTH, rel_tol=1e-9)
        assert math.isclose(line["roofline_ms"], 1e3 * max(read / BANDWIDTH, products / RATE), rel_tol=1e-9)
        assert (line["status"], line["repeats"], line["bytes_useful_step"]) == ("ok", 2, kv)
        assert line["peak_total"] == memory["total"]["peak_allocated"]


def test_a_table_of_step_times_has_the_limit_that_the_run_printed(ran, capsys):
    capsys.readouterr()
    assert verb("tables")([str(ran[0]), "--metric", "tpot_s", "--format", "csv"]) == 0
    found = {
        (line["method"], int(line["prompt_tokens"])): float(line["limit"])
        for line in csv.DictReader(io.StringIO(capsys.readouterr().out))
    }
    lines = ran[1].document["efficiency"]
    assert len(found) == len(lines) == 4
    for line in lines:
        name = "full" if line["cell"] == full_of(ran[1]) else next(name for name, _ in found if name != "full")
        assert math.isclose(1e3 * found[name, line["prompt_tokens"]], line["roofline_ms"], rel_tol=1e-9)


@pytest.mark.slow
@each(
    "repeats, longer, scatter, told",
    [(1, 9.0, 0.0, None), (3, 1.0, 0.0, True), (3, 9.0, 0.0, False), (3, 1.23, 0.5, None), (3, 1.0, 0.5, True)],
)
def test_a_step_is_called_launch_bound_only_where_there_are_repeats_enough_to_tell(
    ran, plan, repeats, longer, scatter, told
):
    """A cell at two lengths, every step of the longer one `longer` times as long, a third of the steps by `scatter` more and
    a third by as much less."""
    import pandas as pd

    rows = Store(ran[0]).timings().to_pandas()
    rows = rows[rows["cell"] == full_of(ran[1])]
    memory, one = rows[rows["repeat"].isna()], rows[rows["repeat"] == 0]
    more = memory["prompt_tokens"].map({40: 1, 96: 20})  # or weights would hide what a longer prompt adds
    made = [memory.assign(bytes_useful_step=memory["bytes_useful_step"] * more)]
    for repeat in range(repeats):
        timed = one.assign(repeat=float(repeat))
        factor = timed["prompt_tokens"].map({40: 1.0, 96: longer})
        timed["steps_s"] = [
            None if steps is None else [0.01 * times * (1 + scatter * part) for part in (-1, 0, 1)]
            for steps, times in zip(timed["steps_s"], factor, strict=True)
        ]
        made.append(timed)
    table = pa.Table.from_pandas(pd.concat(made), preserve_index=False)
    limits = Roofline(decoder(), 4, BANDWIDTH, RATE, "here")
    lines = summary_lines(table, {full_of(ran[1]): full_of(ran[1])}, limits)
    assert set(lines["launch_unknown"]) == {told is None}
    assert set(lines["launch_bound"]) == {bool(told)}
    said = text(plan, lines, limits)
    slow = Roofline(limits.decoder, 4, BANDWIDTH / 1e9, RATE / 1e9, "here")
    exceeded = text(plan, summary_lines(table, {full_of(ran[1]): full_of(ran[1])}, slow), slow)
    assert (
        "Limits are exceeded (" in exceeded
        and "under an unknown load" in exceeded
        and "tokens/s counts only decoding" in said
    )


def test_what_is_printed_is_a_table_per_length_and_says_the_limit(ran):
    out = ran[1].out
    assert out.index("40 prompt tokens, batch 1") < out.index("96 prompt tokens, batch 1")
    assert out.count("snapkv@24") >= 3 and "20.0 GB/s read-only" in out


def test_a_finished_store_does_nothing_and_one_more_repeat_runs_alone(ran):
    before = tree(ran[0])
    again = done(ran[0], *ASKED)
    assert again.document["ran"] == 0 and "nothing to do" in again.out
    assert again.document["efficiency"] == ran[1].document["efficiency"]
    assert tree(ran[0]) == before
    plan = plan_passes(composed(ran[0], "repeats=3"))
    todo = missing_passes(plan, stored_outcomes(plan, Store(ran[0]).timings()))
    assert {unit.repeat for unit in todo} == {2} and len(todo) == 4


@pytest.mark.slow
def test_a_finished_run_prints_the_limits_of_its_rows_device_without_torch(ran, tmp_path, monkeypatch):
    root, cache = tmp_path / "rows", tmp_path / "cache"
    shutil.copytree(ran[0], root)
    rows = Store(root).cells().to_pylist()
    shutil.rmtree(root / "cells")
    Store(root).write_cells(
        {key: row[key] for key in row if key not in ("schema_version", "created_at", "row_digest")}
        | {"cpu": "Another Processor"}
        for row in rows
    )  # as if they came from there
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(cache))
    threads = pc.max(Store(root).timings()["threads"]).as_py()
    known = save(DeviceSpeed("Another Processor", "cpu", threads, 3e10, {"float32": RATE}, 1 << 34, "2", "2026-11-22"))
    words = [*ASKED, "model.device=cpu", f"out={root}"]
    code = f"import sys; from mmkv_bench.cli.main import main; main({words!r}); print('torch' in sys.modules)"
    environment = CHECKOUT | {"MMKV_BENCH_CACHE": str(cache)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert "nothing to do" in ended.stdout and ended.stdout.endswith("False\n"), ended.stderr
    assert f"Limits of {known.stem}: 30.0 GB/s read-only" in ended.stdout
    assert [*known.parent.iterdir()] == [known], "nothing was measured"


def test_packed_times_are_the_same_rows(ran, tmp_path):
    shutil.copytree(ran[0], tmp_path / "packed")
    rows = Store(ran[0]).timings()
    pack(Store(tmp_path / "packed"))
    assert Store(tmp_path / "packed").timings().equals(rows)
    assert len([*(tmp_path / "packed" / "timings").glob("*.parquet")]) == 1


def test_status_counts_passes_and_takes_their_cells_for_no_dataset(ran, capsys):
    assert verb("status")([str(ran[0])]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{ran[0]}: no answers",
        "  12 passes of scenario=efficiency, 0 failed",
    ]
    assert status(Store(ran[0])).datasets == ()


@pytest.mark.full
def test_out_of_memory_is_a_row_that_is_not_tried_again_unless_asked(tmp_path, monkeypatch):
    tried, timed = [], Bench.measure_times

    def stops(bench, prompts, cell):
        tried.append(cell.cell)
        if cell.budget is not None:
            raise torch.OutOfMemoryError("no more")
        return timed(bench, prompts, cell)

    monkeypatch.setattr(Bench, "measure_times", stops)
    asked = [*ASKED, "lengths=40"]
    outcome = go(tmp_path, *asked)
    failed = [row for row in Store(tmp_path).timings().to_pylist() if row["status"] != "ok"]
    assert outcome.code == 1 and [(row["status"], row["phase"]) for row in failed] == [("oom", "total")]
    assert "oom: OutOfMemoryError: no more" in outcome.out
    assert tried.count(failed[0]["cell"]) == 1
    count = len(tried)
    assert go(tmp_path, *asked).code == 1 and len(tried) == count, "what failed is not tried again by itself"
    monkeypatch.setattr(Bench, "measure_times", timed)
    assert done(tmp_path, *asked, "retry=oom").document["failed"] == 0


@cache
def decoder():
    """The embedded model's, whose shape is read once."""
    return decoder_of(Source.of(compose([]).model).described)


@cache
def planned(out):
    return plan_passes(composed(out))


def composed(out, *words: str):
    config = compose([*ASKED, "model.device=cpu", f"out={out}", *words])
    validate(config)
    return config


def test_the_order_is_drawn_by_the_seed_and_every_repeat_meets_all_cells_and_lengths():
    cells, lengths = ["a", "b", "c"], [8, 16]
    shapes = [PassId(cell, tokens, 1) for cell in cells for tokens in lengths]
    units = order(shapes, 3, 0)
    assert units == order(shapes, 3, 0) != order(shapes, 3, 1)
    blocks = [units[start : start + 6] for start in range(0, 24, 6)]
    assert [{unit.repeat for unit in block} for block in blocks] == [{None}, {0}, {1}, {2}]
    assert all({unit[:2] for unit in block} == {(a, b) for a in cells for b in lengths} for block in blocks)
    assert len({tuple(unit[:2] for unit in block) for block in blocks}) > 1


RANDOM = ["model=qwen2_5_vl_3b", "model.weights=random", "model.layers=1", "model.dtype=float32"]


@pytest.mark.full
@each(
    "words, said",
    [
        (["lengths=5000"], "lengths=5000 with new_tokens=4 is more than the model's context of 4096 tokens"),
        (["lengths=4094"], "give lengths of at most 4093"),
        (["lengths=64", "new_tokens=1000000000"], "give new_tokens of at most 4033"),
        (["lengths=9000000", "new_tokens=1000000000"], "give new_tokens of at most 4081, and shorter lengths"),
        (["lengths=64", "model.max_prompt_tokens=10"], "give a larger model.max_prompt_tokens"),
        (["lengths=[40,8]"], "lengths=8 is out of range"),
        (["repeats=0"], "repeats=0 is out of range"),
        (["batch=0"], "batch=0 is out of range"),
        (["batch=[1,most]"], "batch=most is out of range; allowed: whole numbers >= 1, or max"),
        (
            ["batch=max"],
            "batch=max on the CPU would fill this machine's memory before it fails; give memory_limit=8GiB",
        ),
        (["batch=max", "memory_limit=much"], "memory_limit=much is not an amount of memory"),
        (["batch=max", "memory_limit=900000GiB"], "memory_limit=900000GiB is more than the"),
        (["batch_prefill=both"], "batch_prefill=both is unknown"),
        (["batch=2", "batch_prefill=together", "method=kivi"], "use batch_prefill=one_by_one, or leave the method out"),
        (["batch=2", "method=elastic_cache", "reading=released"], "so it decodes alone"),
        (["new_tokens=2"], "new_tokens=2 is out of range"),
        (["scenario=speed"], "scenario=speed is unknown"),
        (["dataset=docvqa"], "takes no dataset but got dataset=docvqa"),
        (["stage=score"], "stage=score has no effect under scenario=efficiency"),
        (["protocol=query_agnostic"], "protocol=query_agnostic is not timed"),
        (["method=oracle"], "method oracle reads the full cache's answer"),
        (["method=look_m"], "method look_m needs visual tokens"),
        (
            [*RANDOM, "method=adakv"],
            "method adakv divides its budget by the prompt's scores (HeadPool)",
        ),
        ([*RANDOM, "method=flashcache"], "random weights would distort"),
        ([*RANDOM, "method=sparsemm"], "no committed calibration"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence_before_any_work(words, said, tmp_path):
    with pytest.raises(MMKVError) as caught:
        plan_passes(composed(tmp_path / "out", *words))
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_random_weights_are_timed_where_the_division_follows_from_the_length(tmp_path):
    plan = plan_passes(composed(tmp_path, *RANDOM, "method=[snapkv,pyramidkv,h2o]"))
    assert [cell.base for cell in plan.cells] == ["full", "snapkv", "pyramidkv", "h2o"]


def test_other_commands_say_which_one_measures(tmp_path):
    for make in (make_plan, outline):
        with pytest.raises(ConfigError, match="start it with mmkv-bench run"):
            make(composed(tmp_path))


def test_the_scenario_is_in_no_cell_of_another():
    usual = {cell.cell for cell in outline(compose(["method=snapkv"])).cells}
    assert usual == {cell.cell for cell in outline(compose(["method=snapkv", "repeats=9", "lengths=64"])).cells}


@pytest.mark.slow
def test_a_timed_pass_answers_as_stock_generate_does():
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.efficiency.prompts import text_prompt
    from mmkv_bench.generation.result import CellSpec
    from mmkv_bench.generation.unshared_generation import generate_alone

    loaded = Source.of(compose(["model.device=cpu"]).model).load()
    bench, prompt = Bench(loaded, 5, "sdpa"), text_prompt(loaded, 50)
    assert prompt.length == 50 and prompt.visual_tokens == 0
    wanted = ["method=[full,snapkv,kivi,h2o_decode,adakv]", "protocol=[paper,strict]", "budget=20", "lengths=50"]
    for cell in plan_passes(composed("unused", *wanted)).cells:
        spec = CellSpec(cell.cell, cell.compressor, cell.budget, cell.protocol)
        never = loaded.model.config.get_text_config().vocab_size  # an end that no token is
        stock = generate_alone(
            loaded.model, prompt.inputs, spec.compressor, spec.budget, spec.protocol, token_types=prompt.types,
            max_new_tokens=5, eos_token_id=never, pad_token_id=0, identity=prompt.identity,
        )  # fmt: skip
        assert bench.measure_times([prompt], spec).answers == stock.sequences[:, 50:].tolist(), cell.label
    assert Budget.parse("20") == plan_passes(composed("unused", *wanted)).cells[1].budget


@pytest.mark.slow
def test_padding_of_ragged_heads_is_read_and_not_useful():
    from mmkv_bench.efficiency.prompts import text_prompt
    from mmkv_bench.generation.result import CellSpec

    loaded = Source.of(compose(["model.device=cpu"]).model).load()
    cell = plan_passes(composed("unused", "method=adakv")).cells[1]
    counted = Bench(loaded, 4).measure_memory(
        [text_prompt(loaded, 90)], CellSpec(cell.cell, cell.compressor, cell.budget)
    )
    token = 2 * 4 * 2 * 32 * 4
    assert counted.held.useful == (24 + 1) * token < counted.held.read
    assert np.isfinite(counted.resident)


@pytest.mark.full
def test_on_another_device_passes_are_timed_by_marks_counted_by_its_allocator_and_answer_alike():
    def bench(model):
        device = next(model.parameters()).device
        return Bench(LoadedModel("zoo", model, None, None, common.family("qwen2_5_vl"), device, "float32"), 4)

    model, prompt = zoo.model("qwen2_5_vl"), common.encoded("qwen2_5_vl")
    methods = common.registry("paper", "qwen2_5_vl")
    cells = [common.cell(methods[name], None if name in ("full", "kivi") else 6) for name in ("full", "snapkv", "kivi")]
    for cell in cells:
        here = bench(model).measure_times([prompt], cell)
        with second_device() as device:
            made, far_prompt = bench(there(model)), far(prompt)
            found, counted = made.measure_times([far_prompt], cell), made.measure_memory([far_prompt], cell)
            assert (found.answers, found.held) == (here.answers, here.held)
            assert "vision" in found.seconds and min(found.seconds.values()) >= 0
            assert counted.peaks["total"].reserved >= counted.peaks["total"].allocated > 0 and counted.resident is None
            assert device.waits > 0


@pytest.mark.full
def test_the_whole_command_on_another_device_does_the_same_passes_and_holds_the_same_bytes(ran, tmp_path):
    with second_device() as device:
        save(DeviceSpeed("second device", "cuda", 0, BANDWIDTH, {"float32": RATE}, 1 << 34, "2", "2026-11-22"))
        outcome = done(tmp_path, *ASKED, "model.device=cuda")
        assert device.waits > 0
    assert set(Store(tmp_path).cells()["device"].to_pylist()) == {"second device"}
    assert "MBU" in outcome.out and "launch_bound" in outcome.out
    kept = ("phase", "prompt_tokens", "batch", "repeat", "status", "bytes_held", "bytes_useful_step", "bytes_read_step")
    rows, other = (
        sorted(tuple(map(str, (row[name] for name in kept))) for row in Store(root).timings().to_pylist())
        for root in (tmp_path, ran[0])
    )
    assert rows == other


def test_where_every_kernel_is_waited_for_the_command_measures_nothing(tmp_path, capsys):
    with second_device() as device:
        type(device).blocking = True
        assert verb("run")([*ASKED, "model.device=cuda", f"out={tmp_path / 'rows'}"]) == 2
    assert "CUDA_LAUNCH_BLOCKING is set, so the host waits for every kernel" in capsys.readouterr().err
    assert not len(Store(tmp_path / "rows").timings()) and not len(Store(tmp_path / "rows").cells())


@pytest.mark.full
def test_a_store_of_failures_alone_is_summed_up_too(ran):
    rows = Store(ran[0]).timings()
    failed = rows.filter(pc.and_(pc.equal(rows["phase"], "total"), pc.is_null(rows["repeat"])))
    for name, value in (("status", "oom"), ("error", "no more"), ("peak_allocated", None)):
        failed = failed.set_column(
            failed.column_names.index(name),
            rows.schema.field(name),
            pa.array([value] * len(failed), rows.schema.field(name).type),
        )
    cells = {name: name for name in failed["cell"].to_pylist()}
    for limits in (None, Roofline(decoder(), 4, BANDWIDTH, RATE, "here")):
        lines = document(summary_lines(failed, cells, limits), plan_passes(composed(ran[0])).cells)
        assert [(line["status"], line["repeats"], line["tpot_median"], line["mbu"]) for line in lines] == [
            ("oom", 0, None, None)
        ] * 4


@pytest.mark.full
def test_wandb_shows_each_pass_and_what_cells_came_to_once(tmp_path, monkeypatch):
    met, root = installed(monkeypatch, tmp_path), tmp_path / "rows"
    words = [word for word in ASKED if not word.startswith(("lengths", "repeats"))]
    done(root, *words, "lengths=[40]", "repeats=1", "logger=wandb")
    logged = {key: value for what, values in met() if what == "log" for key, value in values.items()}
    ((columns, lines),) = [values["results"] for what, values in met() if what == "log" and "results" in values]
    table = [dict(zip(columns, line, strict=True)) for line in lines]
    assert {line["method"] for line in table} == {"full", "snapkv"} and {line["score"] for line in table} == {None}
    for line in table:
        label = f"{line['dataset']}/{'full' if line['method'] == 'full' else 'snapkv@24'}/40x1"
        for name in ("ttft_s", "tpot_s", "peak_bytes"):
            assert line[name] == logged[f"{label}/{name}"] > 0
        assert (line["prompt_tokens"], line["batch"], line["failures"]) == (40, 1, 0)
    before = met()
    done(root, *words, "lengths=[40]", "repeats=1", "logger=wandb")
    assert met() == before
