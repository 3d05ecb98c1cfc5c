"""Promise: a cell holds the one measured number of its address, or says why it has none. The rows here are made up."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.methods.build import settings
from mmkv_bench.methods.node import flat_parameters
from mmkv_bench.papers import evidence_reader, non_score_metrics
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.judgement import FilledTable, fill
from mmkv_bench.papers.layout import load, parse
from mmkv_bench.papers.measurement import WHOLE, Measurement, State, _correct_interval
from mmkv_bench.papers.table import details, render
from mmkv_bench.store.files import checksum
from mmkv_bench.store.store import Store
from mmkv_bench.tables.dataset_groups import Mean, mean
from mmkv_bench.tables.sample_scores import Scores
from tests.each import each
from tests.papers.genuine import genuine
from tests.papers.words import notes, text
from tests.tables.examples import Example, zeros_and_ones
from tools import planned_peaks

N = 320  # samples of milebench_image_needle
MODEL = "qwen2_5_vl_7b"


def add(
    example: Example, method: str, budget, values, label: str = "", dataset: str = "milebench_image_needle", **changed
) -> str:
    given = changed.pop("given", {})
    node = settings(method, "paper", given)
    parameters = "{}" if method == "full" else json.dumps(flat_parameters(node))
    metric = changed.pop("metric", "accuracy")
    model = changed.pop("model", MODEL)
    row = {"model": model, "dataset": dataset} if model == "tiny" or dataset.endswith("_fixture") else genuine(
        model, dataset, method, with_=given, **changed
    )  # fmt: skip
    row |= {"base": node["base"], "parameters": parameters} | {key: changed[key] for key in changed if key not in row}
    return example.add(label or method, budget, values, sample={"metric": metric}, **row)


def stored(tmp_path: Path, *adds, name: str = "rows") -> Path:
    example = Example()
    for arguments, changed in adds:
        old = add(example, *arguments, **changed)
        row = example.cells[-1]
        told = [
            str(row[key]) for key in ("dataset", "parameters", "base", "torch", "seed", "generation", "budget_fraction")
        ]
        new = checksum("|".join(told).encode())  # of what the cell is, so that two stores may hold the same one
        for part in (example.cells, example.samples, example.responses):
            for one in part:
                one["cell"] = new if one["cell"] == old else one["cell"]
    return example.write(tmp_path / name)


def page(*roots: Path, table: str = "flashcache_table05") -> FilledTable:
    return fill(load(table), Evidence.of(roots))


def cell(found: FilledTable, row: str, column: str = "milebench_image_needle", across: str = ""):
    spec = found.layout
    (one,) = [
        one
        for one in found.cells
        if (not across or (one.cell.across is not None and spec.across[one.cell.across].label == across))
        and (spec.rows[one.cell.row].label, spec.columns[one.cell.column].label) in ((row, column), (column, row))
    ]
    return one


@pytest.mark.slow
def test_rows_meet_cells_by_parameters_whatever_they_are_called(tmp_path):
    """gamma 0.1 prints 29.06 = 93/320, gamma 0.5 22.5 = 72/320."""
    root = stored(
        tmp_path,
        (("flashcache", "0.2", zeros_and_ones(93, N)), {"label": "anything", "given": {"gamma": 0.1}}),
        (("flashcache", "0.2", zeros_and_ones(200, N)), {"label": "cutoff_gamma=0.5", "given": {"gamma": 0.3}}),
        (("flashcache", "0.3", zeros_and_ones(72, N)), {"label": "other budget", "given": {"gamma": 0.5}}),
    )
    found = page(root)
    agreed = cell(found, "cutoff_gamma=0.1")
    assert agreed.measured.state == "measured" and agreed.verdict.word == "agrees"
    assert text(agreed).startswith("29.06 / 29.06, +0.00 [") and text(agreed).endswith("] agrees †")
    assert text(cell(found, "cutoff_gamma=0.3")).endswith(" differs †"), (
        "as the table reads it, whatever else was not run"
    )
    assert text(cell(found, "cutoff_gamma=0.5")) == "- / 22.5 not run"
    assert found.states == {"measured": 2, "not run": 16}
    every = [
        (
            ("flashcache", "0.2", zeros_and_ones(right, N)),
            {"label": f"reading {number}", "given": {"gamma": 0.3, **own}},
        )
        for number, (right, own) in enumerate(((200, {"heads": "per_head"}), (80, {"keys": "unrotated"})))
    ]
    found = page(root, stored(tmp_path, *every, name="readings"))
    one = cell(found, "cutoff_gamma=0.3")
    assert one.verdict.word == "differs" and found.verdicts(proposed=True) == {"agrees": 1, "differs": 1}
    assert text(one).endswith(" differs †; per head 62.5 differs; unrotated keys 25.0 agrees"), (
        "a word for each number shown"
    )
    (line,) = [line for line in csv.DictReader(io.StringIO(render([found], "csv"))) if line["verdict"] == "differs"]
    assert line["readings"] == "per head 62.5 differs; unrotated keys 25.0 agrees" and line["margin"] == "1"


def test_a_part_of_the_samples_is_undecided_whatever_its_numbers(tmp_path):
    """A run takes the first ones of a set, which are no random draw of it; printed are 29.06 and 22.5."""
    adds = [(("flashcache", "0.2", zeros_and_ones(right, n)), {"given": {"gamma": gamma}})
            for right, n, gamma in ((29, 100, 0.1), (319, 319, 0.5))]  # fmt: skip
    found = page(stored(tmp_path, *adds))
    one, far = cell(found, "cutoff_gamma=0.1"), cell(found, "cutoff_gamma=0.5")
    assert [each.measured.state for each in (one, far)] == ["part"] * 2
    assert text(one).startswith("part (100 of 320): 29.00 / 29.06, -0.06 [") and text(one).endswith(" undecided †")
    assert far.verdict.word == "undecided"


@pytest.mark.slow
def test_the_drop_to_full_of_a_part_is_undecided(tmp_path):
    """MUIRBench of FlashCache's Table 2 prints 45.54 for full, 45.15 for FlashCache and 37.58 for StreamingLLM."""
    told = {"dataset": "muirbench", "metric": "muirbench_score_overall"}
    adds = [(("full", None, zeros_and_ones(91, 200)), told), (("flashcache", "0.1", zeros_and_ones(60, 200)), told)]
    adds += [(("streamingllm", "0.1", zeros_and_ones(75, 200)), told)]
    found = page(stored(tmp_path, *adds), table="flashcache_table02")
    drops = {one.cell.address.method.name: one.drop for one in found.cells if one.drop}
    assert {name: str(drop) for name, drop in drops.items()} == dict.fromkeys(
        ("flashcache", "streamingllm"), "undecided"
    )


@pytest.mark.slow
def test_failed_and_unjudged_samples_leave_no_number(tmp_path):
    values = [None, *zeros_and_ones(92, N - 1)]
    root = stored(tmp_path, (("flashcache", "0.2", values), {"given": {"gamma": 0.1}}))
    assert text(cell(page(root), "cutoff_gamma=0.1")) == "- / 29.06 failed: 1 of 320 samples"


@pytest.mark.slow
def test_seeds_are_averaged_and_nothing_else_is(tmp_path):
    """A seed with fewer answers leaves a part; two cells of one seed, as of two artefacts of the model's own, are ambiguous."""
    told = {"dataset": "ocrbench", "metric": "ocrbench_accuracy", "generation": json.dumps({"max_new_tokens": 64})}
    adds = [
        (("mmshift", 64, zeros_and_ones(n // 2, n)), {**told, "seed": seed})
        for seed, n in ((0, 1000), (1, 1000), (2, 9))
    ]
    one = cell(page(stored(tmp_path, *adds), table="mmshift_table01"), "MM-ShiftKV", "ocrbench", across="64")
    assert text(one).startswith("part (9 of 1,000): ") and one.measured.n == 1000
    example = Example()
    for number in range(2):
        add(example, "prefixkv", "0.5", [2.0] * 218, dataset="mmvet_prefixkv", metric="ppl", model="llava_v1_5_7b")
        row = example.cells[-1]
        artefact = {"calibration": {"prefixkv": f"artefact {number}"}}
        row["parameters"] = json.dumps(json.loads(row["parameters"]) | artefact)
    evidence = Evidence.of([example.write(tmp_path / "artefacts")])
    (wanted,) = [
        cell.address
        for cell in load("prefixkv_table04").cells
        if (cell.address.method.name, cell.address.budget) == ("prefixkv", "0.5")
    ]
    found = evidence.match(replace(wanted, reading="paper"))
    assert found.state == "ambiguous" and 'calibration {"prefixkv": "artefact 0"} | ' in found.why


def test_a_cell_without_a_number_still_shows_what_is_printed():
    (one,) = [one for one in page().cells if one.printed.value == "29.06"]
    for state in {*State} - {*WHOLE, "part"}:
        assert text(replace(one, measured=Measurement(state, "a reason"))).startswith("- / 29.06 "), state


def test_what_needs_no_weights_is_computed_and_what_needs_them_says_so():
    """FlashCache Table 8: 57,344 bytes a token of Qwen2.5-VL-7B; its 8K at 10 % is printed below a tenth of full's."""
    found = page(table="flashcache_table08")
    sizes = [one for one in found.cells if one.cell.address.metric == "kv_gib"]
    assert {one.measured.state for one in sizes} == {"computed"}
    assert (
        sorted(one.verdict.word for one in sizes)
        == ["agrees"] * 7 + ["not comparable", "undecided"] + ["uninformative"] * 3
    )
    assert not found.verdicts(proposed=True) and not found.verdicts(proposed=False), (
        "what is computed proves nothing and is not counted"
    )
    full = cell(found, "64K", "kv_gib", across="FullKV")
    assert full.measured.value == pytest.approx(64_000 * 2 * 28 * 4 * 128 * 2 / 2**30)
    assert text(full) == "computed: 3.42 / 3.42, -0.00 agrees"
    assert full.measured.why == "64,000 entries of 57,344 bytes"
    size = cell(page(table="hybridkv_table03"), "FullKV", "kv_gb")
    assert size.measured.why == "30,168 entries of 57,344 bytes"
    assert text(size).startswith("computed: 1.73 / 1.73, -0.00"), "in the paper's own unit"
    hybrid = cell(page(table="hybridkv_table03"), "HybridKV 20%", "kv_gb")
    assert text(hybrid).startswith("- / 0.40 not run: needs weights")
    tokens = cell(page(table="mmshift_table04"), "qwen2_5_vl_7b", "docvqa")
    assert text(tokens) == "- / 4830 not run: needs the pictures' sizes"


def test_a_peak_of_a_dry_run_is_shown_as_planned_and_not_judged(tmp_path, monkeypatch):
    counted = {"full": 31_000_000_000, "snapkv@256": 15_500_000_000}
    cells = [
        {"cell": name, "tokens": 32768, "peaks": {"load": 10, "prefill": most}, "largest": most, "error": None}
        for name, most in counted.items()
    ]
    told = json.dumps({"model": "llava_v1_6_vicuna_7b", "memory": {"measured": "planned", "cells": cells}})
    monkeypatch.setattr(non_score_metrics, "PEAKS", tmp_path / "planned" / "peaks.csv")
    monkeypatch.setattr("sys.argv", ["planned_peaks", "efficiency_mmshift_table09"])
    monkeypatch.setattr("sys.stdin", io.StringIO(f"what a plan says\n{told}\n"))
    planned_peaks.main()
    non_score_metrics._peaks.cache_clear()
    found = page(table="mmshift_table09")
    non_score_metrics._peaks.cache_clear()
    peaks = [one for one in found.cells if one.cell.address.metric == "peak_gb"]
    assert [one.measured.value for one in peaks] == [31.0, 15.5, None, None]
    assert (
        text(peaks[1]) == "planned: 15.50 / 17.28, -1.78" and peaks[1].measured.why == "counted in a dry run, prefill"
    )
    assert {one.verdict for one in peaks[:2]} == {None} and found.states["planned"] == 2
    assert any("experiment=efficiency_mmshift_table09" in line for line in details(found, peaks[1])), (
        "it can still be measured"
    )


@pytest.mark.slow
def test_rows_of_other_calibrations_are_no_seeds_of_a_method(tmp_path):
    """The model's own artefact and one of other samples: the plain address means the first, one that names data the other."""
    n, told = 218, {"dataset": "mmvet_prefixkv", "metric": "ppl", "model": "llava_v1_5_7b"}
    seen = {"other": {"dataset": "the first 10 samples of textvqa (task x)", "samples": 10}}
    example = Example()
    for label, config in (
        ("prefixkv", {"methods": {"prefixkv": {"calibration": "auto"}}}),
        ("mine", {"variants": {"mine": {"calibration": "mine.json"}}, "calibrations": seen}),
    ):
        add(example, "prefixkv", "0.5", [2.0] * n, label=label, config=json.dumps(config), **told)
        row = example.cells[-1]
        row["parameters"] = json.dumps(
            json.loads(row["parameters"]) | {"calibration": {"prefixkv": "own" if label == "prefixkv" else "other"}}
        )
    evidence = Evidence.of([example.write(tmp_path / "rows")])
    wanted = {
        cell.address.method.calibration: replace(cell.address, reading="paper")
        for name in ("prefixkv_table04", "prefixkv_table08")
        for cell in load(name).cells
        if cell.address.budget == "0.5" and cell.address.method.name == "prefixkv"
    }
    names = {key: [evidence.cells["method"][row] for row in evidence.match(one).rows] for key, one in wanted.items()}
    assert names[""] == ["prefixkv"]
    assert [own for key, own in names.items() if "textvqa" in key] == [["mine"]]
    assert [own for key, own in names.items() if "ocrbench" in key] == [[]]


@pytest.mark.slow
def test_a_folders_name_is_no_formula_in_a_csv(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adds = (("flashcache", "0.2", zeros_and_ones(93, N)), {"given": {"gamma": 0.1}})
    shown = render([page(stored(tmp_path, adds, name="=cmd()"))], "csv")
    (line,) = [one for one in csv.DictReader(io.StringIO(shown)) if one["state"] == "measured"]
    assert line["source"].startswith("'=cmd() ")


@pytest.mark.slow
def test_a_cells_source_is_two_steps_away(tmp_path, monkeypatch):
    """The line of a cell names its rows as `mmkv-bench show` takes them, and where the paper prints its number."""
    adds = (("flashcache", "0.2", zeros_and_ones(93, N)), {"given": {"gamma": 0.1}})
    monkeypatch.chdir(tmp_path)
    found = page(stored(tmp_path, adds))
    (line,) = [one for one in csv.DictReader(io.StringIO(render([found], "csv"))) if one["state"] == "measured"]
    folder, name = line["source"].split()
    assert folder == "rows" and line["line"] == "641"
    assert Store(Path(folder)).cells({name}).to_pylist()[0]["base"] == "flashcache"
    assert any("columns source (for `mmkv-bench show`)" in note for note in notes(found))
    assert (
        "printed numbers: results/reference/flashcache_table05.csv; its column line is that of the paper's text."
        in (notes(found))
    )
    shown = render([found], "html")
    opened = dict(re.findall(r"<td><details><summary>(.*?)</summary>(.*?)</details>", shown))
    assert len(re.findall("<td><details>", shown)) == len(found.cells)
    (ours,) = [told for words, told in opened.items() if words.startswith("29.06 / 29.06, +0.00 [")]
    assert (
        "printed: 29.06 (%), results/reference/flashcache_table05.csv, line 641 of the paper&#x27;s text; settings open"
        in ours
    )
    assert f"<p>ours: <code>mmkv-bench show rows {name}</code></p>" in ours
    assert all("to run: <code>mmkv-bench " in told for words, told in opened.items() if "not run" in words)


@pytest.mark.slow
def test_two_machines_are_one_body_of_evidence_and_the_newer_run_counts(tmp_path):
    one = stored(tmp_path, (("flashcache", "0.2", zeros_and_ones(93, N)), {"given": {"gamma": 0.1}}), name="one")
    two = stored(
        tmp_path, (("flashcache", "0.2", zeros_and_ones(95, N)), {"given": {"gamma": 0.2}, "torch": "2.16"}), name="two"
    )
    found = page(one, two)
    assert found.states["measured"] == 2 and found.versions["torch"] == ("2.15", "2.16")
    assert any("torch 2.15, 2.16" in note for note in notes(found))
    three = stored(
        tmp_path,
        (("flashcache", "0.2", zeros_and_ones(95, N)), {"given": {"gamma": 0.1}, "torch": "2.16"}),
        name="three",
    )
    newer = cell(page(one, three), "cutoff_gamma=0.1").measured
    assert newer.value == pytest.approx(100 * 95 / N) and "torch 2.15 | 2.16" in newer.passed, "the newer run counts"
    shutil.copytree(one, tmp_path / "copy")
    assert page(one, tmp_path / "copy").states["measured"] == 1, "the same cell in two stores is one"
    other = stored(tmp_path, (("flashcache", "0.2", zeros_and_ones(91, N)), {"given": {"gamma": 0.1}}), name="other")
    found = page(one, other)
    assert any("two stores hold the same cell with other scores" in note for note in notes(found))


@pytest.mark.slow
@each("change", ["random", "tiny", "own_path", "fixture"])
def test_what_stands_in_for_something_is_no_evidence(tmp_path_factory, change):
    example = Example()
    changed = {
        "random": {},
        "tiny": {"model": "tiny"},
        "own_path": {"config": json.dumps({"model": {"path": "pkg://mmkv_bench/tiny/weights"}})},
        "fixture": {"dataset": "milebench_image_needle_fixture"},
    }[change]
    add(example, "flashcache", "0.2", zeros_and_ones(93, N), given={"gamma": 0.1}, **changed)
    example.cells[0]["weights"] = "random" if change == "random" else "folder"
    found = page(example.write(tmp_path_factory.mktemp("rows")))
    assert found.states == {"not run": 18} and found.refused == 1
    assert any("1 cells of random weights" in note for note in notes(found))


@pytest.mark.slow
def test_other_conditions_are_shown_and_not_judged(tmp_path):
    values, length = zeros_and_ones(41, 50), {"dataset": "ocrbench", "metric": "ocrbench_accuracy"}
    for tokens, told in (
        (128, "not comparable: max_new_tokens 128, the table has 64 *"),
        (64, " undecided"),
    ):
        root = stored(
            tmp_path,
            (("full", None, values), {**length, "generation": json.dumps({"max_new_tokens": tokens})}),
            name=f"rows{tokens}",
        )
        one = cell(page(root, table="mmshift_table01"), "FullKV", "ocrbench")
        assert told in text(one) and text(one).startswith("part (50 of 1,000): 82.0 / 82.3, -0.3 [")
    found = page(tmp_path, table="mmshift_table01")
    assert told in text(cell(found, "FullKV", "ocrbench")), "of two lengths the table's is taken"
    for own, said in (({"max_new_tokens": 2}, "max_new_tokens 2, the table has 16"), ({"max_new_tokens": 16}, "")):
        added = {"dataset": "muirbench", "metric": "muirbench_score_overall", "generation": json.dumps(own)}
        root = stored(tmp_path, (("full", None, zeros_and_ones(23, 50)), added), name=f"own{own['max_new_tokens']}")
        one = cell(page(root, table="flashcache_table02"), "FullKV", "muirbench")
        assert "; ".join(one.measured.mismatches) == said, (
            "where a table says nothing the data set's own length is meant"
        )


@pytest.mark.full
def test_drops_and_leads_are_paired_and_count_only_beside_a_full_that_agrees(tmp_path):
    """HybridKV's Table 7 has no baseline; FlashCache's Table 2 has: MUIRBench 45.54 full, SnapKV 44.42, FlashCache 45.15 ..."""
    spec = load("flashcache_table02")
    n = 2600
    root = stored(
        tmp_path,
        (("full", None, zeros_and_ones(1184, n)), {"dataset": "muirbench", "metric": "muirbench_score_overall"}),
        (("h2o", "0.1", zeros_and_ones(1150, n)), {"dataset": "muirbench", "metric": "muirbench_score_overall"}),
        (("flashcache", "0.1", zeros_and_ones(1300, n)), {"dataset": "muirbench", "metric": "muirbench_score_overall"}),
    )
    found = fill(spec, Evidence.of([root]))
    own = [one for one in found.cells if one.measured.state == "measured"]
    assert [one.verdict.word for one in own if one.cell.address.method.name == "full"] == ["agrees"]
    assert all(one.counted for one in own if one.drop)
    assert all(lead.word in ("undecided", "confirmed") for lead in found.leads)


@pytest.mark.slow
def test_a_mean_is_there_only_when_all_its_parts_are(tmp_path):
    told = {
        "paper": "hybridkv",
        "number": "Table 0",
        "caption": "made up",
        "kind": "accuracy",
        "cell": {"model": MODEL},
        "rows": [{"method": "full"}],
        "columns": [
            {"dataset": "milebench_image_needle", "metric": "accuracy"},
            {"dataset": "milebench_text_needle", "metric": "accuracy"},
            {"label": "Avg", "mean": ["milebench_image_needle", "milebench_text_needle"]},
            {"group": "MileBench NH"},
        ],
    }
    spec = parse("made_up", told)
    one = stored(tmp_path, (("full", None, zeros_and_ones(93, N)), {}), name="one")
    two = stored(tmp_path, (("full", None, zeros_and_ones(31, N)), {"dataset": "milebench_text_needle"}), name="two")
    half = fill(spec, Evidence.of([one]))
    assert [text(cell) for cell in half.cells[2:]] == ["- part: 1 of 2 parts"] * 2
    whole = fill(spec, Evidence.of([one, two]))
    a, b, avg, group = (cell.measured for cell in whole.cells)
    assert avg.value == pytest.approx((a.value + b.value) / 2) == group.value
    adds = ("full", None, zeros_and_ones(93, N)), ("full", None, zeros_and_ones(31, N))
    together = stored(tmp_path, (adds[0], {}), (adds[1], {"dataset": "milebench_text_needle"}), name="together")
    joint = fill(spec, Evidence.of([together])).cells[2].measured
    assert (avg.low, avg.high) == (joint.low, joint.high), "two stores are one body of evidence"
    width = (((a.value - a.low) ** 2 + (b.value - b.low) ** 2) ** 0.5) / 2
    assert avg.value - avg.low > width, "both data sets ask about the same photographs"


def test_parts_of_a_mean_that_ask_about_the_same_photographs_are_not_independent():
    """Equal scores on equal clusters: the mean is as uncertain as either part; opposite ones cancel."""
    ids = np.array([str(n) for n in range(40)], dtype=object)
    at, values = np.arange(40), np.tile([0.0, 1.0, 1.0, 1.0], 10)
    one = Scores(at, at, values, ids=ids)
    part = Measurement("measured", value=75.0, low=60.0, high=85.0, scores=one)
    both = _correct_interval(mean([Mean(75.0, 60.0, 85.0)] * 2), [part, part])
    assert (both.low, both.high) == (pytest.approx(60.0), pytest.approx(85.0))
    other = replace(part, scores=Scores(at, at, 1 - values, ids=ids))
    none = _correct_interval(mean([Mean(75.0, 60.0, 85.0)] * 2), [part, other])
    assert (none.low, none.high) == (pytest.approx(75.0), pytest.approx(75.0))
    apart = replace(part, scores=Scores(at, at + 40, values, ids=ids))
    assert _correct_interval(mean([Mean(75.0, 60.0, 85.0)] * 2), [part, apart]).low == pytest.approx(75 - 15 / 2**0.5)


@pytest.mark.slow
def test_a_difference_of_two_methods_is_paired(tmp_path):
    n = 60
    length = {"dataset": "ocrbench", "metric": "ocrbench_accuracy", "model": "llava_v1_6_vicuna_7b"}
    length["generation"] = json.dumps({"max_new_tokens": 64})
    adds = [(("pyramidkv", 64, zeros_and_ones(20, n)), length)]
    adds += [(("mmshift_pyramidkv", 64, zeros_and_ones(50, n)), {**length, "seed": seed}) for seed in (0, 1)]
    found = page(stored(tmp_path, *adds), table="mmshift_table03")
    (one,) = [c for c in found.cells if c.cell.address.minus and c.measured.value is not None]
    assert one.measured.value == pytest.approx(50.0) and one.measured.low > 20.0
    assert text(one).startswith("part (seeds 2 missing): 50.0 / 11.6, +38.4 [")


@pytest.mark.slow
def test_a_difference_is_no_more_than_what_either_side_is(tmp_path, monkeypatch):
    """The base has 32 of 60 answers, answers of 16 tokens, or other data."""
    monkeypatch.setattr(evidence_reader, "samples_of", lambda dataset: 60)
    own = {"dataset": "ocrbench", "metric": "ocrbench_accuracy", "model": "llava_v1_6_vicuna_7b"}
    own["generation"] = json.dumps({"max_new_tokens": 64})
    ours = [(("mmshift_pyramidkv", 64, zeros_and_ones(30, 60)), {**own, "seed": seed}) for seed in (0, 1, 2)]
    said = []
    for number, (n, changed) in enumerate(
        (
            (60, {}),
            (32, {}),
            (60, {"generation": json.dumps({"max_new_tokens": 16})}),
            (60, {"dataset_fingerprint": "e" * 16}),
        )
    ):
        adds = [*ours, (("pyramidkv", 64, zeros_and_ones(20, n)), {**own, **changed})]
        found = page(stored(tmp_path, *adds, name=str(number)), table="mmshift_table03")
        (one,) = [one for one in found.cells if one.cell.address.minus and one.measured.rows and not one.cell.parts]
        said.append((one.measured.state, one.measured.n, one.measured.why))
    assert said == [
        ("measured", 60, ""),
        ("part", 32, "32 of 60"),
        ("not run", 0, "pyramidkv was run with other max_new_tokens"),
        ("not run", 0, "pyramidkv was run with other data"),
    ]


@pytest.mark.slow
def test_a_full_cache_of_another_table_of_the_paper_is_the_gate(tmp_path):
    """HybridKV's Table 6 prints no full; its Table 1 does, WebQA 76.5."""
    at = next(one.address for one in load("hybridkv_table06").cells if one.address.dataset == "milebench_webqa")
    ours = (("hybridkv", "0.1", zeros_and_ones(145, 200)), {"dataset": at.dataset, "given": at.method.changed})
    said = {}
    for name, right in (("none", 0), ("off", 140), ("on", 153)):
        adds = [ours, *([(("full", None, zeros_and_ones(right, 200)), {"dataset": at.dataset})] if right else [])]
        cells = page(stored(tmp_path, *adds, name=name), table="hybridkv_table06").cells
        (said[name],) = [str(one.verdict) for one in cells if one.cell.address == at]
    assert said["none"] == "not comparable: full not run"
    assert said["off"] == "not comparable: full differs from what is printed for it"
    assert said["on"] == "agrees"


def test_columns_of_answers_are_reduced(tmp_path):
    told = {"dataset": "ocrbench", "metric": "ocrbench_accuracy"}
    root = stored(tmp_path, (("full", None, zeros_and_ones(10, 20)), told))
    found = page(root, table="mmshift_table04")
    (one,) = [one for one in found.cells if one.measured.state == "part"]
    assert one.measured.value == 300.0 and one.verdict.word == "not comparable"  # every made-up prompt has 300 tokens


def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="no rows folder"):
        Evidence.of([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="has no result rows"):
        Evidence.of([tmp_path])
    root = stored(tmp_path, (("flashcache", "0.2", zeros_and_ones(93, N)), {"given": {"gamma": 0.1}}))
    (root / "store.json").write_text('{"schema_version": 99}\n')
    with pytest.raises(StoreError, match="99"):
        Evidence.of([root])


@pytest.mark.slow
def test_every_format_has_every_cell_and_none_is_blank(tmp_path):
    root = stored(tmp_path, (("flashcache", "0.2", zeros_and_ones(93, N)), {"given": {"gamma": 0.1}}))
    names = ("flashcache_table05", "prefixkv_table13", "prefixkv_fig04", "mmshift_table03")
    pages = [page(root, table=name) for name in names]
    shown = {form: render(pages, form) for form in ("md", "latex", "csv", "html")}
    for form in ("md", "latex", "html"):
        assert all(name in shown[form] or name.replace("_", r"\_") in shown[form] for name in names)
        assert "29.06" in shown[form] and "not run" in shown[form] and "cannot run" in shown[form]
    lines = list(csv.DictReader(io.StringIO(shown["csv"])))
    assert len(lines) == sum(len(one.cells) for one in pages)
    assert all(line["command"].startswith("mmkv-bench ") for line in lines if line["state"] == "not run")
    assert not any(cell.strip() == "" for line in shown["md"].splitlines() if line.startswith("| ")
                   for cell in line.strip("|").split("|")[1:])  # fmt: skip
