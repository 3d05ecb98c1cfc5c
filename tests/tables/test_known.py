"""Metrics that are no mean over samples, scales of lmms-eval's own aggregates, and metrics where less is better."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

from mmkv_bench.errors import StoreError
from mmkv_bench.statistics.intervals import bootstrap_statistics, cluster_draws
from mmkv_bench.statistics.metric_kinds import Pooled, aggregate_of, upstream
from mmkv_bench.tables.build import build
from mmkv_bench.tables.compare import every_pair
from mmkv_bench.tables.metric_rows import headlines, metrics_rows
from mmkv_bench.tables.stored_rows import Rows
from tests.each import each
from tests.tables.examples import Example, gather, markdown

BLEU = "textcaps_Bleu_2"


def slow_bleu(parts: list[list[float]]) -> float:
    """Corpus BLEU-2 by the book, from the same counts, for corpora in which every order has a match."""
    words, reference, right1, right2, given1, given2 = (sum(column) for column in zip(*parts, strict=True))
    precision = math.sqrt(right1 / given1 * right2 / given2)
    return precision * (1.0 if words >= reference else math.exp(1 - reference / words))


def bleu_parts(rng: np.random.Generator, n: int) -> list[list[float]]:
    words = rng.integers(3, 12, n)
    return [
        [w, w + int(rng.integers(-1, 4)), int(rng.integers(1, w + 1)), int(rng.integers(1, w)), w, w - 1] for w in words
    ]


def bleu_example(cells: dict[str, list[list[float] | None]], values: float = 0.5) -> Example:
    """Cells of a corpus metric; None is a sample that failed, which has the parts of an empty answer."""
    example = Example()
    for method, parts in cells.items():
        scores = [None if own is None else values for own in parts]
        example.add(method, None if method == "full" else 64, scores, sample={"metric": BLEU})
        for row, own in zip(example.samples[-len(parts) :], parts, strict=True):
            row["parts"] = [0.0, 5.0, 0.0, 0.0, 0.0, 0.0] if own is None else own
    return example


def test_the_headline_of_corpus_bleu_is_the_corpus_value_and_no_mean():
    parts = bleu_parts(np.random.default_rng(0), 30)
    rows = bleu_example({"full": bleu_parts(np.random.default_rng(1), 30), "snapkv": parts}).rows()
    full, own = metrics_rows(rows.samples, rows.cells)
    assert own["value"] == pytest.approx(slow_bleu(parts), abs=1e-6)
    assert own["low"] < own["value"] < own["high"]
    assert own["interval"] == "bootstrap"
    assert own["difference"] == pytest.approx(own["value"] - full["value"], abs=1e-12)
    assert own["difference_low"] < own["difference"] < own["difference_high"]


def test_sums_of_drawn_clusters_give_what_drawn_samples_give():
    rng = np.random.default_rng(3)
    a = np.array(bleu_parts(rng, 12), float)
    (found,) = bootstrap_statistics([a], np.repeat(np.arange(6), 2), 6, "any", aggregate_of(BLEU), draws=60)
    counts = np.concatenate(list(cluster_draws("any", 6, draws=60)))
    slow = [slow_bleu(np.repeat(a, np.repeat(row, 2), axis=0).tolist()) for row in counts]
    np.testing.assert_allclose(found, slow, atol=1e-6)


def test_a_failed_sample_has_no_headline_and_counts_as_an_empty_answer():
    parts = bleu_parts(np.random.default_rng(5), 9)
    rows = bleu_example({"full": [*parts[:8], None], "snapkv": parts}).rows()
    full, own = metrics_rows(rows.samples, rows.cells)
    assert (full["value"], full["n_ok"], full["interval"]) == (None, 8, "none")
    assert full["value_failures_zero"] == pytest.approx(slow_bleu([*parts[:8], [0, 5, 0, 0, 0, 0]]), abs=1e-6)
    assert own["difference"] == pytest.approx(0.0, abs=1e-12)  # over the samples ok in both
    (table,) = build(rows)
    assert table.entries["snapkv", "64"].common == pytest.approx(slow_bleu(parts[:8]), abs=1e-6)


def without_parts(rows: Rows, cell: str) -> Rows:
    """The rows as they are where no sample of a cell reached the scorer: all failed, and nobody knows their parts."""
    of_cell = rows.samples["cell"] == cell
    samples = rows.samples.assign(
        parts=rows.samples["parts"].where(~of_cell, None),
        value=rows.samples["value"].where(~of_cell, np.nan),
        status=rows.samples["status"].where(~of_cell, "oom"),
    )
    return dataclasses.replace(rows, samples=samples)


@each("failed", ["full", "snapkv"])
def test_a_cell_in_which_every_sample_failed_has_no_score_and_stops_no_other_cell(failed: str) -> None:
    parts = bleu_parts(np.random.default_rng(6), 9)
    whole = bleu_example({"full": parts, "snapkv": parts}).rows()
    names = dict(zip(whole.cells["method"], whole.cells["cell"], strict=True))
    rows = without_parts(whole, names[failed])
    found = {row["cell"]: row for row in metrics_rows(rows.samples, rows.cells)}
    lost = found.pop(names[failed])
    assert (lost["n"], lost["n_ok"], lost["value"], lost["value_failures_zero"]) == (9, 0, None, None)
    ((_, kept),) = found.items()
    assert kept["value"] == pytest.approx(slow_bleu(parts), abs=1e-6)
    assert (lost["difference"], kept["difference"]) == (None, None)
    (table,) = build(rows)
    assert "0/9" in markdown([table]) and not every_pair(table)


def test_a_seed_that_failed_whole_takes_its_samples_and_no_others() -> None:
    frame = pd.DataFrame(
        {"cell": ["a", "a", "b"], "sample_id": ["x", "y", "x"], "cluster": None, "value": [0.5, 0.5, np.nan]}
        | {"status": ["ok", "ok", "oom"], "parts": [[1.0, 2.0], [3.0, 4.0], None]}
    )
    scores = gather(frame)
    np.testing.assert_array_equal(scores.ok, [False, True])
    np.testing.assert_array_equal(scores.parts, [[np.nan, np.nan], [3.0, 4.0]])
    (row,) = headlines([scores], "any", "ppl")
    assert (row["n"], row["n_ok"], row["value"], row["value_failures_zero"]) == (2, 1, None, None)


def test_seeds_are_averaged_within_a_sample_before_the_sums():
    frame = pd.DataFrame(
        {"cell": ["a", "b", "a", "b"], "sample_id": ["x", "x", "y", "y"], "cluster": None}
        | {"value": 0.5, "status": "ok", "parts": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [5.0, 8.0]]}
    )
    np.testing.assert_array_equal(gather(frame).parts, [[2.0, 3.0], [5.0, 7.0]])


def test_a_corpus_metric_without_parts_is_refused_and_not_averaged():
    example = Example()
    example.add("snapkv", 64, [0.2, 0.4], sample={"metric": BLEU})
    rows = example.rows()
    with pytest.raises(StoreError, match="stage=score"):
        metrics_rows(rows.samples, rows.cells)


def test_a_pooled_aggregate_of_another_kind_needs_its_function_alone():
    perplexity = Pooled(lambda totals: np.exp(totals[..., 0] / totals[..., 1]))
    parts = np.array([[2.0, 4.0], [9.0, 3.0]])
    assert perplexity(parts) == pytest.approx(math.exp(11 / 7))
    (draws,) = bootstrap_statistics([parts], np.arange(2), 2, "any", perplexity, draws=50)
    assert set(np.round(draws, 9)) <= {round(math.exp(x), 9) for x in (0.5, 11 / 7, 3.0)}


@each(
    ("metric", "parts", "expected"),
    [("autodq_f1", [0.5, 0.25, 1.0], 1 / 3), ("ppl", [0.7, 1.0], math.exp(0.7))],
)
def test_a_single_sample_is_pooled_to_its_own_value(metric, parts, expected):
    assert aggregate_of(metric)(np.array([parts])) == pytest.approx(expected)


@each(
    ("metric", "theirs", "ours"),
    [
        ("ocrbench_accuracy", 0.003, 0.75),
        ("tree_edit_distance", 2.0, 0.5),
        ("vstar_overall_acc", 75.0, 0.75),
        ("vstar_relative_position_acc", 50.0, 0.5),
        ("videomme_perception_score", 25.0, 0.25),
        ("gpt_eval_score", 62.5, 0.625),
        ("exact_match", 0.75, 0.75),
        ("textcaps_CIDEr", 1.25, 1.25),
    ],
)
def test_lmms_evals_aggregates_of_four_samples_on_our_scale(metric, theirs, ours):
    assert upstream(metric).as_ours(theirs, 4) == pytest.approx(ours)


def test_the_note_on_lmms_evals_aggregate_compares_on_one_scale_and_names_theirs():
    example = Example()
    cell = example.add("snapkv", 64, [1.0, 0, 1, 1], sample={"metric": "ocrbench_accuracy"})
    example.metrics = [{"cell": cell, "metric": "ocrbench_accuracy", "lmms_eval": 0.003}]
    text = markdown(build(example.rows()))
    assert "aggregate (right answers / 1000, rescaled here) is the same in all 1 cells" in text
    example.metrics[0]["lmms_eval"] = 0.004
    assert "differs, most for snapkv at 64: 1.0000 against 0.7500 here" in markdown(build(example.rows()))


def test_answers_without_a_readable_choice_are_told_beside_the_score_and_not_beside_their_own_count():
    example = Example()
    cell = example.add("snapkv", 64, [1.0, 0, 0, 1], sample={"metric": "exact_match"})
    count = [row | {"metric": "parse_failed", "value": float(i == 2)} for i, row in enumerate(example.samples)]
    example.samples += count
    example.metrics = [{"cell": cell, "metric": "exact_match", "lmms_eval": 0.75}]
    scored, unread = (markdown([table]) for table in build(example.rows()))
    assert "no choice can be read count as 0" in scored
    assert "snapkv at 64 (1 of 4)" in scored
    assert "0.7500 against 0.5000 here" in scored
    assert "no choice can be read" not in unread


def test_where_less_is_better_the_smaller_value_is_bold_and_better():
    example = Example()
    rng = np.random.default_rng(0)
    for method, share in (("snapkv", 0.1), ("keydiff", 0.8)):
        values = (rng.random(200) < share).astype(float).tolist()
        example.add(method, 64, values, sample={"metric": "parse_failed"})
    (table,) = build(example.rows())
    assert table.best("64") == ("snapkv",)
    (pair,) = every_pair(table)
    assert pair.better == "snapkv" and {pair.a, pair.b} == {"snapkv", "keydiff"}
    text = markdown([table])
    assert "Smaller values are better." in text
    assert "**0.1" in text
