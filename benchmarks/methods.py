"""What every method costs on one layer, beside one attention forward of that layer.

    python benchmarks/methods.py                                   # prints a Markdown report
    python benchmarks/methods.py --write results/bench/methods.md
    python benchmarks/methods.py --lengths 2048 --methods mmshift flashcache

Random float32 tensors in the layer shapes of Qwen2.5-VL-7B (28 query heads, 4 KV heads) and LLaVA-1.6-Vicuna-7B (32 and
32), head dimension 128; 80 % of the tokens are visual, 20 % of the entries stay. A method's work on a layer is done as
a run does it, in three phases: scoring (what is gathered while the prompt passes, the score, the allocator's summary),
selecting (allocation and selection) and reducing (gathering, merging, quantising, what the decode policy sets up).

Times are CPU seconds of one thread, the least of some rounds; in each round every method and the attention forward
(causal scaled_dot_product_attention, key and value heads repeated beforehand) take their turn, so that a busy machine
disturbs them alike. Extra memory is the most bytes that the allocator holds at once beyond the inputs, results
included, from torch.profiler's allocation events in a run of its own. Exit code 1 when a bound is missed.

Kinds and their bounds: "attention rows" looks at the attention of all (or all text) queries, column sums mostly: at
most 2 attention forwards; "light" reads a window of queries, keys, values or nothing: 0.3; "proxies": 0.3, but for the
shortest length, where its own floor counts: 1.5 floors; "quantised": none. No method's memory may grow faster than T.

The floor of a proxy method is the arithmetic that no implementation can leave out, timed in the same rounds: noise,
projection, one product with all keys, exponentials, one weighted sum (mmshift); queries without their rotation, second
moments in float64 and the quadratic form of every key (expected_attention). Beside FlashCache's bound stand its transforms
alone: one there and one back of every channel of keys and values that lie ready.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402
import argparse
import datetime
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.statistics import allocator_peak, memory, seconds, size
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.base import Start
from mmkv_bench.compression.numerics.tiles import row_blocks
from mmkv_bench.compression.observation import QUERY_MOMENTS_SKIP, Chunk, Observation
from mmkv_bench.compression.scorers.deviation import DeviationScorer
from mmkv_bench.compression.scorers.expected_attention import ExpectedAttentionScorer
from mmkv_bench.compression.scorers.mmshift import MMShiftScorer
from mmkv_bench.errors import ConfigError

DIM, SHARE = 128, 5  # head dimension; one entry of five stays
SHAPES = {"Qwen2.5-VL-7B": (28, 4, 3584), "LLaVA-1.6-7B": (32, 32, 4096)}  # query heads, KV heads, hidden size
LENGTHS = (2048, 8192)
PHASES = ("scoring", "selecting", "reducing")
SUMS, LIGHT, PROXIES, QUANTISED = "attention rows", "light", "proxies", "quantised"
MOST = {SUMS: 2.0, LIGHT: 0.3, PROXIES: 0.3}  # times one attention forward; none is promised of quantising
FLOORS = 1.5  # times its own floor, for proxies at the shortest length


@dataclass
class Layer:
    """One layer's tensors: query [Hq,T,D], key and value [Hkv,T,D], hidden [T,E], weight [Hq*D,E], cos, sin [T,D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor
    weight: Tensor
    cos: Tensor
    sin: Tensor
    types: Tensor
    repeated: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def make(cls, shape: str, length: int) -> Layer:
        heads, kv_heads, width = SHAPES[shape]
        g = torch.Generator().manual_seed(length)
        query = torch.randn(heads, length, DIM, generator=g)
        key, value = (torch.randn(kv_heads, length, DIM, generator=g) for _ in range(2))
        types = torch.zeros(length, dtype=torch.int64)
        types[length // 10 : length // 10 + 4 * length // 5] = 1
        repeated = (query[None], *(x.repeat_interleave(heads // kv_heads, 0)[None] for x in (key, value)))
        hidden = torch.randn(length, width, generator=g)
        weight = torch.randn(heads * DIM, width, generator=g) * width**-0.5
        return cls(query, key, value, hidden, weight, *rope(torch.arange(length)), types, repeated)

    @property
    def length(self) -> int:
        return self.key.shape[1]

    @property
    def scaling(self) -> float:
        return DIM**-0.5

    def project(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.weight.T).view(len(hidden), -1, DIM).transpose(0, 1)

    def attention(self) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*self.repeated, is_causal=True)

    def observation(self, compressor: Compressor) -> Observation:
        made = Observation(
            0,
            1,
            compressor.needs,
            scaling=self.scaling,
            length=self.length,
            token_types=self.types,
            project_query=self.project,
            future_rope=lambda offsets: rope(self.length - 1 + offsets),
            identity="bench",
        )
        made.observe(Chunk(self.query, self.key, self.value, self.hidden, self.cos, self.sin))
        return made


def rope(positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = positions[:, None] * 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def compress(compressor: Compressor, layer: Layer) -> tuple[Any, dict[str, float]]:
    """All that the method does to this layer, as if it were the model's only one; CPU seconds per phase."""
    length, marks = layer.length, [time.process_time()]
    budget, scores, summaries = length // SHARE, None, {}
    if compressor.unbudgeted:
        index = torch.arange(length).expand(len(layer.key), -1)
        marks += [marks[0], time.process_time()]
    else:
        seen = layer.observation(compressor)
        scores = compressor.scorer.score(seen, budget, 0)
        if compressor.allocator.summary_key(budget, length) is not None:
            summaries = {0: compressor.allocator.summary(seen, budget, 0)}
        del seen
        marks.append(time.process_time())
        (index,) = compressor.select([scores], budget, layer.types, [0], 1, summaries=summaries)
        marks.append(time.process_time())
    stored = compressor.reducer.reduce(layer.key, layer.value, index, layer.types)
    if compressor.decoding is not None:
        context = Context(budget, length, types=layer.types, summaries=summaries)
        start = Start(
            layer=0,
            n_layers=1,
            key=layer.key,
            value=layer.value,
            index=index,
            kept_key=stored[0],
            kept_value=stored[1],
            scores=scores,
            context=context,
            pad=0,
            seen=length,
            acts_from=length,
            scaling=layer.scaling,
            reserve=64,
        )
        stored = compressor.decoding.layer(start)
    marks.append(time.process_time())
    return stored, {phase: b - a for phase, a, b in zip(PHASES, marks, marks[1:], strict=False)}


# ---------------------------------------------------------------- floors


def mmshift_floor(scorer: MMShiftScorer, layer: Layer) -> float:
    start, kv_heads = time.process_time(), len(layer.key)
    torch.var_mean(layer.hidden, 0)
    noise = torch.randn(scorer.samples, layer.hidden.shape[1], generator=torch.Generator().manual_seed(0))
    query = layer.project(noise).reshape(kv_heads, -1, DIM)  # query heads of a KV head one after the other
    keys = layer.key.transpose(1, 2)
    for first, last in row_blocks(query.shape[1], kv_heads * layer.length, layer.key.device):
        scores = torch.bmm(query[:, first:last], keys).exp_()
        torch.bmm(torch.ones(kv_heads, 1, last - first), scores)
    return time.process_time() - start


def expected_attention_floor(scorer: ExpectedAttentionScorer, layer: Layer) -> float:
    start, group = time.process_time(), len(layer.query) // len(layer.key)
    for first, last in row_blocks(layer.length - QUERY_MOMENTS_SKIP, layer.query[:, 0].numel(), layer.key.device):
        block = layer.query[:, first:last]
        block = (block * layer.cos[first:last] - block.roll(DIM // 2, -1) * layer.sin[first:last]).double()
        torch.bmm(block.transpose(1, 2), block)
    form = torch.randn(len(layer.query), DIM, DIM)
    for head, key in enumerate(layer.key.repeat_interleave(group, 0)):
        (key @ form[head]).mul_(key).sum(-1).exp_()
    return time.process_time() - start


def flashcache_floor(scorer: DeviationScorer, layer: Layer) -> float:
    channels = torch.randn(DIM, layer.length)
    start = time.process_time()
    for _ in range(2 * len(layer.key)):
        torch.fft.irfft(torch.fft.rfft(channels), n=layer.length)
    return time.process_time() - start


FLOOR_OF: dict[type, Callable[[Any, Layer], float]] = {
    MMShiftScorer: mmshift_floor,
    ExpectedAttentionScorer: expected_attention_floor,
    DeviationScorer: flashcache_floor,
}
BY_FLOOR = (MMShiftScorer, ExpectedAttentionScorer)


# ---------------------------------------------------------------- methods


class Invented:
    """Calibration data of the right shape for a model of one layer: what a benchmark of time needs of them."""

    def __init__(self, shape: str):
        self.query_heads, self.kv_heads, _ = SHAPES[shape]

    def data(self, method: str, spec: Any) -> dict[str, Any]:
        made = {
            "prefixkv": {"grid": [0.2, 0.5], "ratios": [[0.2], [0.5]]},
            "sparsemm": {"scores": [[1.0] * self.query_heads], "kv_heads": self.kv_heads},
        }
        return made[method]


def methods(shape: str, names: Sequence[str]) -> tuple[dict[str, Compressor], dict[str, str]]:
    """Every registered method in its paper reading, and those that cannot be measured here with the reason."""
    from mmkv_bench.config.compose import method_defaults
    from mmkv_bench.config.files import options
    from mmkv_bench.methods.build import build_compressor

    made, left_out = {}, {}
    for name in names or sorted(set(options("method")) - {"full"}):
        try:
            one = build_compressor(name, method_defaults([name])[name], "paper", calibrations=Invented(shape))
        except ConfigError as error:
            left_out[name] = str(error).split(";")[0]
            continue
        if one.resamples:
            left_out[name] = "it makes the prompt smaller and compresses no cache"
        else:
            made[name] = one
    return made, left_out


def kind(compressor: Compressor) -> str:
    if compressor.unbudgeted:
        return QUANTISED
    if isinstance(compressor.scorer, BY_FLOOR):
        return PROXIES
    return SUMS if compressor.needs.column_sums or compressor.needs.queries else LIGHT


@dataclass
class Cost:
    """Of one method on one problem: CPU seconds per phase in each round, its floor's, peak bytes."""

    kind: str
    rounds: list[dict[str, float]] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    peak: int = 0

    @property
    def best(self) -> dict[str, float]:
        return min(self.rounds, key=lambda phases: sum(phases.values()))

    @property
    def total(self) -> float:
        return sum(self.best.values())


def measure(layer: Layer, made: dict[str, Compressor], rounds: int) -> tuple[float, dict[str, Cost]]:
    costs, attention = {name: Cost(kind(one)) for name, one in made.items()}, float("inf")
    for _ in range(rounds):
        start = time.process_time()
        layer.attention()
        attention = min(attention, time.process_time() - start)
        for name, one in made.items():
            costs[name].rounds.append(compress(one, layer)[1])
            if not one.unbudgeted and type(one.scorer) in FLOOR_OF:
                costs[name].floors.append(FLOOR_OF[type(one.scorer)](one.scorer, layer))
    for name, one in made.items():
        costs[name].peak = allocator_peak(lambda one=one: compress(one, layer)[0])
    return attention, costs


def verdict(cost: Cost, length: int, attention: float) -> tuple[str, bool]:
    """The bound that holds for this method here, and whether it is kept."""
    ratio = cost.total / attention
    if cost.kind == PROXIES and length == min(LENGTHS):
        floor = min(cost.floors)
        return (
            f"{cost.total / floor:.2f}x of its floor {seconds(floor)} (at most {FLOORS:g}x)",
            cost.total <= FLOORS * floor,
        )
    if cost.kind not in MOST:
        return "none", True
    alone = f"; its transforms alone {min(cost.floors) / attention:.2f}x" if cost.kind == LIGHT and cost.floors else ""
    return f"at most {MOST[cost.kind]:g}x{alone}", ratio <= MOST[cost.kind]


def row(name: str, cost: Cost, length: int, attention: float, smaller: Cost | None, step: float) -> tuple[str, bool]:
    bound, kept = verdict(cost, length, attention)
    grows = ""
    if smaller is not None:
        growth = cost.peak / max(1, smaller.peak)
        linear = growth <= 1.25 * step
        kept = kept and linear
        grows = f" ({growth:.1f}x{'' if linear else ', NOT linear'})"
    phases = " | ".join(seconds(cost.best[phase]) for phase in PHASES)
    told = "kept" if kept else "MISSED"
    return (
        f"| {name} | {cost.kind} | {phases} | {cost.total / attention:.3f}x | {size(cost.peak)}{grows} | {bound} | {told} |",
        kept,
    )


def head(attention_of: str) -> list[str]:
    return [
        f"| method | kind | scoring | selecting | reducing | of {attention_of} | extra memory | bound | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", help="also write the report to this file")
    parser.add_argument("--methods", nargs="*", default=[], help="these alone; all registered ones otherwise")
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# What methods cost on one layer, beside its attention",
        "",
        "Random float32 tensors, d = 128, 80 % visual tokens, 20 % of the entries kept, one layer, one thread. Time: CPU",
        f"seconds, the least of {options.rounds} rounds. Extra memory: allocator bytes beyond the inputs, results included; in",
        "brackets its growth from the shorter prompt, which must be linear. Written by `python benchmarks/methods.py`,",
        "whose text says what is timed.",
        "",
        f"{datetime.date.today().isoformat()}, torch {torch.__version__}, Python {platform.python_version()},"
        f" {platform.machine()} CPU, {size(memory())} of memory.",
    ]
    print("\n".join(lines), flush=True)
    all_kept = True
    for shape in options.shapes:
        made, left_out = methods(shape, options.methods)
        before: dict[str, Cost] = {}
        for length in sorted(options.lengths):
            attention, costs = measure(Layer.make(shape, length), made, options.rounds)
            heads, kv_heads, _ = SHAPES[shape]
            new = ["", f"## {shape} ({heads} query, {kv_heads} KV heads), T = {length}", ""]
            new += [f"One attention forward: {seconds(attention)}.", "", *head("one attention")]
            step = length / min(options.lengths)
            for name, cost in sorted(costs.items(), key=lambda item: item[1].total):
                text, kept = row(name, cost, length, attention, before.get(name), step)
                new.append(text)
                all_kept = all_kept and kept
            lines += new
            print("\n".join(new), flush=True)
            before = before or costs
        new = ["", *(f"Left out: {name}: {reason}." for name, reason in left_out.items())] if left_out else []
        lines += new
        print("\n".join(new), flush=True)
    if options.write:
        Path(options.write).write_text("\n".join(lines) + "\n")
    return 0 if all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
