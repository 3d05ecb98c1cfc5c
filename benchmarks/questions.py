"""What four questions about a document cost beside one: encoding, prefill, scoring and selection, and the whole.

    python benchmarks/questions.py                              # SmolLM2-135M's shape, random weights; prints Markdown
    python benchmarks/questions.py --model tiny --dataset pages_questions --documents 40  # pictures, the embedded model
    python benchmarks/questions.py --model smollm2_135m_q4_1_english --weights pretrained --dataset questions_records

Each document is asked one question, as if it had no other, and all of its questions, in turns. Compressing once means that all
questions together prepare in at most 1.10 of the time that one takes. `query_joint` also feeds and scores every question behind
the document, and `query_aware` prefills the document once a question; both are shown beside. Preparing is all but decoding:
templates and pictures of all prompts, the tower, prefills, scores and selections. Time is CPU time of one thread. The first
document is a warm-up. What a question costs by itself (its template, the processor's own work on its text) shows only in models
as small as the embedded one.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder: its statistics.py must not stand in for the standard module

# ruff: noqa: E402
import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmkv_bench.generation.engine import Engine

if TYPE_CHECKING:
    from mmkv_bench.evaluation.samples import Request

ONCE = ("query_agnostic", "query_first", "query_generic")
BESIDE = ("query_joint", "query_aware")
GOAL = 1.10
"""Preparing all questions of a document over preparing one, under protocols of `ONCE`."""


class Undecoded(Engine):
    """Engine that counts what it spends on decoding."""

    decoding = 0.0

    def _decode(self, *args: Any) -> None:
        start = time.process_time()
        super()._decode(*args)
        self.decoding += time.process_time() - start


class Bench:
    """Answers requests of one dataset under one protocol and counts seconds."""

    def __init__(
        self, model: str, weights: str, dataset: str, method: str, budget: str, protocol: str, layers: int | None
    ):
        from mmkv_bench.compression.budget import Budget
        from mmkv_bench.config.compose import compose
        from mmkv_bench.config.files import content
        from mmkv_bench.generation.result import CellSpec
        from mmkv_bench.methods.build import build_compressor
        from mmkv_bench.models.source import Source

        words = [f"model={model}", f"dataset={dataset}", "model.device=cpu", f"protocol={protocol}"]
        words += ["model.weights=random"] if weights == "random" and model != "tiny" else []
        words += [] if layers is None else [f"model.layers={layers}"]
        config = compose(words)
        self.config, self.loaded = config.answering, Source.of(config.model).load()
        compressor = build_compressor(method, content("method", method), "paper")
        self.spec = CellSpec(f"{method}/{protocol}", compressor, Budget.parse(budget), protocol)

    def answered(self, requests: Sequence[Request]) -> tuple[float, float]:
        """Return CPU seconds of preparing and of all, for questions of one document."""
        from types import SimpleNamespace

        from mmkv_bench.run.generate import Answering, decode_rules

        loaded, spec = self.loaded, self.spec
        cells: list[Any] = [SimpleNamespace(**vars(spec))]
        answering = Answering(loaded, self.config, cells, {spec.cell: set()}, _Nowhere(), lambda rows: None)
        rules = decode_rules(loaded, requests[0].generation)
        start = time.process_time()
        with Undecoded(loaded.model, loaded.family, rules, loaded.tokenizer) as engine:
            for request in requests:
                prompt = answering._prompt(request, f"{request.dataset}/{request.sample_id}", [spec])
                (result,) = engine.answer(prompt, [spec])
                assert result.status == "ok", result.error
        whole = time.process_time() - start
        return whole - engine.decoding, whole


class _Nowhere:
    def commit(self, rows: Sequence[Mapping[str, Any]], prompt: Mapping[str, Any] | None = None) -> None:
        """Keep nothing."""


def documents(dataset: str, count: int) -> list[list[Request]]:
    """Return the requests of the first documents, one list a document."""
    from mmkv_bench.config.files import DATASET, content
    from mmkv_bench.datasets.specs import spec_from_config
    from mmkv_bench.evaluation.generating import generate

    made: dict[str, list[Request]] = {}

    def keep(request: Request) -> str:
        assert request.document is not None, f"{dataset} has no documents of several questions"
        made.setdefault(request.document.name, []).append(request)
        return ""

    spec = spec_from_config(dataset, content(DATASET, dataset))
    generate(spec, keep, 4 * count, groups=True)
    return list(made.values())


def alone(request: Request) -> Request:
    """Return a request whose document has no other question."""
    whole = request.document
    assert whole is not None, "of `documents`"
    one = slice(whole.number, whole.number + 1)
    return replace(
        request,
        waiting=(),
        document=replace(
            whole,
            number=0,
            texts=whole.texts[one],
            sample_ids=whole.sample_ids[one],
            paraphrases=whole.paraphrases[one],
        ),
    )


def main() -> int:
    """Print the table; exit status 1 where a protocol is above the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--weights", default="random", choices=["random", "pretrained"])
    parser.add_argument("--dataset", default="questions_records")
    parser.add_argument("--method", default="snapkv")
    parser.add_argument("--budget", default="64")
    parser.add_argument("--layers", type=int, help="fewer than the model has, with random weights")
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--protocols", nargs="+", default=[*ONCE, *BESIDE])
    asked = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    groups, good = documents(asked.dataset, asked.documents + 1), True
    print(
        f"{asked.model}, {asked.dataset}, {asked.method} at {asked.budget}: {asked.documents} documents of {len(groups[0])}"
    )
    print(
        f"questions; CPU ms a document, one thread; load average {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores\n"
    )
    print("| protocol | prepare 1 | prepare all | ratio | whole 1 | whole all | ratio |\n|---|---|---|---|---|---|---|")
    for protocol in asked.protocols:
        bench = Bench(asked.model, asked.weights, asked.dataset, asked.method, asked.budget, protocol, asked.layers)
        sums = [0.0, 0.0, 0.0, 0.0]
        for number, group in enumerate(groups):
            timed = [*bench.answered([alone(group[0])]), *bench.answered(group)]
            if number:
                sums = [total + seconds for total, seconds in zip(sums, timed, strict=True)]
        prepare, whole, prepare_all, whole_all = (1000 * one / asked.documents for one in sums)
        good &= protocol not in ONCE or prepare_all / prepare <= GOAL
        print(
            f"| {protocol} | {prepare:.1f} | {prepare_all:.1f} | {prepare_all / prepare:.2f} | {whole:.1f} | {whole_all:.1f} | "
            f"{whole_all / whole:.2f} |",
            flush=True,
        )
    print(f"\n{'shared' if good else 'not shared'}: at most {GOAL:.2f} of one under {', '.join(ONCE)}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
