"""Show that under `protocol=strict` kept entries contain information about cells that are evicted in every layer and head.

    python scripts/strict_absorbs.py --samples 100

Each development page is answered twice under strict, from the same slots of two prefills: one of the page, one of a twin page
in which the cells that no layer and no head keeps are in another order. The kept entries belong to equal pixels both times. So
the answers could not differ if kept entries contained nothing of the evicted cells.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

CELL = 28  # px


@dataclass(frozen=True)
class Twice:
    """Answers (token ids) to a page and to its twin. moved: number of cells that differ in the twin."""

    first: list[int]
    second: list[int]
    moved: int


def twice(task: str, size: str, method: str, budget: int, samples: int, move: bool = True) -> Iterator[Twice]:
    """Yield the answers for every page from number 0 on, in order. move=False: the twin is the same page, prefilled again."""
    import torch
    from PIL import Image

    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.session import Session
    from mmkv_bench.config.compose import method_defaults
    from mmkv_bench.config.schema import Model, resolve_path
    from mmkv_bench.generation.decode import decode
    from mmkv_bench.generation.encode import encode
    from mmkv_bench.generation.forks import gather, plan
    from mmkv_bench.generation.meter import Meter
    from mmkv_bench.generation.prefill import PrefillGroup, prefill
    from mmkv_bench.generation.result import CellSpec, ForkResult
    from mmkv_bench.generation.rules import DecodeRules
    from mmkv_bench.methods.build import build_compressor
    from mmkv_bench.models.load import load_model
    from mmkv_bench.protocols import protocol
    from mmkv_bench.tiny.pages import make_page
    from mmkv_bench.tiny.splits import generator

    new = 24
    loaded = load_model(
        Model(name="tiny", dtype="float32", device="cpu"), resolve_path("pkg://mmkv_bench/tiny/weights")
    )
    rules = DecodeRules.read(loaded.model.generation_config, {"max_new_tokens": new}, loaded.processor.tokenizer)
    compressor = build_compressor(method, method_defaults([method])[method], "paper")
    cell = CellSpec(method, compressor, Budget.parse(budget), "strict")

    def prefilled(session, name: str, question: str, image):
        content = [{"type": "image"}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        prompt = encode(loaded.processor, loaded.family, name, messages, [Image.fromarray(image)])
        lengths, meter = {"strict": protocol("strict").lengths(prompt.length)}, Meter(torch.device("cpu"))
        made = prefill(session, prompt, [cell], lengths, meter, new + 1)
        return PrefillGroup(loaded.model, prompt, made, rules, loaded.processor.tokenizer, meter, new)

    def answer(group, fork) -> list[int]:
        cache = gather(group.prefilled, [fork], group.reserve("strict"))
        return list(decode(group, cache, 1, "strict")[0].tokens)

    for index in range(samples):
        _, turn, (image,) = make_page(task, size, "dev", index)
        with Session(loaded.model) as session:
            made = prefilled(session, f"{task}-{index}", turn.question, image)
            fork = plan(made.prefilled, cell, ForkResult(cell.cell))
            kept = torch.cat([layer[layer >= 0] for layer in fork.chosen]).unique()
            visual = made.prompt.types[0].nonzero().flatten()
            free = (~torch.isin(visual, kept)).nonzero().flatten().numpy()
            side = image.shape[1] // CELL
            cells = image.reshape(-1, CELL, side, CELL, 3).transpose(0, 2, 1, 3, 4).reshape(-1, CELL, CELL, 3).copy()
            before = cells.copy()
            if move:
                cells[free] = cells[generator("strict absorbs", index).permutation(free)]
            twin = cells.reshape(-1, side, CELL, CELL, 3).transpose(0, 2, 1, 3, 4).reshape(image.shape)
            other = prefilled(session, f"{task}-{index}", turn.question, twin)
            moved = int((cells != before).any((1, 2, 3)).sum())
            yield Twice(answer(made, fork), answer(other, replace(fork, result=ForkResult(cell.cell))), moved)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--samples", type=int, default=100)
    command.add_argument("--budget", type=int, default=64)
    command.add_argument("--size", choices=("small", "large"), default="small")
    command.add_argument("--methods", nargs="+", default=["streamingllm", "snapkv", "mmshift"])
    asked = command.parse_args()
    for method in asked.methods:
        for task in ("lookup", "walk3"):
            pages = list(twice(task, asked.size, method, asked.budget, asked.samples))
            differ = sum(page.first != page.second for page in pages)
            moved = sum(page.moved for page in pages) / len(pages)
            print(
                f"{task}, {asked.size} pages, {method} at {asked.budget}, strict: {differ} of {len(pages)} answers differ "
                f"between pages that differ only in cells evicted everywhere ({moved:.0f} cells a page)"
            )


if __name__ == "__main__":
    main()
