"""Pictures of scores, read back from their artists and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmkv_bench.api.pictures import PlotRequest, draw
from mmkv_bench.errors import ConfigError
from mmkv_bench.tables import figure as figures
from mmkv_bench.tables.build import build
from mmkv_bench.tables.figure import accuracy_figure, position_figure, save
from tests.cli.setting import verb
from tests.tables.examples import Example, sample_rows, zeros_and_ones

main = verb("plot")


def example(reading: str = "paper", **answer) -> Example:
    made = Example()
    for dataset, gain in (("pages_walk", 0), ("pages_lookup", 3)):
        made.add("full", None, zeros_and_ones(19, 20), dataset=dataset)
        for budget, right in ((64, 4), (32, 1), (128, 15)):
            made.add(
                "snapkv", budget, zeros_and_ones(right + gain, 20), dataset=dataset, reading=reading, answer=answer
            )
            made.add("random", budget, zeros_and_ones(gain, 20), dataset=dataset, reading=reading)
    return made


def panels(figure):
    return {axes.get_title(): axes for axes in figure.axes}


def test_each_dataset_has_a_panel_with_a_line_per_method_over_a_log2_budget_axis() -> None:
    drawn = panels(accuracy_figure(build(example().rows())))
    assert set(drawn) == {"pages_lookup", "pages_walk"}
    axes = drawn["pages_walk"]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert set(lines) == {"full (no budget)", "random", "snapkv"}
    np.testing.assert_array_equal(lines["snapkv"].get_xdata(), [32, 64, 128])
    np.testing.assert_array_equal(lines["snapkv"].get_ydata(), [1 / 20, 4 / 20, 15 / 20])
    assert lines["full (no budget)"].get_linestyle() == "--"
    assert set(lines["full (no budget)"].get_ydata()) == {19 / 20}
    transform = axes.xaxis.get_transform()
    assert transform.base == 2
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["32", "64", "128"]
    assert axes.get_xlabel() == "entries kept per KV head"


def test_bands_are_the_intervals_of_the_table() -> None:
    tables = build(example().rows(), datasets=["pages_walk"])
    (axes,) = accuracy_figure(tables).axes
    (band,) = [b for b in axes.collections if b.get_paths()[0].vertices[:, 1].max() > 0.5]
    entries = [tables[0].entry("snapkv", budget) for budget in ("32", "64", "128")]
    ends = {round(end, 9) for entry in entries for end in (entry.low, entry.high)}
    assert {round(y, 9) for y in band.get_paths()[0].vertices[:, 1]} == ends


def test_a_method_looks_the_same_in_every_panel_and_methods_differ_in_colour_and_shape() -> None:
    drawn = panels(accuracy_figure(build(example().rows())))
    looks = [
        {line.get_label(): (line.get_color(), line.get_marker()) for line in axes.get_lines()}
        for axes in drawn.values()
    ]
    assert looks[0] == looks[1]
    assert len(set(looks[0].values())) == len(looks[0])


def test_lines_over_their_budget_are_marked() -> None:
    figure = accuracy_figure(build(example("released", entries_resident=5000).rows()))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["full (no budget)", "random", "snapkv †"]
    assert "† more entries resident than the budget" in figure.get_suptitle().replace("\n", " ")
    assert "reading=released" in figure.get_suptitle()


def test_fidelity_stands_at_the_end_of_its_stretch_of_a_continuation() -> None:
    made = Example()
    for budget in (64, 32):
        cell = made.add("snapkv", budget, zeros_and_ones(4, 20))
        for end in (32, 64):
            made.samples += sample_rows(cell, [budget / end] * 20, metric=f"fidelity_kl_to_{end}")
    names = ["fidelity_kl_to_32", "fidelity_kl_to_64"]
    drawn = position_figure([build(made.rows(), metrics=[name])[0] for name in names], "fidelity_kl")
    points = [[tuple(point) for point in axes.get_lines()[0].get_xydata()] for axes in drawn.axes]
    assert points == [[(32, 1.0), (64, 0.5)], [(32, 2.0), (64, 1.0)]]
    assert drawn.axes[1].get_title().endswith("64") and drawn.axes[0].get_ylabel() == "fidelity kl"
    with pytest.raises(ConfigError, match="got --metric ppl; give one of the two"):
        draw(PlotRequest("position", Path("rows"), metric="ppl"))


def test_a_cell_without_a_headline_is_not_drawn_but_refused() -> None:
    made = example()
    made.add("keydiff", 64, [None, 1.0], dataset="pages_walk")
    with pytest.raises(ConfigError, match="pages_walk: keydiff is ok on 1 of 2 samples"):
        accuracy_figure(build(made.rows()))


def test_budgets_of_two_kinds_or_none_are_refused() -> None:
    made = example()
    made.add("snapkv", "0.2", [1.0, 0], dataset="pages_walk")
    with pytest.raises(ConfigError, match="cannot share a figure"):
        accuracy_figure(build(made.rows()))
    alone = Example()
    alone.add("full", None, [1.0, 0])
    with pytest.raises(ConfigError, match="no cell with a budget"):
        accuracy_figure(build(alone.rows()))


@pytest.mark.slow
def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    tables = build(example().rows())
    first = save(accuracy_figure(tables), tmp_path / "one" / "figure")
    second = save(accuracy_figure(tables), tmp_path / "two" / "figure")
    assert [path.name for path in first] == ["figure.png", "figure.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.slow
def test_the_verb_draws_one_table_of_each_dataset_and_says_what_it_needs(tmp_path: Path, capsys) -> None:
    made = example()
    made.add("snapkv", "0.2", [1.0, 0], dataset="pages_walk")  # not of the kind that is drawn
    argv = ["budget", str(made.write(tmp_path / "rows")), "--out", str(tmp_path / "figure")]
    assert main([*argv, "--budgets", "entries"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "figure.png"), str(tmp_path / "figure.svg")]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert main(argv) == 2
    assert "2 tables of pages_walk" in capsys.readouterr().err
    assert main([*argv, "--dataset", "pages_chain"]) == 2
    assert "no dataset 'pages_chain'" in capsys.readouterr().err
    assert main([*argv, "--dataset", "pages_lookup", "--budgets", "fraction"]) == 2
    assert "no table of scores with a budget" in capsys.readouterr().err


@pytest.mark.slow
def test_the_verb_draws_the_lines_and_budgets_that_are_named(tmp_path: Path, capsys, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(figures, "accuracy_figure", drawn.append)
    monkeypatch.setattr(figures, "save", lambda *_: [])
    argv = ["budget", str(example().write(tmp_path / "rows")), "--out", str(tmp_path / "figure")]
    assert main([*argv, "--methods", "full,snapkv", "--budgets", "entries,128", "--budgets", "32"]) == 0
    assert [[line.label for line in table.methods] for table in drawn[0]] == [["full", "snapkv"]] * 2
    assert [table.budgets for table in drawn[0]] == [("32", "128")] * 2
    assert {budget for table in drawn[0] for _, budget in table.entries} == {"", "32", "128"}
    for words, sentence in (
        (["--methods", "snapkw"], "no method 'snapkw': did you mean 'snapkv'?"),
        (["--budgets", "65"], "no budget '65'"),
    ):
        assert main([*argv, *words]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["length", *argv[1:], "--methods", "snapkv"]) == 2
    assert "--methods snapkv selects scores, but plot length draws no scores" in capsys.readouterr().err


@pytest.mark.slow
def test_a_line_has_the_name_that_is_given_and_a_line_that_is_not_there_is_refused(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    saved = []
    monkeypatch.setattr(figures, "save", lambda figure, stem: saved.append(figure) or [])
    argv = ["budget", str(example().write(tmp_path / "rows")), "--out", str(tmp_path / "figure")]
    assert main([*argv, "--name", "snapkv=Ours"]) == 0
    texts = {text.get_text() for legend in saved[0].legends for text in legend.get_texts()}
    assert "Ours" in texts and not any(text.startswith("snapkv") for text in texts)
    for words, sentence in (
        ("snapkw=Ours", "no such line; did you mean 'snapkv'?"),
        ("snapkv", "write --name <line>=<name>"),
    ):
        assert main([*argv, "--name", words]) == 2
        assert sentence in capsys.readouterr().err
