"""Pieces of `benchmarks/gpu.py` that need torch in their own process; the last line of output is the result.

python -P benchmarks/on_device.py sums cuda 32768       # column sums, over the time of their products
python -P benchmarks/on_device.py kernels cuda run ...  # attention kernels of that command, by torch's profiler
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from mmkv_bench import devices

_STAMPED = ("schema_version", "committed_at", "created_at", "row_digest", "worker", "git_commit", "git_dirty")
_ATTENTION = re.compile(r"flash|fmha|attention|varlen|attn", re.IGNORECASE)


def sums(place: str, tokens: int, heads: int = 7, dim: int = 128) -> float:
    """Column sums of one KV head's group, over the time of their products: scores of every causal pair, twice, since the first
    pass finds each row's denominator."""
    from mmkv_bench.compression.numerics.attention import column_sums
    from mmkv_bench.forecast.device_speed import speed_of_device

    speed, device = speed_of_device(place), devices.at(place)
    dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(of, tokens, dim, generator=generator).to(device.place, dtype) for of in (heads, 1))
    best = least_seconds(lambda: column_sums(query, key, dim**-0.5), device)
    pairs = tokens * (tokens + 1) // 2 * heads
    return best * speed.rates[str(dtype).removeprefix("torch.")] / (2 * pairs * 2 * dim)


def least_seconds(work: Callable[[], object], device: devices.Device, rounds: int = 5) -> float:
    """Of one call, after two that warm up."""
    times = []
    for number in range(rounds + 2):
        device.synchronise()
        start = device.mark()
        work()
        end = device.mark()
        device.synchronise()
        if number >= 2:
            times.append(device.between(start, end))
    return min(times)


def kernels(place: str, words: list[str]) -> str:
    """Names of the attention kernels that this command runs, those with the most calls first."""
    from torch.profiler import ProfilerActivity, profile

    from mmkv_bench.cli.main import main

    with profile(activities=[ProfilerActivity.CUDA if place == "cuda" else ProfilerActivity.CPU]) as seen:
        if code := main(words):
            raise SystemExit(code)
    ours = sorted((-one.count, one.key) for one in seen.key_averages() if _ATTENTION.search(one.key))
    return "; ".join(f"{key[:80]} ({-count})" for count, key in ours[:4]) or "no kernel whose name says so"


def spread(rows: str, out: str, layers: int, heads: int) -> str:
    """A store whose rows say that a model of this shape divided as theirs did: layer and head i as theirs modulo their number."""
    from mmkv_bench.store.store import Store

    theirs, ours = Store(Path(rows)), Store(Path(out))
    cells = [row | {"model": f"{row['model']}, its heads repeated"} for row in theirs.cells().to_pylist()]
    ours.write_cells([{name: row[name] for name in row if name not in _STAMPED} for row in cells])
    with ours.writer("spread") as writer:
        for row in theirs.responses().to_pylist():
            of = row["kept"]
            row["kept"] = [[of[i % len(of)][j % len(of[0])] for j in range(heads)] for i in range(layers)]
            writer.commit([{name: row[name] for name in row if name not in _STAMPED}])
    return f"{len(cells)} cells, as of {layers} layers of {heads} KV heads"


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == "spread":
        print(spread(where, rest[0], int(rest[1]), int(rest[2])))
    else:
        print(f"{sums(where, int(rest[0])):.4f}" if what == "sums" else kernels(where, rest))
