"""What "prefill once, fork many" costs: 21 cells (5 methods x 4 budgets + full) against one full-cache run.

    python benchmarks/fork.py                                # embedded model, 20 development pages, prints Markdown
    python benchmarks/fork.py --samples 100 --write results/bench/fork.md
    python benchmarks/fork.py --pretrained smollm2_135m_q4_1_english --dataset english_needles --samples 4

Five ways of answering the same samples in one process, encoding included in each:

- bare generate: the untouched model's own generate(), nothing counted or scored;
- one full run: the fork engine with the cell `full` alone;
- 21 cells shared: the fork engine with all cells;
- 21 cells measured: the same, and fidelity of every answer to full's, as a run does unless fidelity=off;
- 21 separate runs: each cell alone, through attach() and stock generate() (`sharing=off`).

Beside them what no sharing can avoid is timed: the steps of the 20 reduced answers, by the untouched model from caches of its
own, all rows in one batch and every row as long as the mean budget.

Every sample is answered in all ways before the next one, the first four several times and in turns, because their ratios are
what is promised. Time is CPU time of one thread on the CPU (other work on the machine does not count, but for the caches that
it takes) and wall-clock time on CUDA. The first sample is a warm-up. A profiler then tells where the time goes. Scoring by
lmms-eval's metric code is timed apart. The answers of shared and separate runs are compared token for token, measured ones
too; a difference ends the benchmark with exit code 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder: its statistics.py must not stand in for the standard module

# ruff: noqa: E402
import argparse
import cProfile
import datetime
import hashlib
import json
import os
import platform
import pstats
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.files import content
from mmkv_bench.errors import MMKVError
from mmkv_bench.tiny import WEIGHTS

if TYPE_CHECKING:
    import torch

    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.evaluation.samples import Request
    from mmkv_bench.generation.engine import Engine
    from mmkv_bench.generation.result import CellSpec, ForkResult
    from mmkv_bench.models.load import LoadedModel

METHODS = ("snapkv", "streamingllm", "keydiff", "expected_attention", "mmshift")
BUDGETS = (32, 64, 128, 256)
PROMISE, OF_PRETRAINED = 2.0, 3.0  # shared / one full run, at most: on the embedded model, on pretrained weights
OVERHEAD = 1.03  # one full run / bare generate(), at most
TURNS = 3  # of the ways that are compared with each other, per sample

# Phases of the engine as functions whose cumulative time is disjoint: label -> (file, function), minus others.
PHASES = {
    "encode (template, images)": (("encode.py", "encode"), ()),
    "vision tower": (("modeling_qwen2_5_vl.py", "get_image_features"), ()),
    "prefill of the text model": (("prefill.py", "prefill"), ("vision tower", "method scores")),
    "method scores": (("prefill.py", "layer_done"), ()),
    "selection": (("forks.py", "plan"), ()),
    "gathering kept entries": (("forks.py", "gather"), ()),
    "audit": (("forks.py", "audit"), ()),
    "decode": (("decode.py", "decode"), ()),
}


def clock(place: torch.device) -> Callable[[], float]:
    """CPU seconds where the host computes, which other processes do not lengthen; else seconds of the device's clock."""
    from mmkv_bench import devices

    device = devices.at(place)
    return time.process_time if device.kind == "cpu" else device.now


def make_cells() -> list[CellSpec]:
    """`full` first, then every method at every budget, built from conf/method as a run builds them."""

    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.generation.result import CellSpec
    from mmkv_bench.methods.build import build_compressor

    made = {name: build_compressor(name, content("method", name), "paper") for name in ("full", *METHODS)}
    cells = [CellSpec("full", made["full"], None)]
    return cells + [CellSpec(f"{m}@{b}", made[m], Budget.parse(b)) for m in METHODS for b in BUDGETS]


class Bench:
    """Answers requests in each of the five ways and adds up their seconds."""

    def __init__(self, loaded: LoadedModel, generation: dict[str, Any]):
        from mmkv_bench.generation.rules import DecodeRules

        self.loaded, self.cells = loaded, make_cells()
        self.rules = DecodeRules.read(loaded.model.generation_config, generation, loaded.tokenizer)
        self.now = clock(loaded.device)
        self.seconds: dict[str, list[float]] = {}
        self.changed: list[str] = []

    def encode(self, request: Request) -> Any:
        from mmkv_bench.generation.encode import encode

        loaded, name = self.loaded, f"{request.dataset}/{request.sample_id}"
        return encode(loaded.processor, loaded.family, name, request.messages, request.images, device=loaded.device)

    def timed(self, way: str, work: Callable[[], Any]) -> Any:
        start = self.now()
        result = work()
        self.seconds.setdefault(way, []).append(self.now() - start)
        return result

    def engine(self) -> Engine:
        from mmkv_bench.generation.engine import Engine

        return Engine(self.loaded.model, self.loaded.family, self.rules, self.loaded.tokenizer)

    def bare(self, request: Request) -> Any:
        return self.loaded.model.generate(**self.encode(request).inputs, **self.rules.options)

    def shared(self, request: Request) -> list[ForkResult]:
        """The first four ways, in another order each turn; returns the 21 results, not measured."""
        from mmkv_bench.generation.fidelity import NOTHING, ExtraMeasures

        engine, found = self.engine(), {}

        def answered(cells: list[CellSpec], extras: ExtraMeasures) -> Any:
            with engine:
                return engine.answer(self.encode(request), cells, extras)

        ways = {
            "bare generate()": lambda: self.bare(request),
            "one full run": lambda: answered(self.cells[:1], NOTHING),
            "21 cells shared": lambda: answered(self.cells, NOTHING),
            "21 cells measured": lambda: answered(self.cells, ExtraMeasures(fidelity=True)),
        }
        for turn in range(TURNS):
            names = list(ways)
            for way in names[turn % len(names) :] + names[: turn % len(names)]:
                found[way] = self.timed(way, ways[way])
            self.bare_steps(max(result.n_tokens for result in found["21 cells shared"][1:]) - 1)
        self.changed += differences([found["21 cells measured"]], [found["21 cells shared"]])
        return found["21 cells shared"]

    def bare_steps(self, steps: int) -> None:
        """So many steps of the untouched model with a row per reduced cell, whatever their tokens are."""
        import torch
        from transformers import DynamicCache

        model, rows, length = self.loaded.model, len(self.cells) - 1, sum(BUDGETS) // len(BUDGETS)
        config = model.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache, like = DynamicCache(config=model.config), next(model.parameters())
        for layer in range(config.num_hidden_layers):
            cache.update(*like.new_zeros(2, rows, config.num_key_value_heads, length, width), layer)
        token = torch.ones(rows, 1, dtype=torch.int64, device=like.device)

        @torch.no_grad()
        def decode() -> None:
            for step in range(steps):
                model(input_ids=token, position_ids=token * (length + step), past_key_values=cache, logits_to_keep=1)

        self.timed("steps alone", decode)

    def separate(self, request: Request) -> list[ForkResult]:
        """The last way: each cell by itself."""
        from mmkv_bench.generation.unshared_generation import run_alone

        loaded, rules = self.loaded, self.rules

        def one(cell: CellSpec) -> ForkResult:
            return run_alone(loaded.model, loaded.family, rules, loaded.tokenizer, self.encode(request), cell)

        return self.timed("21 separate runs", lambda: [one(cell) for cell in self.cells])

    def score(self, spec: TaskSpec, requests: Sequence[Request], results: Sequence[Sequence[ForkResult]]) -> None:
        """lmms-eval's metric code over the answers of each cell."""
        from mmkv_bench.evaluation.samples import Answer
        from mmkv_bench.evaluation.scoring import score

        for column in range(len(self.cells)):
            answers = {
                request.sample_id: Answer(row[column].answer, row[column].status, request.doc_id, request.prompt_hash)
                for request, row in zip(requests, results, strict=True)
            }
            self.timed("score one cell", lambda a=answers: score(spec, a, len(requests)))


def load(options: argparse.Namespace) -> LoadedModel:
    """The folder's model, or one of random weights."""
    from mmkv_bench.config.compose import compose
    from mmkv_bench.config.schema import Model
    from mmkv_bench.models.load import load_model
    from mmkv_bench.models.source import Source

    if options.pretrained is not None:
        return Source.of(compose([f"model={options.pretrained}", f"model.device={options.device}"]).model).load()
    if options.random is None:
        return load_model(Model(name="benchmark", device=options.device), str(options.model))
    settings = [f"model={options.random}", "model.weights=random", f"model.device={options.device}"]
    return Source.of(compose(settings).model).load()


def collect(count: int, dataset: str | None) -> tuple[TaskSpec, list[Request]]:
    """The first `count` questions of a dataset's development split, as lmms-eval asks them; dataset: None for `pages` large, all
    kinds in turn."""
    from mmkv_bench.config.files import DATASET
    from mmkv_bench.datasets.specs import spec_from_config
    from mmkv_bench.evaluation.generating import generate

    node = {"task": "pages", "size": "large", "split": "dev", "generation": {"max_new_tokens": 24}}
    spec, requests = spec_from_config("pages", node | {"metrics": ["exact_match"]}), []
    if dataset is not None:
        spec = spec_from_config(dataset, content(DATASET, dataset) | {"split": "dev"})

    def keep(request: Request) -> str:
        requests.append(request)
        return ""

    generate(spec, keep, count)
    return spec, requests


def differences(shared: Sequence[Sequence[ForkResult]], separate: Sequence[Sequence[ForkResult]]) -> list[str]:
    """Cells whose tokens, kept entries or status are not the same in both ways."""
    names = ("status", "token_ids", "answer", "finish_reason", "kept_digest", "entries_resident")
    return [
        f"sample {number}, {a.cell}: {[name for name in names if getattr(a, name) != getattr(b, name)]}"
        for number, pair in enumerate(zip(shared, separate, strict=True))
        for a, b in zip(*pair, strict=True)
        if a.status != "ok" or any(getattr(a, name) != getattr(b, name) for name in names)
    ]


def phases(bench: Bench, requests: Sequence[Request], cells: list[CellSpec]) -> dict[str, float]:
    """Phase -> its share of the engine's time with these cells. The profiler slows Python down more than kernels."""
    profiler = cProfile.Profile(bench.now)

    def run() -> None:
        with bench.engine() as engine:
            for request in requests:
                engine.answer(bench.encode(request), cells)

    profiler.runcall(run)
    stats = pstats.Stats(profiler)
    spent = dict.fromkeys(PHASES, 0.0)
    for (file, _, function), (_, _, _, cumulative, _) in stats.stats.items():
        for label, ((name, wanted), _) in PHASES.items():
            if function == wanted and Path(file).name == name:
                spent[label] = max(spent[label], cumulative)
    own = {label: spent[label] - sum(spent[part] for part in parts) for label, (_, parts) in PHASES.items()}
    own["everything else"] = stats.total_tt - sum(own.values())
    return {label: seconds / stats.total_tt for label, seconds in own.items()}


def table_of_phases(bench: Bench, requests: Sequence[Request], one: float, many: float) -> list[str]:
    """Where the milliseconds of one full run and of 21 cells go, as Markdown. one, many: of them, without profiler."""
    full, shared = phases(bench, requests, bench.cells[:1]), phases(bench, requests, bench.cells)
    rows = []
    for label, share in shared.items():
        alone, together = one * full[label], many * share
        rows.append(f"| {label} | {alone:.1f} | {together:.1f} | {share:.0%} | {(together - alone) / one:.2f} |")
    return [
        "Where the time goes: milliseconds per sample above, in the shares that a profiler sees.",
        "",
        "| phase | one full run | 21 cells shared | share | beyond one full run, in full runs |",
        "| --- | --- | --- | --- | --- |",
        *rows,
    ]


def sha256(folder: Path) -> str:
    """The first digits, of the weights in this folder."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:12]


def report(bench: Bench, options: argparse.Namespace, requests: Sequence[Request], shared) -> list[str]:
    from mmkv_bench import __version__
    from mmkv_bench.store.provenance import collect as collect_provenance

    mean = {way: 1000 * sum(values) / len(values) for way, values in bench.seconds.items()}
    one, many, apart = mean["one full run"], mean["21 cells shared"], mean["21 separate runs"]
    measured, overhead = mean["21 cells measured"], mean["one full run"] / mean["bare generate()"]
    lengths = [row[0].prompt_tokens for row in shared]
    device = str(bench.loaded.device)
    tokens = [result.n_tokens for row in shared for result in row]
    source = collect_provenance(device)
    versions = json.loads(source["versions"])
    commit = f"commit {(source['git_commit'] or 'unknown')[:10]}{' with changes' if source['git_dirty'] else ''}"
    model = options.pretrained or options.random or options.model.name
    weights = "random weights" if options.random else "as conf/model names them"
    if not options.pretrained and not options.random:
        weights = f"sha256 of the weights {sha256(options.model)}"
    promise = OF_PRETRAINED if options.pretrained else PROMISE
    scored, load = mean["score one cell"] / options.samples, os.getloadavg()[1]
    return [
        "# Prefill once, fork many: the cost of 21 cells",
        "",
        f"{options.dataset or 'pages large'}, development split, {options.samples} samples, prompts of {min(lengths)} to"
        f" {max(lengths)} tokens; cells: {', '.join(METHODS)} at {', '.join(map(str, BUDGETS))} entries, and `full`;"
        f" answers of {min(tokens)} to {max(tokens)} tokens. Model {model}"
        f" ({weights}), {bench.loaded.dtype}, {device}.",
        f"{'CPU' if device == 'cpu' else 'Wall-clock'} time per sample, one process, {options.threads} thread(s),"
        f" encoding included; load average {load:.1f} on {os.cpu_count()} cores. Written by `python benchmarks/fork.py`.",
        "",
        f"{datetime.date.today().isoformat()}, mmkv-bench {__version__} ({commit}), torch {versions['torch']},"
        f" transformers {versions['transformers']}, lmms-eval {versions['lmms_eval']}, Python {versions['python']},"
        f" {platform.machine()}.",
        "",
        "| generation | ms per sample | of one full run | of 21 separate runs |",
        "| --- | --- | --- | --- |",
        *(
            f"| {way} | {mean[way]:.1f} | {mean[way] / one:.2f}x | {mean[way] / apart:.3f}x |"
            for way in ("bare generate()", "one full run", "21 cells shared", "21 cells measured", "21 separate runs")
        ),
        "",
        f"21 cells cost {many / one:.2f} full runs (promise: at most {promise:g}); run separately they cost"
        f" {apart / one:.1f}. Measuring their fidelity adds {measured / many - 1:.0%}, outside of every time in the rows.",
        f"One full run costs {overhead:.3f} of bare generate() (promise: at most {OVERHEAD:g}).",
        "",
        f"The untouched model alone takes {mean['steps alone']:.1f} ms for the steps of the 20 reduced answers, in one batch:"
        f" with one full run that is {1 + mean['steps alone'] / one:.2f} full runs before anything is scored or selected.",
        "",
        *table_of_phases(bench, requests, one, many),
        "",
        f"Scoring by lmms-eval, apart from this: {scored:.2f} ms per sample and cell, {21 * scored:.1f} ms for 21 cells.",
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="model folder (default: the embedded model)")
    parser.add_argument(
        "--random", metavar="NAME", help="random weights in the shape of this model of conf/model instead"
    )
    parser.add_argument("--pretrained", metavar="NAME", help="this model of conf/model with its weights instead")
    parser.add_argument("--dataset", metavar="NAME", help="its development samples (default: pages, large)")
    parser.add_argument("--device", default="cpu", help="where they are: cpu or cuda (default cpu)")
    parser.add_argument("--samples", type=int, default=20, help="measured samples (default 20)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--write", "--out", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    if options.samples < 1:
        parser.error(f"--samples {options.samples} measures nothing; give a number from 1 on")
    return options


def main() -> int:
    options = parse()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    import torch

    torch.set_num_threads(options.threads)
    spec, requests = collect(options.samples, options.dataset)
    if len(requests) < options.samples:
        print(f"error: the dataset has {len(requests)} development samples, not {options.samples}", file=sys.stderr)
        return 2
    bench = Bench(load(options), requests[0].generation)
    bench.shared(requests[0])
    bench.separate(requests[0])
    bench.seconds.clear()
    shared, separate = [], []
    for request in requests:
        shared.append(bench.shared(request))
        separate.append(bench.separate(request))
    bench.score(spec, requests, shared)
    lines = report(bench, options, requests, shared)
    wrong = differences(shared, separate) + bench.changed
    lines += [
        "",
        f"Shared and separate answers agree token for token in all {len(requests) * len(bench.cells)} results.",
    ]
    if wrong:
        lines[-1] = f"Shared and separate runs DIFFER in {len(wrong)} results, for example {wrong[0]}."
    print("\n".join(lines))
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text("\n".join(lines) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MMKVError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
