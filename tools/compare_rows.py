"""`python -m tools.compare_rows <rows> <model> <rows> <model>`: paired differences of scores between two models.

A line is a pair of cells with equal dataset, method, protocol, budget, seed and parameters. A difference is the second
model's score minus the first's: the mean over common samples with the 95 % bootstrap interval over clusters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from mmkv_bench.api.rows import load_rows
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.statistics.intervals import intervals

KEYS = ["dataset", "metric", "protocol", "method", "budget_fraction", "budget_entries", "seed", "parameters"]


def scores(folder: Path, model: str, metric: str) -> pd.DataFrame:
    """Return one line per cell of a model and sample: `KEYS`, sample_id, cluster and value. Raises ConfigError without a cell."""
    rows = load_rows(folder)
    models = sorted(set(rows.cells["model"]))
    if model not in models:
        raise ConfigError(f"{folder} has no rows of {model}; it has those of {', '.join(models)}; name one of them")
    cells = rows.cells[rows.cells["model"] == model][
        ["cell", *(key for key in KEYS if key not in ("dataset", "metric"))]
    ]
    samples = rows.samples[["cell", "dataset", "sample_id", "cluster", "metric", "value"]]
    return samples[samples["metric"] == metric].merge(cells, on="cell").drop(columns="cell")


def differences(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Return one line per pair of cells: `KEYS`, n common samples, both means, the difference and its interval [low, high]."""
    both = first.merge(second, on=[*KEYS, "sample_id", "cluster"], suffixes=("_a", "_b"))
    lines = []
    for key, cell in both.groupby(KEYS, dropna=False, sort=False):
        apart = (cell["value_b"] - cell["value_a"]).to_numpy(float)
        (ends,) = intervals([(apart, cell["cluster"].to_numpy())], str(key[0]), share=False)
        means = cell["value_a"].mean(), cell["value_b"].mean(), apart.mean()
        lines.append([*key, len(apart), *means, ends.low, ends.high])
    return pd.DataFrame(lines, columns=[*KEYS, "n", "first", "second", "difference", "low", "high"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences as a table. Return 0, or 2 if a model has no rows or the two have no cell in common."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if len(words) != 4:
        print("error: give two folders of rows, and behind each a model of its rows", file=sys.stderr)
        return 2
    one, other = (Path(words[0]), words[1]), (Path(words[2]), words[3])
    try:
        first, second = (scores(folder, model, "exact_match") for folder, model in (one, other))
    except MMKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = differences(first, second)
    if table.empty:
        print(f"error: {one[1]} and {other[1]} have no cells in common; run the same grid with both", file=sys.stderr)
        return 2
    print(f"exact_match of {other[1]} minus {one[1]}, paired by sample; 95 % intervals over clusters\n")
    print(
        table.drop(columns=["parameters", "metric", "seed"]).to_string(index=False, float_format=lambda x: f"{x:.3f}")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
