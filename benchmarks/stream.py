"""Time and memory of a chunk while a stream grows: 100,000 tokens through a tiny random model under a cap of 256 entries.

    python benchmarks/stream.py                    # prints Markdown; half a minute on one thread
    python benchmarks/stream.py --tokens 20000     # a first look

Each method reads the same text in chunks of 250 tokens. Compared are the last and the first fifth of the chunks that begin
with a full cache: the median CPU time of a chunk over that of a fixed piece of work right before it, since other work on the
machine slows both, the most bytes of the cache's tensors, and the largest peak of the process's resident set within a chunk,
which Linux tells. Flat is a ratio of at most 1.10 (time) and 1.02 (memory); the last line says whether all are.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder: its statistics.py must not stand in for the standard module

# ruff: noqa: E402
import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

METHODS = ("streamingllm", "keydiff", "h2o", "expected_attention", "reservoir", "even_frames", "infinipot_v")
CHUNK, CAP, LAYERS = 250, 256, 2
TIME, MEMORY = 1.10, 1.02
"""The goals: last fifth over first."""


def tiny_model(tokens: int) -> Any:
    """A random text model of two layers with positions for so many tokens."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, max_position_embeddings=tokens + 8)).eval()


def watched(model: Any, name: str, tokens: int) -> dict[str, list[float]]:
    """Read random tokens with one method; CPU seconds and bytes of each chunk."""
    import torch

    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.session import Session
    from mmkv_bench.compression.streaming import StreamListener
    from mmkv_bench.config.files import content
    from mmkv_bench.families.facts import model_facts
    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.generation.meter import Meter
    from mmkv_bench.generation.result import CellSpec
    from mmkv_bench.generation.stream_reader import Reader
    from mmkv_bench.generation.stream_reading import read
    from mmkv_bench.methods.build import build_compressor
    from mmkv_bench.protocols import StreamSettings

    ids = torch.randint(2, 300, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    prompt = EncodedPrompt("bench/0", {"input_ids": ids}, torch.zeros_like(ids), context_tokens=tokens)
    compressor = build_compressor(name, content("method", name), "paper")
    cell = CellSpec(name, compressor, Budget.parse(CAP), "stream", stream=StreamSettings(CHUNK))
    seen: dict[str, list[float]] = {"time": [], "relative": [], "cache": [], "process": []}
    work, clock = torch.rand(250, 128), [0.0, 0.0]

    def before(*_: object) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set starts again
        clock[0] = time.process_time()
        for _ in range(10):
            (work @ work.T).softmax(-1) @ work
        clock[1] = time.process_time()

    def after(*_: object) -> None:
        seen["time"].append(time.process_time() - clock[1])
        seen["relative"].append(seen["time"][-1] / (clock[1] - clock[0]))
        seen["cache"].append(sum(one.nbytes for layer in session.latest_cache.layers for one in layer.buffers()))
        status = Path("/proc/self/status").read_text()
        seen["process"].append(float(status.partition("VmHWM:")[2].split()[0]))

    hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    reader = Reader(model, model_facts(model.config), prompt, cell)
    with Session(model) as session:
        read(session, reader, StreamListener(compressor, CAP, 0, None, CHUNK), Meter(model.device))
    for hook in hooks:
        hook.remove()
    return seen


def ratio(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> float:
    """Last over first fifth of the chunks that begin with a full cache."""
    steady = values[2 + CAP // CHUNK :]
    part = max(1, len(steady) // 5)
    return of(steady[-part:]) / of(steady[:part])


def main() -> int:
    """Print the table; exit status 1 where a ratio is above its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    asked = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    model, flat = tiny_model(asked.tokens), True
    watched(model, asked.methods[0], 20 * CHUNK)  # what is loaded and allocated once
    print(f"{asked.tokens:,} tokens in chunks of {CHUNK}, at most {CAP} entries per KV head; last fifth over first\n")
    print("| method | ms a chunk | time | cache | process |\n|---|---|---|---|---|")
    for name in asked.methods:
        seen = watched(model, name, asked.tokens)
        ratios = [ratio(seen["relative"], statistics.median), ratio(seen["cache"], max), ratio(seen["process"], max)]
        flat &= ratios[0] <= TIME and max(ratios[1:]) <= MEMORY
        print(
            f"| {name} | {1000 * statistics.median(seen['time']):.1f} | {' | '.join(f'{one:.3f}' for one in ratios)} |"
        )
    print(f"\n{'flat' if flat else 'not flat'}: at most {TIME:.2f} for time and {MEMORY:.2f} for memory")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
