"""Promise: ranks over tasks are those that every pair of the methods proves on each task at its share of the error, and their
means hold the true ones."""

from __future__ import annotations

import numpy as np
import pytest

from mmkv_bench.errors import ConfigError
from mmkv_bench.statistics.cluster_sums import Samples
from mmkv_bench.statistics.paired_tests import compare_column
from mmkv_bench.tables.build import build
from mmkv_bench.tables.dataset_groups import tables_of_ranks, task_ranks
from mmkv_bench.tables.formats import markdown as as_markdown
from tests.tables.examples import Example, zeros_and_ones

RIGHT = {"a": {"snapkv": 80, "keydiff": 60, "mmshift": 20}, "b": {"snapkv": 60, "keydiff": 62, "mmshift": 5, "h2o": 90}}


def tables(**told):
    made = Example()
    for dataset, methods in RIGHT.items():
        made.add("full", None, zeros_and_ones(100, 100), dataset=dataset, **told)
        for method, right in methods.items():
            values = np.random.default_rng(len(method)).permutation(zeros_and_ones(right, 100)).tolist()
            made.add(method, 64, values, dataset=dataset, **told)
    return build(made.rows())


def test_ranks_are_a_slow_loops_over_all_pairs_of_those_on_every_task():
    whole = tables()
    [found] = task_ranks(whole)
    names = ["keydiff", "mmshift", "snapkv"]
    assert sorted(found.methods) == names and found.apart == ("h2o",) and found.budget == "64"
    for task, table in enumerate(found.tables):
        column = table.columns["64"]
        p = {}
        for i, (a, b) in enumerate(zip(column.a, column.b, strict=True)):
            p[column.names[a], column.names[b]] = p[column.names[b], column.names[a]] = column.p[i]
        ordered = sorted(p[x, y] for x in names for y in names if x < y)
        passed = 0
        while passed < 3 and ordered[passed] <= 0.025 / (3 - passed):
            passed += 1
        largest = max(ordered[:passed], default=-1.0)
        for at, name in enumerate(found.methods):
            better = worse = 0
            for other in names:
                if other != name and (p[name, other] <= largest or p[name, other] <= 0.025 / 2):
                    ahead = RIGHT[table.dataset][other] > RIGHT[table.dataset][name]
                    better, worse = better + ahead, worse + (not ahead)
            assert found.ranks[task, at].tolist() == [1 + better, 3 - worse]
    assert found.means.tolist() == [
        [sum(r[0] for r in rs) / 2, sum(r[1] for r in rs) / 2] for rs in found.ranks.swapaxes(0, 1)
    ]
    said = as_markdown(tables_of_ranks(whole))
    assert (
        "On some of the tasks only: h2o." in said
        and "of m = 3 compared on all 2 tasks, each task at p <= 0.05 / 2" in said
    )


def test_rankings_of_the_embedded_model_say_that_they_predict_no_papers():
    said = "Rankings of the embedded model predict no paper's: mean Kendall's tau -.15"
    assert said in as_markdown(tables_of_ranks(tables()))
    assert said not in as_markdown(tables_of_ranks(tables(model="qwen2_5_vl_7b")))


def test_one_task_or_failed_samples_give_no_ranks_over_tasks():
    with pytest.raises(ConfigError, match="they need two tasks in which the same two methods"):
        tables_of_ranks(tables()[:1])


@pytest.mark.full
def test_true_mean_ranks_are_within_in_19_of_20_draws():
    random, draws, missed = np.random.default_rng(0), 400, 0
    for _ in range(draws):
        within = np.ones(6, bool)
        low, high, truth = np.zeros(6), np.zeros(6), np.zeros(6)
        for _ in range(3):
            chance = random.permutation(np.linspace(0.4, 0.7, 6))
            values = (random.random((6, 80)) < chance[:, None]).astype(float)
            column = compare_column([*"abcdef"], Samples(values, np.arange(80), None, True))
            ranks = column.ranks_among([*"abcdef"], 0.05 / 3)
            low, high, truth = low + ranks[:, 0], high + ranks[:, 1], truth + np.argsort(np.argsort(-chance)) + 1
        within = (low <= truth) & (truth <= high)
        missed += not within.all()
    assert missed <= 30, "of 400, at 5 % and three standard errors"
