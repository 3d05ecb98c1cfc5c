"""Measure the embedded model with the full cache and write its card: `python -m tools.train_tiny.evaluate`.

Every number is exact match of greedy answers through the stock processor and the stock `generate`, on pages that no
training or tuning saw. `--split dev` measures development pages and writes nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

from mmkv_bench.errors import MMKVError
from mmkv_bench.tiny import WEIGHTS
from mmkv_bench.tiny.pages import SIZES, TASKS

THRESHOLDS = {
    ("lookup", "small"): 0.98,
    ("chain3", "small"): 0.98,
    ("mi_lookup", "small"): 0.98,
    ("walk3", "small"): 0.96,
    ("mi_walk3", "small"): 0.96,
    ("lookup", "large"): 0.95,
    ("walk3", "large"): 0.90,
    ("handwritten", "small"): 0.88,
}
TYPEFACE_CELLS = (*((task, "small") for task in TASKS), ("lookup", "large"), ("walk3", "large"))
BATCH = {"small": 25, "large": 10}


def wilson(right: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95% Wilson score interval of a proportion (Wilson 1927)."""
    share = right / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, (centre - spread) / (1 + z * z / count)), min(1.0, (centre + spread) / (1 + z * z / count))


def measure(model: Any, processor: Any, task: str, size: str, split: str, count: int) -> dict[str, Any]:
    """Exact match, its interval and the share of right characters over samples 0 .. count - 1 of one cell."""
    from mmkv_bench.tiny.pages import make_sample
    from tools.train_tiny.answering import answer

    right, characters, total = 0, 0, 0
    for start in range(0, count, BATCH[size]):
        samples = [make_sample(task, size, split, index) for index in range(start, min(count, start + BATCH[size]))]
        for sample, given in zip(samples, answer(model, processor, samples), strict=True):
            right += given == sample.answer
            characters += sum(a == b for a, b in zip(given, sample.answer, strict=False))
            total += len(sample.answer)
    low, high = wilson(right, count)
    return {
        "task": task,
        "size": size,
        "split": split,
        "n": count,
        "exact_match": right / count,
        "interval_95": [low, high],
        "characters_right": characters / total,
        "threshold": THRESHOLDS.get((task, size)) if split == "test" else None,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny.evaluate", description=__doc__)
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="model folder (default: the shipped one)")
    parser.add_argument("--samples", type=int, default=500, help="per task, size and split")
    parser.add_argument("--split", choices=("test", "dev"), default="test", help="dev writes no card")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="with --split dev only")
    parser.add_argument("--attention-samples", type=int, default=50, help="pages per row of the attention report")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every cell, show each as it is done, and (test split) write card.json and README.md."""
    import torch

    from mmkv_bench.errors import ConfigError
    from tools.train_tiny.answering import load

    if options.split == "test" and options.tasks != list(TASKS):
        raise ConfigError("--tasks leaves tasks out, but a card needs all of them; add --split dev, or drop --tasks")
    if options.samples < 1:
        raise ConfigError(f"--samples {options.samples} measures nothing; give a number from 1 on")
    torch.set_num_threads(options.threads)
    model, processor = load(options.weights)
    cells = [(task, size, options.split) for size in SIZES for task in options.tasks]
    if options.split == "test":
        cells += [(task, size, "test_typeface") for task, size in TYPEFACE_CELLS]
    rows, started = [], time.monotonic()
    for number, (task, size, split) in enumerate(cells, 1):
        row = measure(model, processor, task, size, split, options.samples)
        rows.append(row)
        passed = time.monotonic() - started
        low, high = row["interval_95"]
        print(
            f"{number}/{len(cells)}  {task} {size} {split}: {row['exact_match']:.3f} [{low:.3f}, {high:.3f}] "
            f"n={row['n']}  {passed:.0f} s, about {passed / number * (len(cells) - number):.0f} s left",
            flush=True,
        )
    if options.split == "test":
        from tools.train_tiny.card import write_card

        for path in write_card(options.weights, rows, options.attention_samples):
            print(f"wrote {path}")
    return rows


def main(arguments: list[str] | None = None) -> int:
    try:
        run(parse(arguments))
    except MMKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
