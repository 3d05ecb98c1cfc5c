"""Promise: a run measures fidelity, and what its datasets ask for, without changing an answer; it says what is missing."""

from __future__ import annotations

import math
import shutil

import pytest

from mmkv_bench.evaluation import grader
from mmkv_bench.run import score_rows as answers_of_cells
from mmkv_bench.store.compact import pack
from mmkv_bench.store.store import Store
from tests.run import setting
from tests.run.setting import answers, done, responses

COMMAND = ("dataset=pages_walk", "method=[snapkv,h2o,kivi]", "budget=[16,48]", "protocol=[paper,strict]", "limit=2")
MEASURED = ("forced_kl", "forced_agree", "reference_nll", "reference_samples")
BOTH = ("dataset.measures=[ppl,self_rouge]", "dataset.metrics=[exact_match,ppl,rouge_l_sampled]")


@pytest.fixture(scope="module")
def on(tmp_path_factory):
    root = tmp_path_factory.mktemp("on") / "rows"
    return root, done(root, *COMMAND, *BOTH)


def named(root) -> dict:
    """(method, budget, protocol, metric) -> metrics row."""
    cells = {cell["cell"]: cell for cell in Store(root).cells().to_pylist()}
    rows = setting.metrics(root)
    of = {row["cell"]: cells[row["cell"]] for row in rows}
    return {
        (of[row["cell"]]["method"], of[row["cell"]]["budget_entries"], of[row["cell"]]["protocol"], row["metric"]): row
        for row in rows
    }


@pytest.mark.full
def test_answers_are_those_of_a_run_that_measures_nothing(on, tmp_path):
    root, _ = on
    quiet = done(tmp_path, *COMMAND, "fidelity=off")
    assert answers(root, MEASURED) == answers(tmp_path, MEASURED)
    assert all(row[name] is None for row in responses(tmp_path).values() for name in MEASURED)
    assert "--metric fidelity" not in quiet.out and "answers lack" not in quiet.out


def test_every_answer_is_measured_and_scored(on):
    root, outcome = on
    full = {cell["cell"] for cell in Store(root).cells().to_pylist() if cell["base"] == "full"}
    tokens = {(cell, sample): row["n_tokens"] for (cell, sample), row in responses(root).items() if cell in full}
    for (cell, sample), row in responses(root).items():
        assert len(row["forced_kl"]) == len(row["forced_agree"]) in {n for (_, s), n in tokens.items() if s == sample}
        assert len(row["reference_nll"]) > 3 and (row["reference_samples"] is not None) == (cell in full)
    rows = named(root)
    for protocol in ("paper", "strict"):
        assert rows["full", None, protocol, "fidelity_kl"]["value"] < 1e-9
        kl = [rows["snapkv", budget, protocol, "fidelity_kl"]["value"] for budget in (16, 48)]
        assert kl[0] > kl[1] > 1e-4, "less cache, more divergence"
        ppl = [rows[name, budget, protocol, "ppl"]["value"] for name, budget in (("full", None), ("snapkv", 16))]
        assert 1.0 <= ppl[0] < 1.1 < ppl[1]
        assert rows["full", None, protocol, "rouge_l_sampled"]["value"] == pytest.approx(1.0)
    *printed, _ = outcome.out.splitlines()  # the last one is the JSON document
    titles = [line.split("**")[1] for line in printed if line.startswith("**")]
    assert sorted(titles) == sorted([f"pages_walk_small, {m}" for m in ("exact_match", "ppl", "rouge_l_sampled")] * 2)
    assert any(line.endswith("--metric fidelity") for line in printed)


def test_perplexity_is_that_of_the_stored_likelihoods(on):
    root, _ = on
    by_cell: dict[str, list[float]] = {}
    for (cell, _), row in responses(root).items():
        by_cell.setdefault(cell, []).extend(row["reference_nll"])
    for row in setting.metrics(root):
        if row["metric"] == "ppl":
            nll = by_cell[row["cell"]]
            assert row["value"] == pytest.approx(math.exp(sum(nll) / len(nll)))


@pytest.mark.slow
def test_scores_of_some_cells_at_a_time_are_those_of_all_at_once(on, tmp_path, monkeypatch):
    root = tmp_path / "rows"
    shutil.copytree(on[0], root)
    before, answered = scores_of(root), responses(root)
    for read, rows, made in ((1, 1, 1), (12, 4, 6)):  # answers: of one cell, and of 6, 2 and 3
        monkeypatch.setattr(answers_of_cells, "AT_ONCE", read)
        monkeypatch.setattr(answers_of_cells, "ROWS_AT_ONCE", rows)
        monkeypatch.setattr(grader, "READ", made)
        for name in ("samples", "metrics"):
            shutil.rmtree(root / name)
        done(root, *COMMAND, *BOTH, "stage=score")
        assert len(list((root / "samples").glob("together-*"))) == 1 and scores_of(root) == before
    some = dict(list(answered)[::3])  # cells of which one answer is scored again, between others that stay
    Store(root).forget_scores({cell: [sample] for cell, sample in some.items()})
    assert scores_of(root) != before and 1 < len(some) < len({cell for cell, _ in answered})
    done(root, *COMMAND, *BOTH, "stage=score")
    assert scores_of(root) == before


@pytest.mark.full
def test_a_slim_store_takes_a_further_method_and_keeps_what_was_measured(on, tmp_path):
    root = tmp_path / "rows"
    shutil.copytree(on[0], root)
    before = scores_of(root)
    pack(Store(root), slim=True)
    rows = responses(root)
    assert all(row["slim"] and row["forced_kl"] is None and row["reference_nll"] is None for row in rows.values())
    again = done(root, *COMMAND, *BOTH)
    assert again.generated == 0 and "answers lack" not in again.out
    assert scores_of(root) == before
    more = ("method=[snapkv,h2o,kivi,streamingllm]", *(part for part in COMMAND if not part.startswith("method")))
    done(root, *more, *BOTH)
    after, kept = scores_of(root), setting.commits(root)
    assert [
        {key: row for key, row in table.items() if key in old} for table, old in zip(after, before, strict=True)
    ] == before
    assert {key: kept[key] for key in rows} == {key: (row["committed_at"], row["worker"]) for key, row in rows.items()}
    new = [row for key, row in responses(root).items() if key not in rows]
    assert len({row["cell"] for row in new}) == 4 and all(row["forced_kl"] for row in new)


def scores_of(root) -> list[dict]:
    """samples and metrics rows by their keys."""
    samples = {(row["cell"], row["sample_id"], row["metric"]): row for row in setting.scores(root)}
    return [samples, {(row["cell"], row["metric"]): row for row in setting.metrics(root)}]


@pytest.mark.full
def test_a_method_that_comes_later_is_held_against_the_same_answers(on, tmp_path):
    few = ("dataset=pages_walk", "budget=[16,48]", "protocol=[paper,strict]", "limit=2", *BOTH)
    done(tmp_path, *few, "method=snapkv")
    done(tmp_path, *few, "method=[snapkv,h2o,kivi]")
    assert setting.everything(tmp_path) == setting.everything(on[0])
    later, at_once = named(tmp_path), named(on[0])
    for key in later:
        assert later[key]["value"] == pytest.approx(at_once[key]["value"], abs=1e-6)


@pytest.mark.full
def test_a_run_says_which_stored_answers_lack_what_it_asks_for(tmp_path):
    few = ("dataset=pages_walk", "method=snapkv", "budget=16", "limit=1")
    done(tmp_path, *few, "fidelity=off")
    again = done(tmp_path, *few, *BOTH[:1])
    assert again.generated == 0
    assert "note: answers lack fidelity (2 of 2 answers), ppl (2 of 2 answers), " in again.out
    more = done(tmp_path, *few, "limit=3", *BOTH)
    assert more.generated == 2
    part = "2 of 6 answers"  # those of the first sample, by two cells
    assert f"answers lack fidelity ({part}), ppl ({part}), self_rouge ({part})" in more.out
    assert f"Not measured: {part}. Run again with out=<another folder> to measure them." in more.out
    assert "not judged" not in more.out.lower()


@pytest.mark.slow
def test_alone_nothing_is_measured_and_asking_for_it_is_answered(tmp_path, caplog):
    done(tmp_path, "dataset=pages_walk", "method=snapkv", "budget=16", "limit=1", "sharing=off", *BOTH[:1])
    assert all(row[name] is None for row in responses(tmp_path).values() for name in MEASURED)
    assert "sharing=off measures no ppl and no self_rouge" in caplog.text
