"""Checks that stored scores belong to the stored answers, and stored metrics to the stored scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mmkv_bench.errors import StoreError
from mmkv_bench.statistics.metric_kinds import CAPS, aggregate_of
from mmkv_bench.store.parts import is_in
from mmkv_bench.store.store import Store
from mmkv_bench.store.tally import clusters_of, tally
from mmkv_bench.tables.sample_scores import apply_caps

AT_ONCE = 1 << 18  # scores summed at a time
CLOSE = 1e-9  # relative difference of sums that were added in another order
SUM_COLUMNS = ("cell", "sample_id", "metric", "status", "value", "parts")
"""Columns of `samples` that `sums_of` reads, and the sample ids."""
_METRICS = ("cell", "metric", "n", "n_ok", "value", "value_failures_zero", "answers_digest")


def drop_stale_scores(store: Store, samples: pa.Table, metrics: pa.Table) -> pa.Table:
    """Return `samples` without the scores of stale cells (stored settings). Their answers then count as not scored.

    A cell is stale if its answers were made again after scoring, if its metrics were computed from another number of scores, or
    if it has scores without metrics.

    Args:
        samples: scores by sample, of some or all metrics. Text columns are dictionary-encoded.
        metrics: `metrics` rows of the same cells.

    Raises:
        StoreError: the store has scores without their answers, or metrics that contradict its scores.
    """
    answer_tally, rows = tally(store), metrics.select(_METRICS).to_pylist()
    digests, clusters = answer_tally.digests, answer_tally.clusters
    missing_answers = {
        row["cell"]: count for row in rows if (count := row["n"] - digests.get(row["cell"], (0, ""))[0]) > 0
    }
    if missing_answers:
        raise StoreError(
            f"{store.root} has scores of {sum(missing_answers.values())} answers in {len(missing_answers)} cells "
            f"(first {min(missing_answers)[:8]}), but not the answers; "
            "restore the folder responses/, or run the same command again, "
            "which makes and scores these answers anew"
        )
    sums = sums_of(samples)
    scored = {cell for cell, _ in sums}
    stale = (scored - {row["cell"] for row in rows}) | miscounted_cells(sums, rows)
    for row in rows:
        if row["cell"] not in scored:
            continue
        n, digest = digests[row["cell"]]
        if row["answers_digest"] is not None and n == row["n"] and digest != row["answers_digest"]:
            stale.add(row["cell"])
        elif (
            row["cell"] not in stale
            and (score_sum := sums.get((row["cell"], row["metric"]))) is not None
            and (contradiction := score_sum.contradicts(row, clusters[row["cell"]] if n == row["n"] else None))
        ):
            raise StoreError(
                f"{store.root}: {row['metric']} of cell {row['cell'][:8]} is {contradiction}: "
                "samples or metrics were changed after scoring; restore both folders from a copy, "
                "or move both away and run the same command with stage=score, which computes both again from the answers"
            )
    if not stale:
        return samples
    return samples.filter(is_in(samples["cell"], pa.array(sorted(scored - stale), pa.string())))


@dataclass
class Sum:
    """Sums over the scores of one cell and metric.

    n: number of scores. ok: number of scores with status ok and a value.
    value: sum of the values, each limited to the metric's cap. uncapped: sum of the values as stored.
    clusters: sum of hashes of (sample, cluster); None if clusters were not read.
    parts: sums of the numbers from which a pooled metric is computed; None if no score has any.
    """

    n: int = 0
    ok: int = 0
    value: float = 0.0
    uncapped: float = 0.0
    clusters: int | None = None
    parts: np.ndarray | None = None

    def contradicts(self, row: Mapping[str, Any], clusters: int | None = None) -> str:
        """Return how the sums contradict the `metrics` row `row`, as text; "" if they do not.

        clusters: hash of the clusters of the answers (`Tally.clusters`), to compare with the scores'; None: not compared.
        """
        if self.ok != row["n_ok"]:
            return f"of {row['n_ok']} samples in metrics/ and of {self.ok} in samples/"
        if clusters is not None and self.clusters is not None and self.clusters != clusters:
            return "of samples in samples/ whose clusters differ from those of their answers"
        stored_value = row["value"] if row["value"] is not None else row["value_failures_zero"]
        aggregator = aggregate_of(row["metric"])
        if aggregator is None:
            recomputed_value = self.value / self.n
        elif self.parts is not None:
            recomputed_value = float(aggregator.function(self.parts))
        else:
            return ""
        if stored_value is None or _close(recomputed_value, stored_value):
            return ""
        if row["metric"] in CAPS and _close(self.uncapped / self.n, stored_value):
            return ""  # metrics that were written before caps existed
        return f"{stored_value:.6g} in metrics/ and {recomputed_value:.6g} by the scores in samples/"


Sums = dict[tuple[str, str], Sum]
"""(cell, metric) -> sums over the scores; only for metrics with scores in the cell."""


def sums_of(samples: pa.Table) -> Sums:
    """Return the sums over `samples`, the scores by sample, of which `AT_ONCE` are summed at a time."""
    table = samples.select(["cell", "metric", "status", "value", "parts"]).unify_dictionaries()
    with_clusters = "cluster" in samples.column_names
    for name in ("sample_id", "cluster") if with_clusters else ():  # their dictionaries may differ from chunk to chunk
        table = table.append_column(name, samples[name])
    sums: Sums = {}
    for batch in table.to_batches(max_chunksize=AT_ONCE):
        cells, metrics = (batch[name].dictionary.to_pylist() for name in ("cell", "metric"))
        cell_codes, metric_codes = (batch[name].indices.to_numpy().astype(np.int64) for name in ("cell", "metric"))
        values = batch["value"].fill_null(0).to_numpy(zero_copy_only=False)
        group_keys = cell_codes * len(metrics) + metric_codes
        columns = {
            "key": group_keys,
            "ok": pc.and_(pc.equal(batch["status"].cast("string"), "ok"), batch["value"].is_valid()),
            "value": apply_caps(values, metrics, metric_codes),
            "uncapped": values,
            "clusters": clusters_of(batch["sample_id"], batch["cluster"]) if with_clusters else group_keys,
        }
        aggregations = [([], "count_all"), *((name, "sum") for name in [*columns][1:])]
        for row in pa.table(columns).group_by("key").aggregate(aggregations).to_pylist():
            cell, metric = divmod(row["key"], len(metrics))
            total = sums.setdefault((cells[cell], metrics[metric]), Sum())
            total.n, total.ok = total.n + row["count_all"], total.ok + row["ok_sum"]
            total.value, total.uncapped = total.value + row["value_sum"], total.uncapped + row["uncapped_sum"]
            if with_clusters:
                total.clusters = ((total.clusters or 0) + row["clusters_sum"]) % 2**64
            if aggregate_of(metrics[metric]) is not None:
                parts_per_score = batch["parts"].take(np.flatnonzero(group_keys == row["key"])).drop_null()
                if len(parts_per_score):
                    part_sums = parts_per_score.flatten().to_numpy().reshape(len(parts_per_score), -1).sum(axis=0)
                    total.parts = part_sums if total.parts is None else total.parts + part_sums
    return sums


def miscounted_cells(sums: Sums, metrics: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the cells with a metric whose number of scores differs from `n` of its `metrics` row.

    Metrics without any score in `sums` are not compared.
    """
    metrics_with_scores = {metric for _, metric in sums}
    stated_counts = {(row["cell"], row["metric"]): row["n"] for row in metrics if row["metric"] in metrics_with_scores}
    return {
        key[0] for key in {*sums, *stated_counts} if (sums[key].n if key in sums else 0) != stated_counts.get(key, 0)
    }


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(1.0, abs(a), abs(b))
