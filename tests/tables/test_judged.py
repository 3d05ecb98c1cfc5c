"""Judged scores in tables: who judged is said, different judges are told apart, and what is not judged is no score."""

from __future__ import annotations

from mmkv_bench.tables.build import build
from mmkv_bench.tables.stored_rows import Rows
from tests.each import each
from tests.tables.examples import Example, markdown, notes


def judged(example: Example, cell: str, judge: str | None = "judge-7b", temperature: float | None = 0.0) -> None:
    """Say in a `metrics` row who judged a cell."""
    prompts = None if judge is None else "0123456789abcdef"
    example.metrics.append(
        {
            "cell": cell,
            "metric": "exact_match",
            "lmms_eval": None,
            "judge": judge,
            "judge_prompts": prompts,
            "judge_temperature": temperature,
        }
    )


def rows_with(example: Example, unjudged: str | None = None) -> Rows:
    """The rows; the null values of one cell are answers that were not judged."""
    for row in example.samples:
        if row["cell"] == unjudged:
            row["status"] = "ok"
    return example.rows()


def test_a_table_names_its_judge() -> None:
    example = Example()
    for method, budget in (("full", None), ("snapkv", 64)):
        judged(example, example.add(method, budget, [0.5, 1.0, 0.0]))
    (table,) = build(rows_with(example))
    assert "Judged by judge-7b (temperature 0, prompts 01234567)." in notes(table)


def test_a_table_of_two_judges_says_that_they_do_not_compare() -> None:
    example = Example()
    judged(example, example.add("full", None, [0.5, 1.0]))
    judged(example, example.add("snapkv", 64, [0.5, 1.0]), temperature=0.2)
    (table,) = build(rows_with(example))
    (line,) = [line for line in notes(table) if "judges" in line]
    assert line.startswith("Several judges, whose scores cannot be compared: judge-7b (temperature 0, ")
    assert "temperature 0.2" in line


def test_what_is_not_judged_shows_no_score_at_all() -> None:
    example = Example()
    judged(example, example.add("full", None, [1.0, 1.0, 1.0]))
    cell = example.add("snapkv", 64, [1.0, None, None])
    judged(example, cell, judge=None, temperature=None)
    tables = build(rows_with(example, unjudged=cell))
    text = markdown(tables)
    assert "not judged: 2/3" in text
    assert "Not judged: answers without a judge's score" in text
    assert "score with failures as 0" not in text
    assert "0.33" not in text


@each("metric", ["ppl_without_first", "fidelity_kl", "rouge_l_sampled"])
def test_what_is_not_measured_is_said_to_be_that_and_no_judge_is_asked_for(metric: str) -> None:
    example = Example()
    sample = {"metric": metric, "parts": [1.0, 2.0]}
    example.add("full", None, [1.0, 1.0, 1.0], sample=sample)
    cell = example.add("snapkv", 64, [1.0, None, None], sample=sample)
    text = markdown(build(rows_with(example, unjudged=cell), metrics=[metric]))
    assert "not measured: 2/3" in text
    assert "Not measured: 2 of 6 answers. Run again with out=<another folder> to measure them." in text
    assert "judge" not in text.lower()


def test_a_table_without_judges_says_nothing_of_them() -> None:
    example = Example()
    example.add("full", None, [1.0, 0.0])
    example.add("snapkv", 64, [1.0, None])
    text = markdown(build(example.rows()))
    assert "judge" not in text and "score with failures as 0" in text
