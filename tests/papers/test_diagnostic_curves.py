"""Promise: rows of `mmkv-bench diagnose` stand where figures have them, by address, and none of a stand-in does."""

from __future__ import annotations

import csv
import io
import json
import shlex
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pytest

from mmkv_bench.cli.grammar import reader
from mmkv_bench.methods.node import flat_parameters, read
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.figure import pictures
from mmkv_bench.papers.judgement import fill
from mmkv_bench.papers.layout import load, table_ids
from mmkv_bench.papers.non_score_metrics import DIAGNOSTICS
from mmkv_bench.papers.table import render
from mmkv_bench.store.files import canonical_json, checksum
from mmkv_bench.store.store import Store
from tests.papers.words import notes, text

LAYERS = 3
FIGURES = [name for name in table_ids() if any(c.address.metric in DIAGNOSTICS for c in load(name).cells)]


def snapkv(budget: str = "64", **changed):
    """A method as rows tell it."""
    own = flat_parameters(read("snapkv")) | changed
    return {"base": "snapkv", "reading": "paper", "parameters": own, "budget_kind": "entries", "budget": budget}


def stored(root, name, numbers, *, method=None, samples=("a", "b"), torch="2.8", **changed):
    """Adds a measurement. numbers: (quantity, part, head, x, function of sample's and layer's number -> value)."""
    told = {"model": "qwen2_5_vl_7b", "dataset": "ocrbench", "weights": "hub", "tokens": 64, "frames": None} | changed
    settings = {"weights": told["weights"], "tokens": told["tokens"], "processor": {}, "attention": "sdpa"}
    settings["processor"] = {"frames": told["frames"]} if told["frames"] else {}
    settings |= {"method": method} if method else {}
    own = {
        "name": name,
        "model": told["model"],
        "model_fingerprint": "f" * 16,
        "dtype": "bfloat16",
        "dataset": told["dataset"],
        "dataset_fingerprint": "d" * 16,
        "settings": json.dumps(settings),
        "versions": json.dumps({"torch": torch}),
    }
    own["measurement"] = checksum(canonical_json(own).encode())
    for place, sample in enumerate(samples):
        lines = [
            {"layer": layer, "head": head, "quantity": quantity, "part": part, "x": x, "value": value(place, layer)}
            for layer in range(LAYERS)
            for quantity, part, head, x, value in numbers
        ]
        Store(root).write_diagnostics(pa.Table.from_pylist([line | own | {"sample_id": sample} for line in lines]))
    return root


def cell(root, table, **wanted):
    """The one cell of a table whose address has these."""
    page = fill(load(table), Evidence.of([root]))
    found = [one for one in page.cells if all(getattr(one.cell.address, key) == value for key, value in wanted.items())]
    assert len(found) == 1
    return page, found[0]


def coverage(value):
    return [("attention_coverage", "renamed@64", None, None, value)]


@pytest.mark.slow
def test_a_figures_lines_are_means_over_samples_with_every_layer_beside(tmp_path):
    lines = [("mean", "prompt"), ("std", "prompt"), ("mean", "answer"), ("std", "answer")]
    numbers = [(q, p, None, None, lambda s, layer, at=at: at + s + layer / 8) for at, (q, p) in enumerate(lines)]
    stored(tmp_path, "hidden_states", numbers)
    page, one = cell(tmp_path, "mmshift_fig01", metric="hidden_mean_std")
    assert one.measured.state == "part" and one.measured.why == "2 of 1,000" and one.verdict is None
    for at, curve in enumerate(one.measured.curves):
        assert curve.layers == pytest.approx([at + 0.5 + layer / 8 for layer in range(LAYERS)])
        assert curve.value == pytest.approx(fmean(curve.layers)) and curve.low <= curve.value <= curve.high
    assert "prompt mean 0.6 [" in text(one) and "answer std 3.6 [" in text(one)
    assert "by layer, FullKV a: hidden states answer std: 3.5 3.62 3.75." in notes(page)
    assert "diagnostics made with torch 2.8, bfloat16." in notes(page)
    (line,) = [line for line in csv.DictReader(io.StringIO(render([page], "csv"))) if line["layers"]]
    assert line["layers"].startswith("prompt mean 0.5 0.625 0.75; prompt std 1.5") and line["value"] == "0.625"
    folder, name = line["source"].split()
    assert {*Store(Path(folder)).diagnostics()["measurement"].to_pylist()} == {name}
    assert [*pictures(page)] == [".hidden_states"], "the analysis that has no rows is not drawn"


@pytest.mark.slow
def test_points_and_stretches_of_curves_are_those_of_the_address(tmp_path):
    bands = [(i + 0.5) / 128 for i in range(128)]
    stored(tmp_path, "power_spectrum", [("power", part, None, x, lambda s, layer, x=x: 1 / 128)
                                        for part in ("keys", "values") for x in bands],
           dataset="milebench_gpr1200")  # fmt: skip
    _, one = cell(tmp_path, "flashcache_fig07", dataset="milebench_gpr1200")
    assert [curve.value for curve in one.measured.curves] == pytest.approx([1 / 8, 1 / 8])
    hits = [("outlier_hit_rate", "", None, x, lambda s, layer, x=x: x / 20) for x in (1.0, 10.0)]
    stored(tmp_path, "outlier_hits", hits)
    page, _ = cell(tmp_path, "flashcache_fig07", dataset="milebench_gpr1200")
    page = fill(load("mmshift_table14"), Evidence.of([tmp_path]))
    told = {one.cell.address.method.setting("gamma"): one for one in page.cells if one.measured.curves}
    assert {gamma: one.measured.value for gamma, one in told.items()} == pytest.approx({1.0: 5.0, 10.0: 50.0})
    assert all(one.verdict.word == "not comparable" and one.number_pair for one in told.values())
    at = [(head, x) for head in (0, 1) for x in (0.2, 0.5)]
    masses = [("top_mass", "", head, x, lambda s, layer, x=x, head=head: x * (1 + head)) for head, x in at]
    stored(tmp_path, "cumulative_attention", masses, dataset="vatex", frames=64, tokens=None)
    _, one = cell(tmp_path, "hybridkv_fig03", dataset="vatex")
    assert one.measured.value == pytest.approx(0.3) and not one.measured.mismatches


def test_methods_match_by_parameters_and_budget_whatever_they_are_called(tmp_path):
    at = {"metric": "attention_coverage", "budget": "64"}

    def of(root):
        page = fill(load("mmshift_fig01"), Evidence.of([root]))
        return {
            (one.cell.address.method.name, one.cell.address.budget): one.measured
            for one in page.cells
            if one.cell.address.metric == at["metric"] and one.measured.value is not None
        }

    stored(tmp_path, "coverage", coverage(lambda s, layer: 0.5), method=snapkv())
    stored(tmp_path, "coverage", coverage(lambda s, layer: 0.9), method=snapkv("128", window=8))
    stored(tmp_path, "coverage", [("attention_coverage", "full", None, None, lambda s, layer: 0.75)])
    found = of(tmp_path)
    assert {key: one.value for key, one in found.items()} == {("snapkv", "64"): 0.5, ("full", ""): 0.75}
    again = stored(tmp_path / "again", "coverage", coverage(lambda s, layer: 0.5), method=snapkv(), torch="2.9")
    page = fill(load("mmshift_fig01"), Evidence.of([tmp_path, again]))
    (unclear,) = [one for one in page.cells if one.measured.state == "ambiguous"]
    assert "2.8" in unclear.measured.why and "2.9" in unclear.measured.why and unclear.measured.value is None


def test_other_conditions_are_marked_and_stand_ins_are_no_evidence(tmp_path):
    full = [("attention_coverage", "full", None, None, lambda s, layer: 0.5)]
    stored(tmp_path / "short", "coverage", full, tokens=16)
    _, one = cell(tmp_path / "short", "mmshift_fig01", metric="attention_coverage", budget_kind="none")
    assert one.measured.mismatches == ("max_new_tokens 16, the figure has 64",) and text(one).endswith("*")
    for number, changed in enumerate(({"weights": "random"}, {"model": "tiny"}, {"dataset": "ocrbench_fixture"})):
        root = stored(tmp_path / str(number), "coverage", full, **changed)
        _, one = cell(root, "mmshift_fig01", metric="attention_coverage", budget_kind="none")
        assert one.measured.state == "not run" and one.measured.value is None


def test_no_cell_of_a_figure_is_blank_and_each_names_the_command_that_measures_it():
    named_and_whole(["mmshift_fig01", "prefixkv_fig06"])


@pytest.mark.full
def test_no_cell_of_any_figure_is_blank_and_each_names_the_command_that_measures_it():
    assert len(FIGURES) >= 17
    named_and_whole(FIGURES)


def named_and_whole(names):
    pages = [fill(load(name), Evidence.of([])) for name in names]
    lines = [line for line in csv.DictReader(io.StringIO(render(pages, "csv"))) if line["metric"] in DIAGNOSTICS]
    assert {line["state"] for line in lines} == {"not run", "cannot run"}
    for line in lines:
        assert line["state"] == "cannot run" or line["command"].startswith("mmkv-bench diagnose ")
    parse = reader("diagnose")[1].read
    for command in {line["command"] for line in lines if line["state"] == "not run"}:
        assert parse(shlex.split(command)[2:]).name in {one.name for one in DIAGNOSTICS.values()}
    assert all("mmkv-bench diagnose" in " ".join(notes(page)) for page in pages if page.states["not run"])
    (shown,) = [notes(page) for page in pages if page.layout.id == "mmshift_fig01"]
    together = next(line for line in shown[0].split("`") if "coverage" in line)
    assert "'method=[streamingllm,expected_attention,snapkv,keydiff,mmshift]' 'budget=[64,128,256,512]'" in together
    assert shown[0].count("diagnose coverage") == 1, "one prefill of a sample serves all of them"
