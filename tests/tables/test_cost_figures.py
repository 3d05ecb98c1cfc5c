"""Pictures of costs, read back from their artists; what cannot be drawn is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmkv_bench.errors import ConfigError
from mmkv_bench.tables.build import build
from mmkv_bench.tables.cost_figures import front_figure, fronts, length_figure
from mmkv_bench.tables.cost_rows import KNOWN, split_costs
from mmkv_bench.tables.costs import cost_tables, roofline_inputs, set_limits
from mmkv_bench.tables.stored_rows import load
from tests.cli.setting import verb
from tests.tables.examples import Example, zeros_and_ones
from tests.tables.test_costs import STEPS, OneByte, timed

main = verb("plot")
N = 20


def scored(root: Path) -> Path:
    """Scores of two methods at two budgets, made beside each other: bytes of their own, times of a group."""
    made = Example()
    for method, budget, right, held in (
        ("full", None, 19, 1000),
        ("snapkv", "0.1", 12, 100),
        ("snapkv", "0.2", 15, 200),
        ("keydiff", "0.1", 9, 120),
        ("keydiff", "0.2", 16, 220),
    ):
        made.add(method, budget, zeros_and_ones(right, N), answer={"bytes_held": held, "tpot_s": 0.5})
    return made.write(root)


def test_a_line_per_method_runs_through_the_medians_at_every_length(tmp_path):
    costs = [KNOWN["tpot_s"]]
    tables = cost_tables(timed(tmp_path, STEPS), (), beside=[*costs, *roofline_inputs(costs)])
    figure = length_figure(set_limits(tables, costs, lambda context: OneByte()), KNOWN["tpot_s"])
    (axes,) = (panel for panel in figure.axes if panel.get_visible())
    lines = {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
    assert set(lines) == {"full", "snapkv, 0.1", "roofline, in the line's colour"}
    np.testing.assert_allclose(lines["snapkv, 0.1"].get_xydata(), [[32, 100], [64, 100]])
    np.testing.assert_allclose(lines["full"].get_xydata(), [[32, 200], [64, 300]])
    np.testing.assert_allclose(lines["roofline, in the line's colour"].get_xydata(), [[32, 64], [64, 128]])
    assert axes.get_ylabel() == "ms/token" and axes.get_xaxis().get_transform().base == 2
    assert [text.get_text() for text in axes.get_xticklabels()] == ["32", "64"]


def test_intervals_of_many_lines_are_bars_beside_each_other(tmp_path):
    methods = ("full", "snapkv", "keydiff", "mmshift", "h2o")
    steps = {(method, tokens): STEPS["full", 64] for method in methods for tokens in (32, 64)}
    figure = length_figure(cost_tables(timed(tmp_path, steps), [KNOWN["tpot_s"]]), KNOWN["tpot_s"])
    bars = [one for one in figure.axes[0].collections if hasattr(one, "get_segments")]
    assert len(bars) == len(figure.axes[0].collections) == len(methods)
    at = [segment[0][0] for one in bars for segment in one.get_segments() if segment[0][0] < 40]
    assert len(set(at)) == len(methods) and max(at) / min(at) < 1.1
    said = figure.get_suptitle().replace("\n", " ")
    assert "disturbed: clock held down, other work on the machine" in said and "device=" in said


def test_what_failed_has_no_point_and_is_named(tmp_path):
    tables = cost_tables(timed(tmp_path, STEPS, ("snapkv", 64)), [KNOWN["tpot_s"]])
    figure = length_figure(tables, KNOWN["tpot_s"])
    (line,) = (line for line in figure.axes[0].get_lines() if line.get_label() == "snapkv, 0.1")
    assert line.get_xdata().tolist() == [32]
    assert "no point: snapkv 0.1 at 64 x 2: oom" in figure.get_suptitle().replace("\n", " ")


@pytest.mark.slow
def test_scores_and_costs_of_two_stores_are_joined_by_what_the_cells_are(tmp_path):
    score, speed = scored(tmp_path / "score"), timed(tmp_path / "speed", STEPS)
    bytes_front, time_front = fronts(build(load(score)), split_costs(["bytes", "tpot_s"])[1], [score, speed], tokens=64)
    points = {(point.method.label, point.budget): point for point in bytes_front.points}
    assert {key: (point.x, point.y) for key, point in points.items()} == {
        ("full", ""): (1000, 0.95),
        ("snapkv", "0.1"): (100, 0.6),
        ("snapkv", "0.2"): (200, 0.75),
        ("keydiff", "0.1"): (120, 0.45),
        ("keydiff", "0.2"): (220, 0.8),
    }
    assert {key for key, point in points.items() if not point.best} == {("keydiff", "0.1")}
    assert [(point.method.label, point.x) for point in time_front.points] == [("snapkv", 0.1), ("full", 0.3)]
    assert time_front.alone == ("keydiff at 0.1", "keydiff at 0.2", "snapkv at 0.2")
    assert time_front.source == "passes of 64 prompt tokens, batch 2, medians of 3 repeats"
    assert any(point.cost.low is not None for point in time_front.points)
    words = front_figure([bytes_front, time_front]).get_suptitle().replace("\n", " ")
    assert "medians of 3 repeats" in words and "disturbed: clock held down" in words and not bytes_front.disturbed


@pytest.mark.slow
def test_points_are_drawn_one_a_cell_with_the_front_through_the_best(tmp_path):
    score, speed = scored(tmp_path / "score"), timed(tmp_path / "speed", STEPS)
    figure = front_figure(fronts(build(load(score)), split_costs(["bytes", "tpot_s"])[1], [score, speed], tokens=64))
    left, right = figure.axes
    (front,) = (line for line in left.get_lines() if line.get_label() == "Pareto front")
    np.testing.assert_allclose(front.get_xydata(), [[100, 0.6], [200, 0.75], [220, 0.8], [1000, 0.95]])
    drawn = {
        line.get_label(): line.get_xydata().tolist() for line in left.get_lines() if line.get_linestyle() == "None"
    }
    assert drawn == {"full": [[1000, 0.95]], "keydiff": [[120, 0.45], [220, 0.8]], "snapkv": [[100, 0.6], [200, 0.75]]}
    assert left.get_xlabel() == "bytes that the cache holds [B]" and right.get_xlabel() == "time per token [ms]"


@pytest.mark.full
def test_the_verb_draws_each_kind_and_says_what_is_missing(tmp_path, capsys):
    score, speed, out = scored(tmp_path / "score"), timed(tmp_path / "speed", STEPS), tmp_path / "figures" / "one"
    for words in (["budget", score], ["length", speed], ["front", score, "--costs", speed, "--tokens", 64]):
        assert main([*map(str, words), "--out", str(out)]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[:2] == [f"{out}.png", f"{out}.svg"]
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert ("not drawn against tpot_s" in " ".join(said[2:])) == (words[0] == "front")
    assert "prompt_tokens 32, 64; choose one with --tokens 64" in refusal_of(capsys, "front", score, "--costs", speed)
    assert "No cell of walk3 has tpot_s" in refusal_of(capsys, "front", score)
    assert "no tpot_s by prompt length" in refusal_of(capsys, "length", score)
    assert "did you mean" in refusal_of(capsys, "length", speed, "--cost", "tpott_s")


def refusal_of(capsys, *words: object) -> str:
    assert main([*map(str, words), "--out", "never"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and not Path("never.png").exists()
    return err


def test_passes_of_several_batches_are_not_mixed(tmp_path):
    score, speed = scored(tmp_path / "score"), timed(tmp_path / "speed", STEPS)
    with pytest.raises(ConfigError, match="--batch 3: the passes have batch 2"):
        fronts(build(load(score)), split_costs(["tpot_s"])[1], [speed], tokens=64, batch=3)


def test_panels_of_two_kinds_of_budgets_have_titles_and_lines_of_their_own(tmp_path):
    whole = cost_tables(timed(tmp_path, STEPS), [KNOWN["tpot_s"]])
    entries = [
        replace(table, axis="entries", entries={(name, b and "64"): own for (name, b), own in table.entries.items()})
        for table in whole
    ]
    figure = length_figure([*whole, *entries], KNOWN["tpot_s"])
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert len(set(titles)) == 2 and titles[1].endswith("batch 2, budgets in entries")
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines.values()}
    assert {"snapkv, 64", "snapkv, 0.1", "full"} == set(lines) and len(looks) == 3
