"""How near a decode step is to the limit that memory sets: weights and cache read once.

    python benchmarks/decode.py                              # prints Markdown; two threads, four layers, float32
    python benchmarks/decode.py --write results/bench/decode.md
    python benchmarks/decode.py --rounds 3 --tokens 1024     # a first look

The text model has the width of Qwen2.5-VL-3B. Caches are filled with noise, since a step's time does not depend on what
is in them. What is timed: steps of one sequence and of sixteen, and of the sixteen attention and cache alone; stock
transformers with its DynamicCache and StaticCache, and compressed caches eager and, of one sequence, compiled. `x of
bandwidth` is useful bytes (weights that a step reads, and entries) over time, over the read-only bandwidth of the same
rounds (a copy would understate it). Rounds go through everything in turn; of each the least time counts, since other work on
the machine only ever makes a round slower. With one thread time is CPU time, which other processes lengthen less.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder: its statistics.py must not stand in for the standard module

# ruff: noqa: E402
import argparse
import datetime
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

GOALS = {"batch 1": 0.70, "batch 1, all of it": 0.65, "alone": 0.5, "alone, ragged": 0.4, "step_s": 0.300}
LAYERS, BATCH, SHARE = 4, 16, 0.1
RESERVE = 256  # slots for the tokens that are fed while measuring


@dataclass
class Timed:
    """One line: what is called, what it reads usefully and with padding [bytes], and its seconds of every round."""

    name: str
    run: Callable[[], object]
    useful: int
    padded: int
    goal: float | None = None
    at_most_s: float | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.seconds)


def text_model(layers: int) -> nn.Module:
    """A text model of Qwen2.5-VL-3B's width with noise for weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=128000,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.03, 0.03)
    rotary = model.model.rotary_emb
    rotary.inv_freq, _ = rotary.rope_init_fn(config) if hasattr(rotary, "rope_init_fn") else (rotary.inv_freq, None)
    model.tie_weights()
    return model


# ---------------------------------------------------------------------- caches
def lengths(kind: str, slots: int, layers: int, rows: int) -> list[Tensor]:
    """Per layer int64 `[rows, Hkv]` entries of a budget of `slots` per head, as methods of this kind divide it."""
    import torch

    generator = torch.Generator().manual_seed(0)
    made = []
    for layer in range(layers):
        share = torch.ones(rows, 2)
        if kind in ("by layers", "by both"):  # PyramidKV: from above the mean down to below it
            share = share * (1.75 - 1.5 * layer / max(1, layers - 1))
        if kind in ("by heads", "by both"):  # AdaKV: a fifth is every head's, the rest goes where the scores are
            taken = torch.rand(rows, 1, generator=generator)
            share = share * (0.2 + 0.8 * 2 * torch.cat([taken, 1 - taken], 1))
        made.append((share * slots).long().clamp_min(1))
    return made


def compressed(counts: Sequence[Tensor], seen: int) -> Any:
    """A cache of the product with so many entries per row and head."""
    import torch

    from mmkv_bench.compression.cache import CompressedCache, CompressedLayer

    layers = []
    for count in counts:
        most = int(count.max())
        slot = torch.arange(most)
        places = (slot + seen - most).masked_fill(slot < most - count[:, :, None], -1)
        rows = [(torch.rand(2, most, 128), torch.rand(2, most, 128), row) for row in places]
        layers.append(CompressedLayer.from_rows(rows, seen, RESERVE))
    return CompressedCache.of(layers)


def stock(model: nn.Module, kind: str, rows: int, tokens: int) -> Any:
    """transformers' cache of this kind with so many tokens in it."""
    import torch
    from transformers import DynamicCache, StaticCache

    cache = (
        DynamicCache(config=model.config)
        if kind == "DynamicCache"
        else StaticCache(config=model.config, max_cache_len=tokens + RESERVE)
    )
    for layer in range(model.config.num_hidden_layers):
        cache.update(torch.rand(rows, 2, tokens, 128), torch.rand(rows, 2, tokens, 128), layer)
    return cache


# ---------------------------------------------------------------------- what is timed
def step(forward: Callable[..., Any], cache: Any, rows: int, position: int) -> Callable[[], object]:
    import torch

    ids, positions = torch.full((rows, 1), 7), torch.full((rows, 1), position)
    return lambda: (
        forward(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    )


def attention_alone(model: nn.Module, cache: Any, rows: int, name: str) -> Callable[[], object]:
    """Every layer's update and attention of one token, with nothing of the weights."""
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from mmkv_bench.compression.attention_backend import LAYER

    query, key, value = torch.rand(rows, 16, 1, 128), torch.rand(rows, 2, 1, 128), torch.rand(rows, 2, 1, 128)
    function, ours = ALL_ATTENTION_FUNCTIONS[name], name.startswith("mmkv")

    def run() -> None:
        for number, block in enumerate(model.model.layers):
            keys, values = cache.update(key, value, number)
            own = {LAYER: cache.layers[number]} if ours else {}
            # as a model calls it: a static cache is wider than what is in it, so its mask is made
            mask = None
            if keys.shape[2] != cache.get_seq_length(number) and not ours:
                mask = (torch.arange(keys.shape[2]) < cache.get_seq_length(number))[None, None, None]
            function(block.self_attn, query, keys, values, mask, scaling=128**-0.5, **own)

    return run


def products_alone(model: nn.Module, rows: int) -> Callable[[], object]:
    """Every product of a step of so many sequences with weights, the output layer's included, and nothing else: what is left
    of a step when attention and cache cost nothing."""
    import torch
    from torch import nn

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {width: torch.rand(rows, width) for width in {module.in_features for module in linear}}
    return lambda: [nn.functional.linear(inputs[module.in_features], module.weight) for module in linear]


def kv_bytes(counts: Sequence[Tensor]) -> tuple[int, int]:
    """(entries, padded slots) in bytes of float32 keys and values."""
    one = 2 * 128 * 4
    return sum(int(c.sum()) for c in counts) * one, sum(int(c.max()) * c.numel() for c in counts) * one


def weight_bytes(model: nn.Module) -> int:
    """What a step reads: the embedding table once, as the output layer that it is."""
    return sum(parameter.nbytes for parameter in model.parameters())


@contextmanager
def ours(model: nn.Module) -> Iterator[None]:
    """The model with a session, which reads and observes nothing."""
    import torch

    from mmkv_bench.compression.session import Session

    with Session(model), torch.no_grad():
        yield


def one_sequence(model: nn.Module, tokens: int) -> Iterator[Timed]:
    """Batch 1: the full cache at a quarter of `tokens` and at all of them, and a tenth of them in every form."""
    from mmkv_bench.compression.fixed_layer import fixed_view
    from mmkv_bench.generation.decode import CompiledStep

    weights, compiled, kept = weight_bytes(model), CompiledStep(model), round(tokens * SHARE)
    forms = [(f"full, {n} tokens", lengths("uniform", n, LAYERS, 1), n) for n in (tokens // 4, tokens)]
    forms += [(f"{kept} of {tokens}, {kind}", lengths(kind, kept, LAYERS, 1), tokens) for kind in KINDS]
    for name, counts, seen in forms:
        useful, padded = (weights + size for size in kv_bytes(counts))
        full = name.startswith("full")
        goal = GOALS["batch 1, all of it"] if full and seen == tokens else GOALS["batch 1"]
        if full:
            for kind in ("DynamicCache", "StaticCache"):
                yield Timed(f"{name}, stock {kind}", step(model, stock(model, kind, 1, seen), 1, seen), useful, padded)
        yield Timed(f"{name}, ours eager", step(model, compressed(counts, seen), 1, seen), useful, padded, goal)
        fixed = fixed_view(compressed(counts, seen))
        yield Timed(f"{name}, ours compiled", step(compiled, fixed, 1, seen), useful, padded, goal)


KINDS = ("uniform", "by layers", "by heads", "by both")


def many(model: nn.Module, tokens: int) -> Iterator[Timed]:
    """Batch 16: the full cache, and ragged tenths of it; the whole step and attention alone."""
    weights = weight_bytes(model)
    yield Timed("products of a step with the weights, alone", products_alone(model, BATCH), weights, weights)
    for name, counts, goal in (
        (f"full, {tokens} tokens", lengths("uniform", tokens, LAYERS, BATCH), GOALS["alone"]),
        (
            f"{round(tokens * SHARE)}, by heads",
            lengths("by heads", round(tokens * SHARE), LAYERS, BATCH),
            GOALS["alone, ragged"],
        ),
    ):
        useful, padded = kv_bytes(counts)
        full = name.startswith("full")
        for kind in ("DynamicCache", "StaticCache") if full else ():
            cache = stock(model, kind, BATCH, tokens)
            yield Timed(f"{name}, alone, stock {kind}", attention_alone(model, cache, BATCH, "sdpa"), useful, padded)
            run = step(model, cache, BATCH, tokens)
            yield Timed(f"{name}, step, stock {kind}", run, weights + useful, weights + padded)
        at_most_s = GOALS["step_s"] if full else None
        cache = compressed(counts, tokens)
        yield Timed(f"{name}, alone, ours", attention_alone(model, cache, BATCH, "mmkv_sdpa"), useful, padded, goal)
        run = step(model, cache, BATCH, tokens)
        yield Timed(f"{name}, step, ours", run, weights + useful, weights + padded, at_most_s=at_most_s)


def limits() -> list[Timed]:
    """The machine: reading half a gigabyte in two ways, and a matrix times a vector as a linear layer does it."""
    import torch

    x, w, v = torch.rand(1 << 16, 2048), torch.rand(1 << 16, 2048), torch.rand(1, 2048)
    return [
        Timed("sum of a block", x.sum, x.nbytes, x.nbytes),
        Timed("largest of a block", x.amax, x.nbytes, x.nbytes),
        Timed("matrix x vector", lambda: torch.nn.functional.linear(v, w), w.nbytes, w.nbytes),
    ]


def measure(timed: Sequence[Timed], machine: Sequence[Timed], rounds: int) -> None:
    import torch

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for one in [*machine, *timed]:  # warm-up; compiles
        one.run()
        one.run()
    for _ in range(rounds):
        for one in timed:
            for each in (*machine, one):
                start = clock()
                each.run()
                each.seconds.append(clock() - start)


# ---------------------------------------------------------------------- report
def row(one: Timed, bandwidth: float, matvec: float) -> str:
    rate = one.useful / one.best
    padded = "" if one.padded == one.useful else f"{one.padded / one.best / bandwidth:.2f}"
    goal = "" if one.goal is None else f"{one.goal:.2f}{'' if rate / bandwidth >= one.goal else ' missed'}"
    if one.at_most_s is not None:
        goal = f"{one.at_most_s * 1e3:.0f} ms{'' if one.best <= one.at_most_s else ' missed'}"
    return (
        f"| {one.name} | {one.best * 1e3:.1f} | {one.useful / 1e9:.3f} | {rate / bandwidth:.2f} | {padded} | "
        f"{rate / matvec:.2f} | {goal} |"
    )


def report(
    options: argparse.Namespace, groups: Sequence[tuple[str, list[Timed]]], machine: Sequence[Timed]
) -> list[str]:
    import torch
    import transformers

    from mmkv_bench.store.provenance import version

    bandwidth = max(one.useful / one.best for one in machine[:2])
    matvec = machine[2].useful / machine[2].best
    lines = [
        "# A decode step beside what memory allows",
        "",
        f"Text model of Qwen2.5-VL-3B's width (hidden 2048, 16 heads, 2 KV heads of 128, intermediate 11008, vocabulary 151936, "
        f"tied), {LAYERS} layers, float32, {_threads()}. Weights and caches are noise. Least of "
        f"{options.rounds} interleaved rounds. Written by `python benchmarks/decode.py`.",
        "",
        f"{datetime.datetime.now(tz=datetime.UTC).date()}, mmkv-bench {version('mmkv-bench')}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}, {platform.machine()}.",
        "",
        f"Read-only bandwidth {bandwidth / 1e9:.1f} GB/s; a linear layer of one row reads its weights at "
        f"{matvec / 1e9:.1f} GB/s, {matvec / bandwidth:.2f} of it.",
    ]
    for title, timed in groups:
        lines += [
            "",
            f"## {title}",
            "",
            "| what | ms | useful GB | x of bandwidth | with padding | x of matrix-vector rate | goal |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(row(one, bandwidth, matvec) for one in timed),
        ]
    return lines


def _threads() -> str:
    import torch

    count = torch.get_num_threads()
    return f"{count} threads, wall-clock time" if count > 1 else "1 thread, CPU time"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="measurements of everything (default 10)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the full cache (default 8192)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    parser.add_argument("--write", "--out", type=Path, help="also write the report to this file")
    return parser.parse_args()


def main() -> int:
    options = parse()
    import torch

    torch.set_num_threads(options.threads)
    model, machine, groups = text_model(LAYERS), limits(), []
    with ours(model):
        for title, made in (("One sequence", one_sequence), (f"Batch of {BATCH}", many)):
            timed = list(made(model, options.tokens))
            measure(timed, machine, options.rounds)
            groups.append((title, timed))
            for one in timed:
                one.run = lambda: None  # its cache goes
    lines = report(options, groups, machine)
    print("\n".join(lines))
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
