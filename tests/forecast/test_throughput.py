"""Rates at which stored rows were made: medians of the time between one writer's commits, as a slow loop finds them."""

from __future__ import annotations

from itertools import groupby
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest

from mmkv_bench.forecast import throughput
from mmkv_bench.forecast.text import duration
from mmkv_bench.plan.plan import Coverage
from mmkv_bench.store.compact import pack
from mmkv_bench.store.store import Store
from tests.store.store_examples import cell, response

ALONE = SimpleNamespace(questions_key=None)  # one question a document


def slow(store: Store, dataset: str | None) -> float:
    """Seconds of a row, commit by commit."""
    rows = sorted(store.responses().to_pylist(), key=lambda row: (row["worker"], row["dataset"], row["committed_at"]))
    rows = [row for row in rows if row["cell"] != "other"]
    found = []
    for (_, name), own in groupby(rows, lambda row: (row["worker"], row["dataset"])):
        commits = [(when, len(list(same))) for when, same in groupby(own, lambda row: row["committed_at"])]
        gaps = zip(commits, commits[1:], strict=False)
        found += [(b[0] - a[0]).total_seconds() / b[1] for a, b in gaps if dataset in (None, name)]
    return median(found)


def test_rates_are_medians_over_the_commits_of_the_model(tmp_path):
    store = Store(tmp_path)
    store.write_cells([cell("c0"), cell("c1"), cell("d0", dataset="docs"), cell("other", model_fingerprint="m2")])
    with store.writer("w0") as first, store.writer("w1") as second:
        for sample in range(6):
            (first if sample % 3 else second).commit([response(sample), response(sample, "c1")])
            second.commit([response(sample, "other")])
        for sample in range(4):
            first.commit([response(sample, "d0", dataset="docs")])
    cells = [SimpleNamespace(cell=name, model_fingerprint="m1") for name in ("c0", "c1", "new")]
    parts = [
        SimpleNamespace(
            dataset=dataset, cells=cells, samples=[f"s{number:04d}" for number in range(8)], changed={}, spec=ALONE
        )
        for dataset in ("pages", "unseen")
    ]
    plan = SimpleNamespace(cells=cells, parts=parts)
    pages, unseen = throughput.rates(plan, Coverage(store.responses()), store)
    assert (pages.missing, pages.own, unseen.own) == (3 * 8 - 2 * 6, True, False)
    assert pages.seconds == pytest.approx(slow(store, "pages"))
    assert unseen.seconds == pytest.approx(slow(store, "pages"))
    assert unseen.rows == 2  # the commits of docs have one row, the plan has three cells
    assert pages.hours == pytest.approx(12 * pages.seconds / 3600) and pages.commits == 4
    assert "median of 4 commits on" in throughput.lines([pages])[0]
    assert ", of its other datasets on" in throughput.lines([unseen])[0]
    total = throughput.lines([pages, unseen])[-1]
    assert total.startswith(f"measured   {duration(pages.hours + unseen.hours)} in all") and "core hours" in total
    parts[0].cells = cells[:1] * 7  # a plan of seven cells: no commit is like that
    (many, _) = throughput.rates(plan, Coverage(store.responses()), store)
    assert not many.alike and many.commits == 4 and "unlike this plan's" in throughput.lines([many])[0]
    plan.cells = [SimpleNamespace(cell="x", model_fingerprint="m3")]
    (none, _) = throughput.rates(plan, Coverage(store.responses()), store)
    assert none.hours is None and throughput.lines([none])[0].startswith("measured   no rate")
    assert throughput.lines([none, pages]) == throughput.lines([pages])


def test_rows_packed_without_their_times_give_no_rate(tmp_path):
    store = Store(tmp_path)
    store.write_cells([cell("c0"), cell("c1", dataset="docs")])
    for first in (0, 3):  # two packs leave each cell two times of commit, which are no times of samples
        with store.writer("w") as writer:
            for sample in range(first, first + 3):
                writer.commit([response(sample)])
        pack(store, slim=True)
    cells = [SimpleNamespace(cell=name, model_fingerprint="m1") for name in ("c0", "c1")]
    samples = [f"s{n:04d}" for n in range(9)]
    parts = [SimpleNamespace(dataset="pages", cells=cells[:1], samples=samples, changed={}, spec=ALONE)]
    plan = SimpleNamespace(cells=cells, parts=parts)
    (rate,) = throughput.rates(plan, Coverage(store.responses()), Store(tmp_path))
    assert rate.hours is None and rate.missing == 3
    assert "the 6 rows of this model there were packed without their times" in throughput.lines([rate])[0]
    with store.writer("w") as writer:
        for sample in range(6, 8):
            writer.commit([response(sample)])
    (rate,) = throughput.rates(plan, Coverage(store.responses()), Store(tmp_path))
    assert rate.commits == 1 and rate.missing == 1 and rate.hours


def test_commits_of_a_documents_questions_are_taken_together():
    """The first question's commit has all the work of four; the median of single commits would be that of the others."""
    seconds, sizes = np.array([8.0, 0.1, 0.1, 0.1] * 5), np.full(20, 4)
    assert throughput._median(seconds, sizes, 4.0) == pytest.approx(8.3 / 16)
    assert throughput._median(seconds, sizes, 1.0) == pytest.approx(0.1 / 4)
    assert throughput._median(seconds[:2], sizes[:2], 4.0) == pytest.approx(8.1 / 8)
