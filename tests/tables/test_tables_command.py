"""`python -m mmkv_bench tables` on stores written through the store's own interface."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmkv_bench.store.store import Store
from mmkv_bench.tables.build import build
from mmkv_bench.tables.metric_rows import metrics_rows
from mmkv_bench.tables.stored_rows import load
from tests.cli.setting import verb
from tests.tables.examples import Example, csv_cells, csv_pairs, latex, markdown, zeros_and_ones

main = verb("tables")


def example() -> Example:
    made = Example()
    for dataset in ("lookup", "walk3"):
        made.add("full", None, zeros_and_ones(12, 12), dataset=dataset)
        for seed in (0, 1):
            made.add("random", 64, zeros_and_ones(1 + seed, 12), dataset=dataset, seed=seed)
        made.add("mmshift", 64, zeros_and_ones(10, 12), dataset=dataset, answer={"fallback": ["window_reduced"]})
        made.add("mmshift", "0.2", [None, *zeros_and_ones(10, 11)], dataset=dataset)
    rows = made.rows()
    made.metrics = [row | {"lmms_eval": row["value"]} for row in metrics_rows(rows.samples, rows.cells)]
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return example().write(tmp_path / "rows")


def printed(capsys: pytest.CaptureFixture, *argv: object) -> str:
    assert main([str(argument) for argument in argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_store_prints_the_same_tables_as_the_rows_it_was_written_from(root: Path, capsys) -> None:
    tables = build(example().rows())
    assert len(tables) == 4
    assert printed(capsys, root, "--notes") == printed(capsys, root, "--notes", "--format", "md") == markdown(tables)
    assert printed(capsys, root, "--no-interval", "--pairs", "--notes") == markdown(tables, intervals=False, pairs=True)
    assert printed(capsys, root, "--format", "latex", "--notes") == latex(tables)
    assert printed(capsys, root, "--format", "csv") == csv_cells(tables)
    assert printed(capsys, root, "--format", "csv", "--pairs") == csv_pairs(tables)


@pytest.mark.slow
def test_notes_are_none_short_or_all(root: Path, capsys) -> None:
    short, every, none = (printed(capsys, root, "--notes", how) for how in ("short", "all", "none"))
    assert short == printed(capsys, root) and every == printed(capsys, "--notes", root)
    assert short.count("\n- ") < every.count("\n- ") and "\n- " not in none
    for form in ("latex", "html"):
        text = printed(capsys, root, "--notes=none", "--format", form)
        assert "Bold" not in text and "more notes" not in text
    assert "--notes: invalid choice: 'few'" in refusal(capsys, root, "--notes=few")


@pytest.mark.slow
def test_lines_get_the_names_and_a_table_the_caption_that_a_reader_gives(root: Path, capsys) -> None:
    new = "Ours_1 & 100% \\x"
    words = (root, "--dataset", "walk3", "--budgets", "64", "--caption", "A 5% $gain$", "--name", f"mmshift={new}")
    text = printed(capsys, *words, "--notes")
    assert (
        text.startswith("**A 5% $gain$**\n")
        and f"\n| {new} " in text
        and f"a fallback window_reduced: {new} at 64" in text
    )
    assert "mmshift" not in text and "| random " in text
    written = printed(capsys, *words, "--format", "latex", "--notes", "none")
    assert r"\caption{A 5\% \$gain\$}" in written and r"Ours\_1 \& 100\% \textbackslash{}x & " in written
    assert written.startswith("% needs booktabs\n") and "mmshift" not in written
    assert printed(capsys, *words[:3], "--format", "csv", *words[7:]) == printed(capsys, *words[:3], "--format", "csv")
    assert "did you mean 'mmshift'" in refusal(capsys, root, "--name", "mmshif=a")
    assert "random is another line" in refusal(capsys, root, "--name", "mmshift=random")
    assert "there are 4; choose" in refusal(capsys, root, "--caption", "One")


@pytest.mark.slow
def test_tasks_are_groups_of_columns_of_one_table(root: Path, capsys) -> None:
    text = printed(capsys, root, "--join", "--no-interval", "--notes")
    entries, fraction = re.sub(" +", " ", text).split("\n**lookup, walk3, exact_match**")
    assert "| method | lookup 64 | walk3 64 |" in entries and "| mmshift | **0.83** a | **0.83** a |" in entries
    assert "lookup 0.2" in fraction and "11/12 ok" in fraction and "walk3: " not in text, "all holds for both tasks"
    written = printed(capsys, root, "--join", "--budgets", "64", "--format", "latex", "--notes", "none")
    assert r" & \multicolumn{1}{c}{lookup} & \multicolumn{1}{c}{walk3} \\" in written
    assert r"\cmidrule(lr){2-2}\cmidrule(lr){3-3}" in written and written.count("tabular}") == 2
    assert "--join print different tables" in refusal(capsys, root, "--join", "--ranks")
    assert "--join prints only scores" in refusal(capsys, root, "--join", "--pairs")


@pytest.mark.slow
def test_filters_keep_what_they_name(root: Path, capsys) -> None:
    text = printed(capsys, root, "--dataset", "walk3", "--protocol", "paper", "--metric", "exact_match")
    assert "walk3" in text and "lookup" not in text
    assert printed(capsys, root, "--dataset", "walk3,lookup") == printed(capsys, root)


def test_a_run_can_load_its_own_cells_only(root: Path) -> None:
    rows = load(root, cells=["c005", "c008"])  # full and mmshift at 64 of walk3
    (table,) = build(rows)
    assert (table.dataset, [method.label for method in table.methods]) == ("walk3", ["full", "mmshift"])
    assert set(rows.responses["cell"]) == {"c005", "c008"}


def refusal(capsys: pytest.CaptureFixture, *argv: object) -> str:
    assert main([str(argument) for argument in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("mmkv_bench: ")
    return err


def test_a_folder_without_rows_is_refused_in_one_sentence(tmp_path: Path, capsys) -> None:
    assert "no rows folder at" in refusal(capsys, tmp_path / "nowhere")
    assert "has no result rows" in refusal(capsys, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_answers_without_scores_are_refused_with_what_to_do(tmp_path: Path, capsys) -> None:
    made = example()
    made.samples, made.metrics = [], []
    assert "answers but no scores: run the same command again with stage=score" in refusal(
        capsys, made.write(tmp_path / "rows")
    )


def test_an_unknown_dataset_is_refused_with_the_nearest_names(root: Path, capsys) -> None:
    assert "no dataset 'walk': did you mean 'walk3'?" in refusal(capsys, root, "--dataset", "walk")


def test_journaled_answers_count_before_they_are_published(tmp_path: Path, capsys) -> None:
    made = Example()
    made.add("snapkv", 64, [1.0, 0], answer={"fallback": ["window_reduced"]})
    responses, made.responses = made.responses, []
    root = made.write(tmp_path / "rows")
    with Store(root).writer("busy") as writer:
        for row in responses:
            writer.commit([row])
        assert "a fallback window_reduced: snapkv at 64 (2 of 2)." in printed(capsys, root)


@pytest.mark.slow
def test_the_command_needs_neither_a_model_library_nor_an_evaluation_library(root: Path, capsys) -> None:
    check = (
        "import sys; from mmkv_bench.cli.main import main; from mmkv_bench.cli.grammar import reader; "
        "reader('tables'); light = set(sys.modules); "
        "code = main(['tables', *sys.argv[1:]]); "
        "assert not {'torch', 'transformers', 'lmms_eval', 'matplotlib'} & set(sys.modules); "
        "assert not {'numpy', 'pandas', 'pyarrow'} & light; sys.exit(code)"
    )
    run = subprocess.run([sys.executable, "-c", check, str(root)], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == printed(capsys, root)
