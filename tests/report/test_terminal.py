"""`mmkv-bench show`: what a store, a cell and a sample look like in a terminal, and what words choose."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from mmkv_bench.datasets.page_data import to_row
from mmkv_bench.report.cells import first_difference
from mmkv_bench.report.terminal import (
    ASCII,
    LONGEST,
    MARK,
    marked_text,
    plain,
    raster,
    shade_lines,
    shares,
    shorten,
    side_by_side,
)
from mmkv_bench.store.response import digest_of_kept, pack_kept, unpack_kept
from mmkv_bench.store.store import Store
from mmkv_bench.tiny.pages import make_sample
from tests.cli.setting import CHECKOUT, verb
from tests.each import each
from tests.tables.examples import Example, zeros_and_ones

main = verb("show")
PAGE = "walk3-small-test-000003"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    made = Example()
    right = {PAGE: 1.0, "s1": 0.0}
    page = to_row(make_sample("walk3", "small", "test", 3))
    same = {"prompt_hash": page["prompt_hash"], "prompt_tokens": 268}
    made.add("full", None, right, answer=same | {"answer": "abcd", "token_ids": [5, 6, 7, 8]})
    made.add("snapkv", 64, right, answer=same | {"answer": "abx\x1b[2J", "token_ids": [5, 6, 9]})
    made.add("snapkv", "0.2", right, answer=same | {"answer": "abcd", "token_ids": [5, 6, 7, 8]}, protocol="strict")
    said = {"cell": "c002", "dataset": "walk3", "metric": "exact_match", "n": 2, "n_ok": 2}
    made.metrics.append(
        said | {"value": 0.5, "value_failures_zero": 0.5, "low": 0.1, "high": 0.9, "interval": "wilson"}
    )
    made.add("mmshift", 64, {PAGE: None, "s1": 1.0}, seed=1)
    made.add("mmshift", 64, zeros_and_ones(7, 9), seed=1, dataset="lookup")
    return made.write(tmp_path_factory.mktemp("show") / "rows")


def shown(capsys, rows, *words: str) -> list[str]:
    assert main([str(rows), *words]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def of(lines: list[str], *words: str) -> list[str]:
    """The columns of the one line that has all the words."""
    (line,) = [line for line in lines if all(word in line for word in words)]
    return [word.strip() for word in line.split("  ") if word.strip()]


def test_a_store_is_a_line_per_cell_by_dataset_and_protocol(rows, capsys):
    lines = shown(capsys, rows)
    assert lines[0] == f"{rows}: 5 cells, 17 answers"
    assert [line for line in lines if line.count(", tiny, ")] == [
        "lookup, tiny, protocol=paper",
        "walk3, tiny, protocol=paper",
        "walk3, tiny, protocol=strict",
    ]
    assert "7 of 9" not in lines and of(lines, "mmshift@64", "9 ok")[1] == "mmshift@64 seed=1"
    assert of(lines, "oom")[-1] == "1 ok, 1 oom"
    assert of(lines, "full")[0].startswith("c000")


def test_of_many_cells_the_first_are_listed_and_the_words_that_choose_among_all(rows, capsys, monkeypatch):
    monkeypatch.setattr("mmkv_bench.report.show.MOST", 2)
    lines = shown(capsys, rows)
    assert len([line for line in lines if line[:2] == "c0"]) == 2
    assert lines[-6:-4] == [
        "3 more cells: choose with words, such as method@budget, or with several words",
        "dataset: lookup walk3",
    ]
    assert lines[-3:] == ["protocol: paper strict", "reading: paper", "method: full mmshift snapkv"]


@each(
    ("words", "cells"),
    [
        (["snapkv"], ["c001", "c002"]),
        (["mmshift@64", "snapkv@64", "walk3"], ["c001", "c003"]),
        (["64"], ["c001", "c003", "c004"]),
        (["seed=1"], ["c003", "c004"]),
        (["strict", "paper", "snapkv"], ["c001", "c002"]),
    ],
)
def test_words_of_one_kind_add_cells_and_other_kinds_narrow_them(words, cells, rows, capsys):
    lines = shown(capsys, rows, *words)
    assert sorted(line[:4] for line in lines if line[:2] == "c0") == cells


@each("words", [["c002"], ["snapkv@20%"], ["snapkv@0.2", "strict"]])
def test_one_cell_says_what_it_is_and_how_to_make_it_again(words, rows, capsys):
    text = "\n".join(shown(capsys, rows, *words))
    assert text.startswith("snapkv@20% strict on walk3\ncell c002")
    for part in ("Configuration", "Where it comes from", "Scores", "Answers", "Again", "exact_match", "layer"):
        assert part in text
    assert (
        "0.50   [0.10, 0.90]" in text.replace("  [", "   [")
        and "2 answers: 2 ok" in text
        and "No answer is over the budget." in text
    )


def test_a_sample_has_all_answers_with_the_place_where_they_leave_full(rows, capsys):
    lines = shown(capsys, rows, PAGE)
    assert lines[0] == PAGE and lines[1].startswith("question") and lines[2].startswith("reference")
    full, left, failed = of(lines, "full  "), of(lines, "snapkv@64"), of(lines, "mmshift@64")
    assert full[2] == "abcd" and "abcd" in " ".join(of(lines, "snapkv@20%"))
    assert left[2] == "ab>>x\\x1b[2J" and left[-2] == "3", "control characters are written out"
    assert "oom: out of memory" in " ".join(failed)
    alone = shown(capsys, rows, PAGE, "snapkv@64")
    assert of(alone, "snapkv@64") == left and not any("mmshift" in line or " full " in line for line in alone[4:6])


def test_of_very_long_texts_the_beginning_is_shown():
    """Ten million characters of a stranger's answer, error or question took minutes to lay out."""
    long = "ab\x1b" * LONGEST
    more = f" [{2 * LONGEST:,} more characters]"
    begun = plain(long[:LONGEST])
    assert shorten(long) == begun + more and shorten("a\x1b") == plain("a\x1b")
    assert marked_text(long, None).plain == marked_text(long, LONGEST + 1).plain == begun + more
    assert marked_text(long, 3).plain == plain("ab\x1b") + MARK + begun[len(plain("ab\x1b")) :] + more


@each(
    ("words", "sentence"),
    [
        (["snapkw"], "'snapkw' is neither a cell nor a sample of"),
        (["walk3-small-test-000030"], f"did you mean '{PAGE}'?"),
        (["snapkv", "lookup"], "matches 'snapkv' and 'lookup' together; leave a word out"),
        ([PAGE, "lookup"], f"none of the 1 chosen cells has a row for {PAGE}"),
        (["full", "--remake"], "--remake needs a sample"),
    ],
)
def test_words_that_mean_nothing_are_one_sentence(words, sentence, rows, capsys):
    assert main([str(rows), *words]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


def test_lines_are_as_wide_as_the_terminal(rows, capsys, monkeypatch):
    for width in ("60", "100"):
        monkeypatch.setenv("COLUMNS", width)
        for words in ((), ("snapkv@64",), (PAGE,)):
            long = [line for line in shown(capsys, rows, *words) if len(line) > int(width)]
            assert all(line.startswith(("mmkv-bench ", str(rows))) for line in long), long


@pytest.mark.slow
def test_a_page_is_shown_without_torch(rows):
    code = (
        "import sys; from mmkv_bench.cli.main import main; code = main(['show', *sys.argv[1:]]);"
        "assert code == 0 and not {'torch', 'transformers', 'lmms_eval', 'datasets'} & {*sys.modules}"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(rows), PAGE], capture_output=True, text=True, env=CHECKOUT, check=False
    )
    assert ended.returncode == 0, ended.stderr


# ---------------------------------------------------------------------- the map
def test_a_map_is_the_share_of_heads_that_keep_each_part():
    """Against one number after the other: an even grid, and the same image once coarse and once in tiles."""
    rng = np.random.default_rng(0)
    tokens, visual = 40, np.arange(3, 39)
    kept = [np.sort(rng.choice(tokens, (2, 9), replace=True), axis=1) for _ in range(3)]
    kept = [
        np.array([np.pad(np.unique(head), (9 - len(np.unique(head)), 0), constant_values=-1) for head in k])
        for k in kept
    ]
    share = shares(kept, tokens)
    slow = [np.mean([token in head for layer in kept for head in layer]) for token in range(tokens)]
    assert np.allclose(share, slow)
    even = np.array([(0, r / 6, (r + 1) / 6, c / 6, (c + 1) / 6) for r in range(6) for c in range(6)])
    assert np.allclose(raster(even, share[visual], 0, 40), share[visual].reshape(6, 6))
    halves = raster(even, share[visual], 0, 3)
    assert np.allclose(halves, share[visual].reshape(3, 2, 3, 2).mean((1, 3)))
    both = np.vstack([even, (0, 0.0, 1.0, 0.0, 1.0), [-1.0] * 5, (1, 0.0, 1.0, 0.0, 0.5)])
    grid = raster(both, np.append(share[visual], [1.0, 1.0, 0.25]), 0, 40)
    assert np.allclose(grid, (share[visual].reshape(6, 6) + 1) / 2)
    (line,) = raster(both, np.append(share[visual], [1.0, 1.0, 0.25]), 1, 40)
    assert line[0] == 0.25 and np.isnan(line[1:]).all()


def test_shades_begin_above_nothing_and_end_at_all():
    grid = np.array([[0.0, 0.01, 0.25, 0.26, 0.5, 0.75, 0.76, 1.0, np.nan]])
    assert shade_lines(grid, ASCII) == ["..----++++##@@@@  "]
    blocks = [["aa", "a"], ["bbb"], ["cccc"]]
    assert side_by_side(blocks, 8) == ["aa   bbb", "a", "", "cccc"]
    assert side_by_side([["aa"], ["bbb"]], 3) == ["aa", "", "bbb"] and side_by_side([], 3) == []


def test_the_first_difference_is_where_one_ends_or_another_stands():
    assert [first_difference(*pair) for pair in (("ab", "ab"), ("ab", "abc"), ("", "a"), ("axc", "abc"))] == [
        None,
        2,
        0,
        1,
    ]
    assert plain("a\tb\x1b[0m\né\u202e") == "a\\tb\\x1b[0m\né\\u202e"


def test_a_store_without_cells_is_refused(tmp_path, capsys):
    Store(tmp_path / "rows").prepare()
    assert main([str(tmp_path / "rows")]) == 2
    assert "has no cells" in capsys.readouterr().err


def test_rows_that_hold_what_was_kept_are_drawn_without_a_model(tmp_path, capsys):
    """Of another dataset: question and places of tokens come from the table `prompts`."""
    kept = [[np.array([0, 1]), np.array([1, 3])], [np.array([1, 2]), np.array([1, 5])]]
    text = pack_kept(kept, 6)
    made = Example()
    told = {"kept_indices": text, "kept_digest": digest_of_kept(unpack_kept(text)), "prompt_hash": "h"}
    made.add("full", None, {"q-0": 1.0}, answer={"prompt_hash": "h"})
    made.add("snapkv", 64, {"q-0": 1.0}, answer=told)
    store = Store(made.write(tmp_path / "rows"))
    visual = [
        value for i in range(4) for value in (i + 1.0, 0.0, i // 2 / 2, i // 2 / 2 + 0.5, i % 2 / 2, i % 2 / 2 + 0.5)
    ]
    asked = {
        "prompt_hash": "h",
        "model_fingerprint": "m",
        "dataset": "walk3",
        "sample_id": "q-0",
        "doc_id": 0,
        "media": 1,
    }
    asked |= {"question": "<image>\nWhere [b]?", "reference": "there", "visual": visual}
    with store.writer("later") as writer:
        writer.commit([row for row in made.responses if row["cell"] == "c001"], asked)
    lines = shown(capsys, tmp_path / "rows", "q-0")
    assert "question   <image>" in lines and any("Where [b]?" in line for line in lines)
    place = lines.index("Kept, as the rows say (keep=indices)")
    assert lines[place + 1 : place + 4] == ["snapkv@64 (c001)", "visual 2 of 4, text 0 of 2", "digest the same"]
    assert lines[place + 4 : place + 6] == ["██░░", "░░··"]
