"""Promise: measures of stored rows are what their definitions give by hand, and nothing is made up for what is missing."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from mmkv_bench.datasets.rouge import rouge_l
from mmkv_bench.evaluation import agreement as agreement_module
from mmkv_bench.evaluation.agreement import agreement, bare
from mmkv_bench.evaluation.measures import COLUMNS, NAMES, POOLED, measured, stored
from mmkv_bench.statistics import metric_kinds as known
from mmkv_bench.store.schema import RESPONSES
from tests.each import each


def row(sample: str = "s0", status: str = "ok", **changed) -> dict:
    ok = {"answer": "a b c", "token_ids": [5, 6, 7, 2]} if status == "ok" else {}
    empty = dict.fromkeys(COLUMNS)
    return empty | {"cell": "c", "sample_id": sample, "cluster": "k", "status": status, "token_ids": []} | ok | changed


def values(rows, full=(), protocol="paper", is_full=False) -> dict:
    """(measure, sample) -> score."""
    scores = measured(rows, {one["sample_id"]: one for one in full}, protocol, is_full)
    assert len({(score.metric, score.sample_id) for score in scores}) == len(scores)
    return {(score.metric, score.sample_id): score for score in scores}


def test_under_paper_the_first_token_stands_apart():
    found = values([row(forced_kl=[0.0, 0.3, 0.1], forced_agree=[True, False, True])])
    assert found["fidelity_kl", "s0"].value == pytest.approx(0.2)
    assert found["fidelity_kl_all", "s0"].value == pytest.approx(0.4 / 3)
    assert found["fidelity_top1", "s0"].value == 0.5
    assert ("fidelity_kl_first", "s0") not in found


@each("protocol", ("strict", "query_agnostic"))
def test_elsewhere_the_first_token_is_one_of_them_and_has_a_measure_of_its_own(protocol):
    found = values([row(forced_kl=[0.9, 0.3, 0.0], forced_agree=[False, False, True])], protocol=protocol)
    assert found["fidelity_kl", "s0"].value == pytest.approx(0.4)
    assert found["fidelity_kl_first", "s0"].value == 0.9
    assert found["fidelity_top1", "s0"].value == pytest.approx(1 / 3)
    assert ("fidelity_kl_all", "s0") not in found


def test_an_answer_of_one_token_says_nothing_under_paper():
    rows = [
        row("s0", forced_kl=[0.0], forced_agree=[True]),
        row("s1", forced_kl=[0.0, 1.0], forced_agree=[True, False]),
    ]
    found = values(rows)
    assert ("fidelity_kl", "s0") not in found and found["fidelity_kl", "s1"].value == 1.0
    assert found["fidelity_kl_all", "s0"].value == 0.0
    assert values(rows[:1], protocol="strict")["fidelity_kl", "s0"].value == 0.0


def test_divergence_is_the_tokens_before_the_first_difference_and_censored_at_the_end():
    full = [row(f"s{i}", token_ids=[5, 6, 7, 2]) for i in range(4)]
    own = [[5, 6, 7, 2], [5, 9, 7, 2], [5, 6, 2], [8]]
    found = values([row(f"s{i}", token_ids=tokens) for i, tokens in enumerate(own)], full)
    assert [found["divergence", f"s{i}"].value for i in range(4)] == [4.0, 1.0, 2.0, 0.0]
    assert [found["same_answer", f"s{i}"].value for i in range(4)] == [1.0, 0.0, 0.0, 0.0]


def test_full_stands_at_its_own_second_measurement_and_never_at_a_constant():
    agree = [True, True, False, True]
    found = values([row(forced_kl=[0.0, 0.0, 0.2, 0.0], forced_agree=agree)], [row()], is_full=True)
    assert found["divergence", "s0"].value == 2.0 and found["same_answer", "s0"].value == 0.0
    assert values([row()], [row()], is_full=True) == {}


def test_what_failed_or_was_not_measured_has_a_row_without_a_value():
    rows = [
        row("s0", forced_kl=[0.0, 0.1], forced_agree=[True, True], reference_nll=[1.0]),
        row("s1"),
        row("s2", "oom"),
    ]
    full = [row("s0"), row("s1", "timeout"), row("s2")]
    found = values(rows, full)
    for measure in ("fidelity_kl", "same_answer", "ppl"):
        assert found[measure, "s0"].value is not None
        assert (found[measure, "s1"].value, found[measure, "s1"].status) == (None, "ok")
        assert (found[measure, "s2"].value, found[measure, "s2"].status) == (None, "oom")
    assert found["ppl", "s1"].parts == found["ppl", "s2"].parts == (0.0, 0.0)


def test_without_full_and_without_measurements_there_are_no_measures():
    assert values([row("s0"), row("s1", "oom")]) == {}
    partly = values([row("s0"), row("s1")], [row("s1")])
    assert set(partly) == {("divergence", "s1"), ("same_answer", "s1")}


def test_perplexity_carries_the_sums_that_it_is_pooled_from():
    found = values([row("s0", reference_nll=[2.0, 0.5, 0.5]), row("s1", reference_nll=[1.0])])
    assert found["ppl", "s0"].parts == (3.0, 3.0) and found["ppl", "s0"].value == pytest.approx(math.e)
    assert found["ppl_without_first", "s0"].parts == (1.0, 2.0)
    assert found["ppl", "s1"].parts == (1.0, 1.0) and ("ppl_without_first", "s1") not in found
    assert math.isfinite(values([row(reference_nll=[1e6])])["ppl", "s0"].value)


def test_rouge_is_against_the_first_sample_and_for_full_between_two():
    full = [row(answer="the cat sat", reference_samples=["the cat sat down", "a cat sat"])]
    found = values([row(answer="the cat ran")], full)
    assert found["rouge_l_sampled", "s0"].value == rouge_l("the cat ran", "the cat sat down")
    assert found["rouge_l_greedy", "s0"].value == rouge_l("the cat ran", "the cat sat")
    own = values(full, full, is_full=True)
    assert own["rouge_l_sampled", "s0"].value == rouge_l("a cat sat", "the cat sat down")
    assert ("rouge_l_greedy", "s0") not in own


def test_tables_know_the_measures_by_the_same_names():
    assert set(COLUMNS) <= set(RESPONSES.names)
    assert known.MEASURES == NAMES
    assert set(known.FIDELITY) < NAMES and known.AMOUNTS < NAMES
    assert {name for name in NAMES if known.aggregate_of(name) is not None} == set(POOLED)
    assert {name for name in NAMES if known.lower_is_better(name)} == {n for n in NAMES if "kl" in n or "ppl" in n}


def test_a_slim_row_keeps_the_measures_whose_lists_it_lost():
    lists = {"forced_kl": [0.0, 0.3, 0.1], "forced_agree": [True, False, True], "reference_nll": [0.5, 0.25]}
    short = {"forced_kl": [0.0], "forced_agree": [True], "reference_nll": [0.5]}  # its fidelity means nothing
    of_full = {**lists, "reference_samples": ["a b", "a c"]}
    states = [lists, short, {}]
    for is_full in (True, False):
        rows = [row(f"s{i}", **lists_of) for i, lists_of in enumerate(states)] + [row("s3", "oom")]
        full = {f"s{i}": row(f"s{i}", **of_full) for i in range(4)}
        whole = measured(rows, full, "paper", is_full)
        table = [score._asdict() | {"parts": score.parts and list(score.parts)} for score in whole]
        slim = [one | dict.fromkeys(lists) | {"slim": True} for one in rows]
        assert measured(slim, full, "paper", is_full, stored(table)) == whole
        assert measured(slim, full, "paper", is_full) != whole
        # a row that was made again counts as it is
        again = [slim[0], *rows[1:3], row("s3", forced_kl=[0.0, 7.0])]
        found = {
            (one.metric, one.sample_id): one.value for one in measured(again, full, "paper", is_full, stored(table))
        }
        assert found["fidelity_kl", "s3"] == 7.0 and found["fidelity_kl", "s0"] == pytest.approx(0.2)
        again = [one | {"slim": None} for one in slim]
        assert "fidelity_kl" not in {one.metric for one in measured(again, full, "paper", is_full, stored(table))}


def test_agreement_of_many_cells_is_what_measured_gives_each():
    """Seeded answers with missing and failed samples, with and without `full`, and longer than what is compared at once."""
    rng = np.random.default_rng(0)
    for number in range(12):
        protocols = {f"{p}{i}": p for p in ("paper", "strict") for i in range(4)}
        full = {p: f"{p}0" for p in ("paper", "strict")[: 1 + number % 2]}
        rows = []
        for cell in protocols:
            for sample in np.flatnonzero(rng.random(9) < 0.8):
                status = str(rng.choice(["ok", "ok", "ok", "oom"] if number % 4 else ["oom", "nan"]))
                tokens = rng.integers(0, 3, size=rng.integers(0, 4)).tolist() if status == "ok" else None
                rows.append(row(f"s{sample}", status, cell=cell, token_ids=tokens, cluster=f"k{sample // 2}"))
        answers = pa.Table.from_pylist(rows, schema=pa.schema([RESPONSES.field(name) for name in COLUMNS]))
        cells = bare(answers, full, protocols)
        with mock.patch.object(agreement_module, "AT_ONCE", 7):
            tables = list(agreement(answers, cells, full, protocols))
        assert [set(table["metric"].to_pylist()) for table in tables] <= [{"divergence"}, {"same_answer"}]
        found = [one for table in tables for one in table.to_pylist()]
        for cell, protocol in protocols.items():
            own = [one for one in rows if one["cell"] == cell]
            others = {one["sample_id"]: one for one in rows if one["cell"] == full.get(protocol)}
            wanted = measured(own, others, protocol, cell == full.get(protocol))
            given = [one for one in found if one["cell"] == cell]
            names = ("sample_id", "cluster", "metric", "value", "status")
            assert [tuple(one[name] for name in names) for one in given] == [score[:5] for score in wanted]


@each("column, value", [("slim", True), ("forced_kl", [0.1]), ("reference_samples", ["a", "b"])])
def test_a_cell_of_which_more_is_known_than_its_answers_is_not_bare(column, value):
    full, protocols = {"paper": "f"}, {"f": "paper", "c": "paper", "d": "strict"}
    for told, left in (("c", {"f", "d"}), ("f", {"d"}), ("d", {"f", "c"})):
        rows = [row(cell=cell, **({column: value} if cell == told else {})) for cell in protocols]
        answers = pa.Table.from_pylist(rows, schema=pa.schema([RESPONSES.field(name) for name in COLUMNS]))
        assert bare(answers, full, protocols) == left
