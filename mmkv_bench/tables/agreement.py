"""Checks that stored scores belong to the stored answers, and metrics to the stored scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import StoreError
from mmkv_bench.statistics.metric_kinds import CAPS, aggregate_of
from mmkv_bench.tables.scores import capped

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from mmkv_bench.store.store import Store

AT_ONCE = 1 << 18  # scores that are summed at a time
CLOSE = 1e-9  # of sums that were made in another order
SUMMED = ("cell", "sample_id", "metric", "status", "value", "parts")
"""Columns of scores that are read to sum them, and to tell which answers they are of."""
_METRICS = ("cell", "metric", "n", "n_ok", "value", "value_failures_zero", "answers_digest")


def agreeing(store: Store, samples: pa.Table, metrics: pa.Table) -> pa.Table:
    """Scores without those of cells that count as not scored, which tables say of their answers: these were made again since, or
    the cell's metrics were made of more scores, or there are none.

    samples, metrics: of the same cells; samples: coded, of some metrics or of all.

    Raises:
        StoreError: scores of answers that the store does not hold, metrics of other scores than it holds.
    """
    import pyarrow as pa

    from mmkv_bench.store.parts import is_in
    from mmkv_bench.store.tally import tally

    counted, rows = tally(store), metrics.select(_METRICS).to_pylist()
    digests, clusters = counted.digests, counted.clusters
    lost = {row["cell"]: count for row in rows if (count := row["n"] - digests.get(row["cell"], (0, ""))[0]) > 0}
    if lost:
        raise StoreError(
            f"{store.root} holds scores of {sum(lost.values())} answers in {len(lost)} cells (first {min(lost)[:8]}) without the "
            "answers: restore its folder responses/, or run the same command again, which makes and scores them anew"
        )
    sums = Sums(samples)
    stale = sums.with_scores() - {row["cell"] for row in rows}
    stale |= sums.cells_beside(rows)
    for row in rows:
        if row["cell"] not in sums.cells:
            continue
        n, digest = digests[row["cell"]]
        if row["answers_digest"] is not None and n == row["n"] and digest != row["answers_digest"]:
            stale.add(row["cell"])
        elif (wrong := sums.contradicts(row, clusters[row["cell"]] if n == row["n"] else None)) and row[
            "cell"
        ] not in stale:
            raise StoreError(
                f"{store.root}: {row['metric']} of cell {row['cell'][:8]} is {wrong}: samples or metrics were changed after "
                "scoring; restore both folders from a copy, or move both away and run the same command with stage=score, which "
                "computes them again from the answers"
            )
    if not stale:
        return samples
    return samples.filter(is_in(samples["cell"], pa.array(sorted(sums.with_scores() - stale), pa.string())))


class Sums:
    """Counts of a cell's scores of a metric, of the ok and known ones, and the sums of their values or of their parts; of
    samples with their clusters, where these are read, too."""

    def __init__(self, samples: pa.Table) -> None:
        import numpy as np
        import pyarrow.compute as pc

        from mmkv_bench.store.tally import clusters_of

        table = samples.select(["cell", "metric", "status", "value", "parts"]).unify_dictionaries()
        self.cells, self._metrics = (_codes(table, name) for name in ("cell", "metric"))
        size = len(self.cells) * len(self._metrics)
        self._n, self._ok, self._values = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size)
        self._parts: dict[int, np.ndarray] = {}
        self._clusters = np.zeros(size, np.uint64) if "cluster" in samples.column_names else None
        if self._clusters is not None:  # their dictionaries may differ from chunk to chunk
            for name in ("sample_id", "cluster"):
                table = table.append_column(name, samples[name])
        is_pooled = np.array([aggregate_of(name) is not None for name in self._metrics], bool)
        self._uncapped = np.zeros(size)
        for batch in table.to_batches(max_chunksize=AT_ONCE):
            of_cell, of_metric = (batch[name].indices.to_numpy().astype(np.int64) for name in ("cell", "metric"))
            key = of_cell * len(self._metrics) + of_metric
            self._n += np.bincount(key, minlength=size)
            if self._clusters is not None:
                np.add.at(self._clusters, key, clusters_of(batch["sample_id"], batch["cluster"]))  # modulo 2^64
            ok = pc.and_(pc.equal(batch["status"].cast("string"), "ok"), batch["value"].is_valid())
            self._ok += np.bincount(key[ok.to_numpy(zero_copy_only=False)], minlength=size)
            values = batch["value"].fill_null(0).to_numpy(zero_copy_only=False)
            self._values += np.bincount(key, capped(values, self._metrics, of_metric), minlength=size)
            self._uncapped += np.bincount(key, values, minlength=size)
            rows = np.flatnonzero(is_pooled[of_metric]) if is_pooled.any() else ()
            for number in np.unique(key[rows]) if len(rows) else ():
                self._add_parts(int(number), batch["parts"].take(np.flatnonzero(key == number)))

    def _add_parts(self, number: int, parts: pa.ListArray) -> None:
        lists = parts.drop_null()
        if len(lists):
            total = lists.flatten().to_numpy().reshape(len(lists), -1).sum(axis=0)
            self._parts[number] = total + self._parts.get(number, 0.0)

    def with_scores(self) -> set[str]:
        """The cells that have any."""
        import numpy as np

        names = list(self.cells)
        return {names[number] for number in np.unique(np.flatnonzero(self._n) // len(self._metrics))}

    def cells_beside(self, metrics: Sequence[Mapping[str, Any]]) -> set[str]:
        """Cells that have as many scores of some metric as no row of metrics says. Metrics that nothing was read of are not
        looked at."""
        import numpy as np

        n = self._n.reshape(len(self.cells), len(self._metrics))
        stated, read = np.zeros_like(n), np.asarray(n.any(axis=0))
        beside = set()
        for row in metrics:
            metric = self._metrics.get(row["metric"])
            if metric is None or not read[metric]:
                continue
            if row["cell"] in self.cells:
                stated[self.cells[row["cell"]], metric] = row["n"]
            elif row["n"]:
                beside.add(row["cell"])
        names = list(self.cells)
        differ = np.not_equal(n, stated)[:, read].any(axis=1)
        return beside | {names[number] for number in np.flatnonzero(differ)}

    def contradicts(self, row: Mapping[str, Any], clusters: int | None = None) -> str:
        """The contradiction between a row of metrics and its scores, or between their clusters and those of the answers
        (`Tally.clusters`); empty where neither does."""
        number = self._number(row)
        if number is None or not self._n[number]:
            return ""
        if self._ok[number] != row["n_ok"]:
            return f"of {row['n_ok']} samples in metrics/ and of {self._ok[number]} in samples/"
        if clusters is not None and self._clusters is not None and int(self._clusters[number]) != clusters:
            return "of samples in samples/ whose clusters are others than their answers have"
        stated = row["value"] if row["value"] is not None else row["value_failures_zero"]
        made = self._aggregate(row, number)
        if stated is None or made is None or _close(made, stated):
            return ""
        if row["metric"] in CAPS and _close(float(self._uncapped[number] / row["n"]), stated):
            return ""  # metrics that were written before there were caps
        return f"{stated:.6g} in metrics/ and {made:.6g} by the scores in samples/"

    def _number(self, row: Mapping[str, Any]) -> int | None:
        if row["cell"] not in self.cells or row["metric"] not in self._metrics:
            return None
        return self.cells[row["cell"]] * len(self._metrics) + self._metrics[row["metric"]]

    def _aggregate(self, row: Mapping[str, Any], number: int) -> float | None:
        aggregate = aggregate_of(row["metric"])
        if aggregate is None:
            return float(self._values[number] / row["n"]) if row["n"] else None
        return float(aggregate.function(self._parts[number])) if number in self._parts else None


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(1.0, abs(a), abs(b))


def _codes(table: pa.Table, name: str) -> dict[str, int]:
    """Text of a coded column -> its code."""
    column = table[name]
    return {text: code for code, text in enumerate(column.chunk(0).dictionary.to_pylist())} if column.num_chunks else {}
