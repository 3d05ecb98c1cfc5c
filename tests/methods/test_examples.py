"""Promises: every file of `examples/` and every skeleton of `mmkv-bench new` keeps what a built-in method promises, and does
what its words say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmkv_bench.cli.main import main
from mmkv_bench.config.method_parts import FOLDERS
from mmkv_bench.methods import invariants, toy_layers
from mmkv_bench.methods.build import method
from mmkv_bench.methods.method_file import load
from tests.each import each
from tests.run.setting import done, responses

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
PROBLEM = toy_layers.problem((17, 2, 2), 6)


def every_file(folder: Path) -> list[Path]:
    written = [folder / f"my_{part}.py" for part in FOLDERS]
    for part, file in zip(FOLDERS, written, strict=True):
        assert main(["new", str(file), "--part", part]) == 0
    return [*EXAMPLES, *written]


def broken(file: Path, checks, **given) -> list[str]:
    made = invariants.method(str(file))
    return [f"{file.name}: {check.__name__}: {said}" for check in checks if (said := check(made, **given)) is not None]


def test_every_example_and_every_skeleton_keeps_the_promises_of_its_parts(tmp_path):
    for file in every_file(tmp_path):
        assert broken(file, invariants.CHECKS[:7], problems=[PROBLEM]) == []
    parts = {part: getattr(method(str(tmp_path / f"my_{part}.py")), part) for part in FOLDERS}
    assert {type(part).__name__[:2] for part in parts.values()} == {"My"}, "each brings its own part, named by the file"
    assert {role for file in EXAMPLES for role in load(str(file)).classes} >= {
        "scorer",
        "allocator",
        "reducer",
        "decoding",
    }


@pytest.mark.full
def test_every_example_and_every_skeleton_passes_the_whole_check(tmp_path, capsys):
    for file in every_file(tmp_path):
        assert main(["check", str(file)]) == 0, capsys.readouterr().out


@pytest.mark.full
def test_all_examples_run_side_by_side(tmp_path):
    names = ",".join(map(str, EXAMPLES))
    done(tmp_path, f"method=[{names}]", "budget=24", "limit=2", "dataset=pages_lookup", "baseline=none")
    rows = responses(tmp_path)
    assert len({cell for cell, _ in rows}) == len(EXAMPLES)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert all(row["entries_resident"] == row["entries_asked"] for row in rows.values())


# ---------------------------------------------------------------- what each example says of itself


def example(name: str):
    return method(str(EXAMPLES[0].parent / f"{name}.py"))


def test_tilted_takes_from_late_layers_what_it_gives_to_early_ones():
    allocator = example("tilted").allocator
    caps = [allocator.cap(layer, 10, 100, 5) for layer in range(5)]
    assert caps == [15, 15, 10, 5, 5]
    assert [allocator.cap(layer, 10, 12, 4) for layer in range(4)] == [11, 11, 9, 9], "no head above the prompt"


def test_sharp_heads_gives_more_to_a_head_whose_scores_are_spread():
    flat, peaked = torch.full((40,), 1 / 40), torch.eye(40)[3]
    first, second = example("sharp_heads").allocator.divided(torch.stack([flat, peaked]), 10).tolist()
    assert first + second == 20 and second >= 5 and first == 15


def test_the_mean_of_a_run_is_the_mean_over_it(tmp_path):
    reducer, draw = example("runs_mean").reducer, torch.Generator().manual_seed(0)
    key, value = (torch.randn(2, 9, 3, generator=draw) for _ in range(2))
    index = torch.tensor([[-1, 2, 3, 8], [0, 1, 4, 6]])
    kept_key, kept_value = reducer.reduce(key, value, index)
    for head, row in enumerate(index.tolist()):
        before = -1
        for slot, token in enumerate(row):
            run = value[head, before + 1 : token + 1].mean(0) if token >= 0 else torch.zeros(3)
            torch.testing.assert_close(kept_value[head, slot], run)
            assert token < 0 or kept_key[head, slot].equal(key[head, token])
            before = token


def test_recent_answer_evicts_the_oldest_of_the_answer():
    policy = example("recent_answer").decoding
    assert policy.slot(entries=29, start=28) == 20, "20 entries of the prompt, 8 of the answer, and one too many"


# ---------------------------------------------------------------- mmkv-bench new


@each(
    ("words", "said"),
    [
        (["there.py"], "there.py exists and was not changed"),
        (["mine.txt"], "mine.txt is not the name of a Python file"),
        (["snapkv.py"], "snapkv is the name of another method"),
        (["2nd.py"], "'2nd' cannot be a method's name"),
        (["nowhere/mine.py"], "cannot be written (No such file or directory)"),
        (["mine.py", "--part", "scorers"], "invalid choice: 'scorers'"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_and_nothing_is_lost(
    words, said, tmp_path_factory, monkeypatch, capsys
):
    folder = tmp_path_factory.mktemp("new")
    monkeypatch.chdir(folder)
    (folder / "there.py").write_text("mine")
    assert main(["new", *words]) == 2
    assert said in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("there.py", "mine")]
