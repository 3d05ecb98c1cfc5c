"""The `metrics` rows: value, counts, interval and difference to `full`, for the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mmkv_bench.errors import StoreError
from mmkv_bench.statistics.cluster_sums import Samples
from mmkv_bench.statistics.intervals import wilson
from mmkv_bench.statistics.paired_tests import compare_column
from mmkv_bench.store.schema import METRICS
from mmkv_bench.store.store import Store
from mmkv_bench.tables.metric_rows import metrics_rows
from tests.each import each
from tests.tables.examples import Example, zeros_and_ones


def rows_of(example: Example, **given) -> dict[str, dict]:
    rows = example.rows()
    return {row["cell"]: row for row in metrics_rows(rows.samples, rows.cells, **given)}


def test_a_cell_of_zeros_and_ones_gets_wilson_and_its_difference_to_full() -> None:
    example = Example()
    full = example.add("full", None, zeros_and_ones(18, 20))
    snapkv = example.add("snapkv", 64, zeros_and_ones(11, 20))
    rows = rows_of(example)
    assert rows[full] == {
        "cell": full,
        "dataset": "walk3",
        "metric": "exact_match",
        "n": 20,
        "n_ok": 20,
        "value": 0.9,
        "value_failures_zero": 0.9,
        "low": wilson(0.9, 20)[0],
        "high": wilson(0.9, 20)[1],
        "interval": "wilson",
        "difference": None,
        "difference_low": None,
        "difference_high": None,
        "lmms_eval": None,
        "lmms_eval_reason": None,
        "judge": None,
        "judge_prompts": None,
        "judge_temperature": None,
    }
    assert rows[snapkv]["value"] == 0.55
    assert rows[snapkv]["difference"] == -7 / 20
    both = Samples(np.array([zeros_and_ones(11, 20), zeros_and_ones(18, 20)]), np.arange(20))
    ends = compare_column(["snapkv", "full"], both).intervals(alpha=0.05)[0]
    assert [rows[snapkv]["difference_low"], rows[snapkv]["difference_high"]] == ends.tolist()


@each("metric", ["gpt_eval_score_correctness", "gpt_eval_score_temporal", "vatex_CIDEr", "divergence"])
def test_marks_and_amounts_of_zeros_and_ones_are_no_proportions(metric: str) -> None:
    """An interval of amounts does not depend on where they lie: that of 0 and 1 is that of 2 and 3, less 2."""
    found = {}
    for lift in (0, 2):
        example = Example()
        for method, budget, ones in (("full", None, 7), ("snapkv", 64, 3)):
            example.add(method, budget, [value + lift for value in zeros_and_ones(ones, 20)])
        rows = example.rows()
        rows.samples["metric"] = metric
        found[lift] = metrics_rows(rows.samples, rows.cells)
    for plain, lifted in zip(found[0], found[2], strict=True):
        assert plain["interval"] == lifted["interval"] == "bootstrap"
        assert (plain["low"] + 2, plain["high"] + 2) == pytest.approx((lifted["low"], lifted["high"]))
        for end in ("difference_low", "difference_high"):
            assert plain[end] == lifted[end] or plain[end] == pytest.approx(lifted[end])


def test_a_cell_with_a_failed_sample_has_no_headline() -> None:
    example = Example()
    example.add("full", None, [1.0, 1, 1, 0])
    broken = example.add("snapkv", 64, [1.0, None, 0, 0])
    row = rows_of(example)[broken]
    assert (row["n"], row["n_ok"], row["value"], row["low"], row["interval"]) == (4, 3, None, None, "none")
    assert row["value_failures_zero"] == 0.25
    assert row["difference"] == -1 / 3  # over the three samples ok in both


def test_a_sample_without_a_value_counts_as_not_ok_even_when_its_status_is() -> None:
    example = Example()
    cell = example.add("snapkv", 64, [1.0, 1.0, 1.0])
    example.samples[1]["value"] = None
    row = rows_of(example)[cell]
    assert (row["n"], row["n_ok"], row["value"]) == (3, 2, None)


def test_each_protocol_is_compared_with_its_own_full() -> None:
    example = Example()
    example.add("full", None, [1.0, 1, 1, 1])
    example.add("full", None, [0.0, 0, 1, 1], protocol="strict")
    paper = example.add("snapkv", 64, [0.0, 0, 1, 1])
    strict = example.add("snapkv", 64, [0.0, 0, 1, 1], protocol="strict")
    alone = example.add("snapkv", 64, [0.0, 0, 1, 1], protocol="query_agnostic")
    rows = rows_of(example)
    assert (rows[paper]["difference"], rows[strict]["difference"], rows[alone]["difference"]) == (-0.5, 0.0, None)


@each("column", ["model_fingerprint", "dtype", "attention", "generation", "torch"])
def test_a_cell_is_never_compared_with_full_of_another_context(column: str) -> None:
    example = Example()
    example.add("full", None, [1.0, 1])
    other = example.add("snapkv", 64, [0.0, 1], **{column: '{"other": 1}'})
    assert rows_of(example)[other]["difference"] is None


def test_two_full_cells_of_one_context_are_refused() -> None:
    example = Example()
    example.add("full", None, [1.0])
    example.add("full", None, [1.0])
    with pytest.raises(StoreError, match="c000 and c001 are both `full`"):
        rows_of(example)


def test_graded_scores_get_a_bootstrap() -> None:
    example = Example()
    values = [0.1, 0.5, 0.9, 0.2, 0.4, 0.8]
    example.add("full", None, [1.0] * 6)
    cell = example.add("snapkv", 64, values)
    row = rows_of(example)[cell]
    assert row["interval"] == "bootstrap" and row["low"] < np.mean(values) == row["value"] < row["high"]


def test_lmms_evals_aggregate_reason_and_judge_stand_beside_ours() -> None:
    example = Example()
    good, bad = example.add("snapkv", 64, [1.0]), example.add("keydiff", 64, [None])
    key = "exact_match"
    judge = {"judge": "gpt", "judge_prompts": "abc", "judge_temperature": 0.0}
    given = {"lmms_eval": {(good, key): 1.0}, "reasons": {bad: "1 sample not ok"}, "judges": {(good, key): judge}}
    rows = rows_of(example, **given)
    assert (rows[good]["lmms_eval"], rows[good]["lmms_eval_reason"]) == (1.0, None)
    assert {name: rows[good][name] for name in judge} == judge
    assert (rows[bad]["lmms_eval"], rows[bad]["lmms_eval_reason"]) == (None, "1 sample not ok")
    assert (rows[bad]["judge"], rows[bad]["judge_prompts"], rows[bad]["judge_temperature"]) == (None, None, None)
    own = rows_of(example, reasons={bad: "1 sample not ok", (bad, key): "not judged"})[bad]
    assert own["lmms_eval_reason"] == "not judged"


def test_an_answer_that_is_not_judged_is_no_failure_and_never_counts_as_0() -> None:
    example = Example()
    some, none = example.add("snapkv", 64, [1.0, None, 0.5]), example.add("keydiff", 64, [None, None])
    for row in example.samples:
        row["status"] = "ok"
    rows = rows_of(example)
    assert [(rows[cell]["n"], rows[cell]["n_ok"]) for cell in (some, none)] == [(3, 2), (2, 0)]
    for cell in (some, none):
        assert (rows[cell]["value"], rows[cell]["value_failures_zero"], rows[cell]["low"]) == (None, None, None)


def test_rows_do_not_depend_on_the_order_of_samples_or_on_other_cells() -> None:
    example = Example()
    rng = np.random.default_rng(0)
    for i, method in enumerate(("full", "snapkv", "keydiff")):
        example.add(method, None if method == "full" else 64, (rng.integers(0, 4 + i, 40) / 7).tolist())
    rows = example.rows()
    whole = metrics_rows(rows.samples, rows.cells)
    assert metrics_rows(rows.samples.sample(frac=1, random_state=5), rows.cells) == whole
    two = rows.cells["cell"] != "c001"
    assert metrics_rows(rows.samples[rows.samples["cell"] != "c001"], rows.cells[two]) == [whole[0], whole[2]]


def test_contradicting_rows_are_refused() -> None:
    example = Example()
    cell = example.add("snapkv", 64, [1.0, 0.0])
    rows = example.rows()
    twice = pd.concat([rows.samples, rows.samples[:1]])
    with pytest.raises(StoreError, match=f"Sample s000 has more than one exact_match score in cell {cell}"):
        metrics_rows(twice, rows.cells)
    with pytest.raises(StoreError, match="no row in `cells`"):
        metrics_rows(rows.samples, rows.cells[:0])
    with pytest.raises(StoreError, match="more than one row"):
        metrics_rows(rows.samples, pd.concat([rows.cells, rows.cells]))


def test_the_store_accepts_the_rows_as_they_are(tmp_path: Path) -> None:
    example = Example()
    example.add("full", None, [1.0, 1, 0])
    example.add("snapkv", 64, [0.25, None, 0.5])
    rows = example.rows()
    example.metrics = metrics_rows(rows.samples, rows.cells)
    stored = Store(example.write(tmp_path)).metrics()
    assert stored.schema == METRICS
    kept = {row["cell"]: row for row in stored.to_pylist()}
    for row in example.metrics:
        assert {name: kept[row["cell"]][name] for name in row} == row
