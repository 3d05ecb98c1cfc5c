"""Promise: measures of stored rows are what their definitions give by hand, and nothing is made up for what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from mmkv_bench.datasets.rouge import rouge_l
from mmkv_bench.evaluation import extra_metrics
from mmkv_bench.evaluation.extra_metrics import COLUMNS, MEASURES, NAMES, POOLED, measured
from mmkv_bench.evaluation.samples import SampleScore
from mmkv_bench.statistics import metric_kinds as known
from mmkv_bench.store.schema import RESPONSES, SAMPLES
from tests.each import each
from tests.evaluation import measures_by_row

_SCHEMA = pa.schema([RESPONSES.field(name) for name in COLUMNS])
_STORED = pa.schema([SAMPLES.field(name) for name in ("cell", *SampleScore._fields)])


def row(sample: str = "s0", status: str = "ok", **changed) -> dict:
    ok = {"answer": "a b c", "token_ids": [5, 6, 7, 2]} if status == "ok" else {}
    empty = dict.fromkeys(COLUMNS)
    return empty | {"cell": "c", "sample_id": sample, "cluster": "k", "status": status, "token_ids": []} | ok | changed


def table(rows: Sequence[Mapping]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=_SCHEMA)


def of_cells(rows, full, protocols, baselines, before=None) -> dict[str, list[SampleScore]]:
    """Cell -> its scores, in their order."""
    found: dict[str, list[SampleScore]] = {cell: [] for cell in protocols}
    for scores in measured(table(rows), table(full), protocols, baselines, before):
        for one in scores.to_pylist():
            parts = None if one.get("parts") is None else tuple(one["parts"])
            found[one.pop("cell")].append(SampleScore(**one | {"parts": parts}))
    return found


def scored(rows, full=(), protocol="paper", is_full=False, before=None) -> list[SampleScore]:
    others = [one | {"cell": "full"} for one in full]
    protocols = {"c": protocol, "full": protocol}
    return of_cells(rows, others, protocols, ["c"] if is_full else ["full"], before)["c"]


def values(rows, full=(), protocol="paper", is_full=False) -> dict:
    """(measure, sample) -> score."""
    scores = scored(rows, full, protocol, is_full)
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


def test_a_continuation_has_means_over_stretches_of_its_tokens():
    kl = [float(number) for number in range(1, 101)]  # at token n it is n, in nats
    lists = {"forced_kl": [0.0, *kl[1:]], "forced_agree": [number % 4 == 0 for number in range(1, 101)]}
    full = [row(token_ids=[5, 6])]
    found = values([row(**lists)], full)
    assert found["fidelity_kl_to_32", "s0"].value == (2 + 32) / 2, "without the token of the full prefill"
    assert [found[f"fidelity_kl_to_{end}", "s0"].value for end in (64, 128)] == [(33 + 64) / 2, (65 + 100) / 2]
    assert [found[f"fidelity_top1_to_{end}", "s0"].value for end in (64, 128)] == [1 / 4, 1 / 4]
    assert ("fidelity_kl_to_256", "s0") not in found, "it ends before"
    own = values([row(token_ids=[5, 6], **lists)], full, is_full=True)
    assert ("divergence", "s0") not in own and own["fidelity_kl", "s0"].value == pytest.approx(51)
    answered = [row(token_ids=[*range(100)])]
    assert not [name for name, _ in values([row(**lists)], answered) if "_to_" in name], "of full's own answer"


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


def stored(scores: Sequence[SampleScore], cell: str = "c") -> pa.Table:
    rows = [score._asdict() | {"cell": cell, "parts": score.parts and list(score.parts)} for score in scores]
    return pa.Table.from_pylist(rows, schema=_STORED)


def test_a_slim_row_keeps_the_measures_whose_lists_it_lost():
    lists = {"forced_kl": [0.0, 0.3, 0.1], "forced_agree": [True, False, True], "reference_nll": [0.5, 0.25]}
    short = {"forced_kl": [0.0], "forced_agree": [True], "reference_nll": [0.5]}  # its fidelity means nothing
    of_full = {**lists, "reference_samples": ["a b", "a c"]}
    states = [lists, short, {}]
    for is_full in (True, False):
        rows = [row(f"s{i}", **lists_of) for i, lists_of in enumerate(states)] + [row("s3", "oom")]
        full = [row(f"s{i}", **of_full) for i in range(4)]
        whole = scored(rows, full, is_full=is_full)
        before = stored(whole)
        slim = [one | dict.fromkeys(lists) | {"slim": True} for one in rows]
        assert scored(slim, full, is_full=is_full, before=before) == whole
        assert scored(slim, full, is_full=is_full) != whole
        # a row that was made again counts as it is
        again = [slim[0], *rows[1:3], row("s3", forced_kl=[0.0, 7.0])]
        scores = scored(again, full, is_full=is_full, before=before)
        found = {(one.metric, one.sample_id): one.value for one in scores}
        assert found["fidelity_kl", "s3"] == 7.0 and found["fidelity_kl", "s0"] == pytest.approx(0.2)
        again = [one | {"slim": None} for one in slim]
        assert "fidelity_kl" not in {one.metric for one in scored(again, full, is_full=is_full, before=before)}


def _drawn(rng: np.random.Generator, cell: str, sample: int, status: str) -> dict:
    """A row with any of what may be stored."""

    def numbers(low: int = 0) -> list[float]:
        return rng.choice([0.1, 0.2, 0.3, 0.7, 1e-17, 5.0], size=rng.integers(low, 5)).tolist()

    def maybe(value):
        return value if rng.random() < 0.8 else None

    words = rng.choice(["a b", "a. c", "b", ""], size=3).tolist()
    given = {"forced_kl": maybe(numbers()), "forced_agree": maybe((rng.random(rng.integers(0, 4)) < 0.7).tolist())}
    given |= {"reference_nll": maybe(numbers()), "reference_samples": maybe(words[:2])}
    given |= {"slim": maybe(rng.random() < 0.3)}
    given |= {"answer": words[2], "token_ids": rng.integers(0, 3, size=rng.integers(0, 4)).tolist()}
    return row(f"s{sample}", status, cell=cell, cluster=f"k{sample // 2}", **(given if status == "ok" else {}))


def test_many_cells_have_the_measures_that_each_has_row_by_row():
    """Seeded rows with missing, failed and slim samples, with and without `full`, more than what is worked on at once."""
    rng = np.random.default_rng(0)
    protocols = {f"{p}{i}": p for p in ("paper", "strict") for i in range(4)}
    for number in range(12):
        full = {p: f"{p}0" for p in ("paper", "strict")[: number % 3]}
        statuses = ["ok", "ok", "ok", "oom"] if number % 4 else ["oom", "nan"]
        rows = [
            _drawn(rng, cell, sample, str(rng.choice(statuses)))
            for cell in protocols
            for sample in np.flatnonzero(rng.random(9) < 0.8)
        ]
        bases = [cell for cell in protocols if cell.endswith("0")]
        of_full = [one for one in rows if one["cell"] in full.values()]
        with mock.patch.object(extra_metrics, "AT_ONCE", 7):
            earlier = [_drawn(rng, one["cell"], int(one["sample_id"][1:]), "ok") for one in rows]
            known = of_cells(earlier, [], protocols, bases)
            before = pa.concat_tables([stored(scores[::2], cell) for cell, scores in known.items()])
            found = of_cells(rows, of_full, protocols, bases, before)
        for cell, protocol in protocols.items():
            own = [one for one in rows if one["cell"] == cell]
            others = {one["sample_id"]: one for one in rows if one["cell"] == full.get(protocol)}
            held = measures_by_row.stored([one for one in before.to_pylist() if one["cell"] == cell])
            assert found[cell] == measures_by_row.measured(own, others, protocol, cell in bases, held)
    assert set(MEASURES) == NAMES and len(NAMES & {one.metric for scores in known.values() for one in scores}) > 4
