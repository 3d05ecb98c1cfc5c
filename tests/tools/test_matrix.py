"""The grid of families, datasets and methods: what it covers, and what it shows of holes."""

from __future__ import annotations

import json
import shutil

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.config.files import options
from mmkv_bench.datasets import fixtures
from mmkv_bench.families.facts import model_facts
from mmkv_bench.models.source import Source, shaped
from tests.families.shapes import node
from tools.matrix.__main__ import FAMILIES, LARGE, datasets, main
from tools.matrix.grid import ALL, UNRUN, Line, as_csv, merged, read, render, write
from tools.matrix.running import run_model

LINES = [
    Line("a", "docvqa", "full", "ok"),
    Line("a", "docvqa", "snapkv", "ok", "", "window_reduced"),
    Line("a", "docvqa", "sparsemm", "refused", "no calibration"),
    Line("b", "docvqa", "full", "ok"),
    Line("b", "docvqa", "snapkv", "oom", "out of memory"),
    Line("b", "docvqa", "sparsemm", "refused", "no calibration"),
]


def grid(lines: list[Line]) -> dict[str, list[str]]:
    rows = [line for line in render(lines).splitlines() if line.startswith("| ")][1:]
    return {cells[0]: cells[1:] for row in rows if (cells := [cell.strip() for cell in row.strip("|").split("|")])}


@pytest.mark.slow
def test_every_registered_method_is_in_the_grid():
    config = compose(["experiment=matrix", "dataset=pages_walk"])
    assert set(config.methods) == set(options("method")) - {"cut_prompt"}  # of prompts without pictures


def test_every_dataset_with_a_fixture_is_in_the_grid_and_every_drawn_page():
    others = set(options("dataset")) - set(datasets())
    assert set(fixtures.names()) & set(options("dataset")) <= set(datasets())
    of_one_model = ("documentation", "english_", "lengths_", "questions_", "reader_", "stream_", "pages_questions")
    assert {name for name in others if not name.startswith(of_one_model)} == {"pages", "lmms_eval"}


@pytest.mark.full
def test_every_family_with_a_shape_has_a_model_in_the_grid():
    def family(name: str) -> tuple[str, str]:
        config = Source.of(node(name, weights="random", layers=1)).hf_config
        return model_facts(config).name, config.get_text_config(decoder=True).model_type

    assert {family(name) for name in shaped()} == {family(name) for name in (*FAMILIES, *LARGE)}


@pytest.mark.full
def test_smolvlm_answers_a_page_with_every_method_under_two_protocols(tmp_path):
    lines = run_model("smolvlm_256m", ["docvqa"], tmp_path, "float32")
    assert len(lines) > 30 and {line.result for line in lines} <= {"ok", "refused"}
    assert {line.method for line in lines if line.result == "refused"} <= {"kvpress", "snapkv_kvpress"}  # an extra


def test_a_cell_counts_what_is_ok_and_names_a_reason_by_its_letter():
    assert grid(LINES)["docvqa"] == ["2 ok a", "1 ok b a"]
    text = render(LINES)
    assert "- **a** refused: no calibration (sparsemm)" in text
    assert "- **b** oom: out of memory (snapkv)" in text


def test_what_was_not_run_is_shown_with_that_reason(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([vars(line) for line in LINES[:3]]))
    lines = read(tmp_path, ["a", "b"], ["docvqa", "needle"])
    assert grid(lines) == {"docvqa": ["2 ok a", "b"], "needle": ["b", "b"]}
    assert "- **b** not run: no run of it is recorded yet" in render(lines)


def test_a_hole_without_a_reason_is_a_failure(tmp_path, capsys):
    words = ["--render", "--out", str(tmp_path), "--datasets", "docvqa", "--models", "a"]
    (tmp_path / "a.json").write_text(json.dumps([vars(line) for line in LINES[:3]]))
    assert main(words) == 0
    (tmp_path / "b.json").write_text(json.dumps([vars(Line("b", "docvqa", "full", "missing"))]))
    assert main([*words, "b"]) == 1
    assert "missing, **without a reason**" in capsys.readouterr().out


def test_the_file_has_one_line_per_cell():
    lines = as_csv(LINES).splitlines()
    assert lines[0] == "model,dataset,method,result,reason,fallbacks,git_commit,dtype"
    assert lines[3] == "a,docvqa,sparsemm,refused,no calibration,,," and len(lines) == 1 + len(LINES)


def test_what_was_run_takes_its_place_in_the_grid_and_all_else_stays(tmp_path):
    grid_file = tmp_path / "grid.csv"
    grid_file.write_text(as_csv(LINES))
    anew = [Line("a", "docvqa", "full", "ok", git_commit="abc"), Line("a", "docvqa", "snapkv", "ok", git_commit="abc")]
    write(tmp_path / "a.json", anew)
    run = read(tmp_path, ["a", "b"], ["docvqa"])
    assert run == [*anew, Line("b", "docvqa", ALL, "not run", UNRUN)]
    assert merged(run, grid_file, ["a", "b"], ["docvqa"]) == anew + LINES[3:]
    assert merged([], grid_file, ["c"], ["docvqa"]) == [Line("c", "docvqa", ALL, "not run", UNRUN)]


def test_a_model_run_on_more_datasets_keeps_those_it_had(tmp_path):
    write(tmp_path / "a.json", LINES[:3])
    write(tmp_path / "a.json", [Line("a", "needle", "full", "ok")])
    write(tmp_path / "a.json", LINES[:2])
    assert read(tmp_path, ["a"], ["docvqa", "needle"]) == [*LINES[:2], Line("a", "needle", "full", "ok")]


def test_writing_one_model_keeps_the_others_in_the_written_grid(tmp_path, capsys):
    folder = tmp_path / "grid"
    folder.mkdir()
    there = Line(FAMILIES[0], datasets()[0], "full", "ok", git_commit="abc")
    (folder / "grid.csv").write_text(as_csv([there]))
    new = Line(FAMILIES[1], datasets()[1], "full", "ok", git_commit="def")
    write(tmp_path / f"{FAMILIES[1]}.json", [new])
    words = ["--models", FAMILIES[1], "--datasets", datasets()[1]]
    assert main(["--render", "--out", str(tmp_path), "--write", str(folder), *words]) == 0
    lines = (folder / "grid.csv").read_text().splitlines()
    assert f"{there.model},{there.dataset},full,ok,,,abc," in lines
    assert f"{new.model},{new.dataset},full,ok,,,def," in lines
    assert len(lines) == 1 + 2 * len(datasets()), "a model without any run has no column"
    write(tmp_path / f"{FAMILIES[2]}.json", [Line(FAMILIES[2], datasets()[0], "full", "ok", git_commit="old")])
    assert main(["--render", "--out", str(tmp_path), "--write", str(folder), *words]) == 0
    assert (folder / "grid.csv").read_text().splitlines() == lines, "rows of models that were not asked for stay out"


def test_a_model_whose_process_fails_and_one_that_is_not_in_the_grid_are_told(tmp_path, capsys, monkeypatch):
    import tools.matrix.__main__ as command

    assert main(["--models", "qwen2_vl_7bb", "--out", str(tmp_path), "--write", str(tmp_path / "grid")]) == 2
    assert "did you mean 'qwen2_vl_7b'" in capsys.readouterr().err
    words = ["--models", FAMILIES[0], "--datasets", "reader_value", "--out", str(tmp_path)]
    assert main([*words, "--write", str(tmp_path / "grid")]) == 2
    assert "reader_value is not in the grid" in capsys.readouterr().err and not (tmp_path / "grid").exists()
    monkeypatch.setattr(command, "_start", lambda model, asked: 134)
    words = ["--models", FAMILIES[0], "--datasets", datasets()[0]]
    assert main([*words, "--out", str(tmp_path), "--write", str(tmp_path / "grid")]) == 1


@pytest.mark.full
def test_a_dataset_that_stops_among_others_has_its_own_reason(tmp_path, monkeypatch):
    from mmkv_bench.datasets import fixtures
    from tests.run.test_broken_data import emptied
    from tools.matrix import running

    (tmp_path / "data").mkdir()
    for name in ("docvqa", "ocrbench"):
        shutil.copytree(fixtures.folder(name), tmp_path / "data" / name)
    emptied(tmp_path / "data", "docvqa", "answers", row=0)
    base = ["model=tiny", "method=[full]", "limit=1", f"data.root={tmp_path / 'data'}", f"out={tmp_path / 'rows'}"]
    monkeypatch.setattr(running, "_rows", lambda store, part: {"full": [] if "docvqa" in part.dataset else [{}]})
    found = running._run(base, ["docvqa", "ocrbench"], ["full"])
    assert found["ocrbench"] == {"full": [{}]}
    result, reason = found["docvqa"]
    assert result == "refused" and "docvqa-000000" in reason
