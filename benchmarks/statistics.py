"""Time and peak memory of the streaming attention statistics beside their naive forms.

    python benchmarks/statistics.py                      # prints a Markdown report
    python benchmarks/statistics.py --write results/bench/statistics.md
    python benchmarks/statistics.py --short              # without T = 32768

The problem is one KV group of Qwen2.5-VL-7B: 7 query heads, 1 KV head, head dimension 128, float32, random values.
Time is CPU time of one thread (other work on the machine does not count), the minimum over repeats. Peak memory is the
largest number of bytes that the allocator holds at once beyond the inputs, from torch.profiler's allocation events; it
is measured in a run of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]) == Path(__file__).parent:
    del sys.path[0]  # Python puts this folder first; this file must not stand in for the standard `statistics` module

import argparse
import datetime
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mmkv_bench.compression.numerics.attention import column_sums, window_mass
from mmkv_bench.compression.numerics.proxies import group_mass, group_votes

HEADS, DIM = 7, 128
WINDOW, SAMPLES, GROUPS, TAU = 32, 512, 32, 0.95
SCALING = DIM**-0.5
COMPARED, STREAMED = (2048, 8192), (32768,)


@dataclass(frozen=True)
class Case:
    """One statistic: both forms take (query [7,T,128], key [1,T,128], proxies [7,512,128])."""

    name: str
    streaming: Callable[[Tensor, Tensor, Tensor], Tensor]
    naive: Callable[[Tensor, Tensor, Tensor], Tensor]
    rows: Callable[[int], int]  # attention rows per query head that the naive form materialises


def naive_column_sums(query: Tensor, key: Tensor, proxies: Tensor) -> Tensor:
    scores = query @ key.transpose(1, 2) * SCALING
    scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool).triu_(1), float("-inf"))
    return scores.softmax(-1).sum((0, 1))[None]


def naive_window(query: Tensor, key: Tensor, proxies: Tensor) -> Tensor:
    total = key.shape[1]
    scores = query[:, -WINDOW:] @ key.transpose(1, 2) * SCALING
    scores.masked_fill_(torch.ones(WINDOW, total, dtype=torch.bool).triu_(total - WINDOW + 1), float("-inf"))
    return scores.softmax(-1).mean((0, 1))[None]


def naive_group_mass(query: Tensor, key: Tensor, proxies: Tensor) -> Tensor:
    scores = (proxies @ key.transpose(1, 2) * SCALING).softmax(-1).mean(0)
    return scores.view(GROUPS, SAMPLES // GROUPS, -1).sum(1)


def naive_votes(query: Tensor, key: Tensor, proxies: Tensor) -> Tensor:
    mass, order = naive_group_mass(query, key, proxies).sort(dim=-1, descending=True, stable=True)
    cum = mass.double().cumsum(-1)
    count = torch.searchsorted(cum, TAU * cum[:, -1:]) + 1
    members = torch.zeros_like(mass).scatter_(-1, order, (torch.arange(mass.shape[-1]) < count).float())
    return members.sum(0)[None]


CASES = (
    Case("column sums", lambda q, k, p: column_sums(q, k, SCALING), naive_column_sums, lambda length: length),
    Case(
        f"window mass, w={WINDOW}",
        lambda q, k, p: window_mass(q[:, -WINDOW:], k, SCALING),
        naive_window,
        lambda _: WINDOW,
    ),
    Case(
        f"group mass, N={SAMPLES} G={GROUPS}",
        lambda q, k, p: torch.cat([m[0, 0] for m in group_mass(p, k, SCALING, GROUPS)]),
        naive_group_mass,
        lambda _: SAMPLES,
    ),
    Case(f"votes, tau={TAU}", lambda q, k, p: group_votes(p, k, SCALING, GROUPS, TAU), naive_votes, lambda _: SAMPLES),
)


def cpu_seconds(work: Callable[[], Tensor], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def allocator_peak(work: Callable[[], Tensor]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    held = peak = 0
    for event in sorted(trace.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} GiB"


def seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def naive_bytes(case: Case, length: int) -> int:
    """Scores and softmax, the two float32 tensors that a naive form holds at once."""
    return 2 * HEADS * case.rows(length) * length * 4


def memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measure(case: Case, length: int) -> str:
    g = torch.Generator().manual_seed(length)
    query, proxies = torch.randn(HEADS, length, DIM, generator=g), torch.randn(HEADS, SAMPLES, DIM, generator=g)
    inputs = (query, torch.randn(1, length, DIM, generator=g), proxies)
    compare = length in COMPARED or naive_bytes(case, length) < memory() / 4
    repeats = 3 if compare else 1  # the largest problem runs long enough to be steady
    spent = cpu_seconds(lambda: case.streaming(*inputs), repeats)
    peak = allocator_peak(lambda: case.streaming(*inputs))
    start = f"| {case.name} | {length} | {seconds(spent)} | {size(peak)} |"
    if not compare:
        reason = "does not fit" if naive_bytes(case, length) > memory() else "not run"
        return f"{start} {reason} | {size(naive_bytes(case, length))} (computed) | - | - | - |"
    naive_spent = cpu_seconds(lambda: case.naive(*inputs), 2)
    naive_peak = allocator_peak(lambda: case.naive(*inputs))
    got, want = case.streaming(*inputs), case.naive(*inputs)
    error = f"{float(((got - want).abs() / want.abs().clamp_min(1e-30)).max()):.1e}"
    if case.name.startswith("votes"):
        error = f"{int((got != want).sum())} of {got.numel()} keys differ"
    return (
        f"{start} {seconds(naive_spent)} | {size(naive_peak)} | {naive_spent / spent:.2g}x | {naive_peak / peak:.3g}x |"
        f" {error} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", help="also write the report to this file")
    parser.add_argument("--short", action="store_true", help=f"leave out T = {STREAMED[0]}, minutes of CPU time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Streaming attention statistics against their naive forms",
        "",
        f"One KV group of Qwen2.5-VL-7B ({HEADS} query heads, 1 KV head, d = {DIM}), float32, random values, one thread.",
        "Time: CPU seconds, minimum over repeats in one process. Peak: allocator bytes beyond the inputs. Written by"
        " `python benchmarks/statistics.py`.",
        "",
        f"{datetime.date.today().isoformat()}, torch {torch.__version__}, Python {platform.python_version()},"
        f" {platform.machine()} CPU, {size(memory())} of memory.",
        "",
        "| statistic | T | streaming time | streaming peak | naive time | naive peak | time ratio | memory ratio |"
        " max relative difference |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    for case in CASES:
        for length in COMPARED + (() if options.short else STREAMED):
            lines.append(measure(case, length))
            print(lines[-1], flush=True)
    if options.write:
        with open(options.write, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
