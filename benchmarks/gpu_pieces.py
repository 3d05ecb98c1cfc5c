"""The pieces of `benchmarks/gpu.py`: commands, how large they are, and what their output says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

RECORDED = "smoke-recorded-"
METHODS = ("full", "snapkv", "mmshift", "adakv", "kivi", "pixels")
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Size:
    """How large everything is: of the measurement, and of its rehearsal.

    Attributes:
        place: torch's name of the device; models: name -> settings; memory: further settings of batch=max.
        short: prompt tokens of the step beside the bandwidth; lengths, batches: of the grid; budget: of the prompt.
        samples: of the answers on both devices, for each of five methods; fork: arguments of benchmarks/fork.py.
        limits: bytes that a smoke fits in, and does not; tests: arguments of pytest.
        heads: models of random weights -> layers and KV heads, over which AdaKV's division is spread.
    """

    place: str
    models: Mapping[str, tuple[str, ...]]
    memory: tuple[str, ...]
    short: int
    lengths: tuple[int, ...]
    batches: tuple[int | str, ...]
    new_tokens: int
    repeats: int
    samples: int
    fork: tuple[str, ...]
    limits: tuple[str, str]
    tests: tuple[str, ...]
    heads: Mapping[str, tuple[int, int]]
    budget: str = "0.1"


GPU = Size(
    "cuda",
    {name: (f"model=qwen2_5_vl_{name}", "model.weights=random", "model.device=cuda") for name in ("7b", "3b")},
    memory=(),
    short=2048,
    lengths=(8192, 32768),
    batches=(1, 8, 32, "max"),
    new_tokens=64,
    repeats=3,
    samples=100,
    fork=("--random", "qwen2_5_vl_7b", "--device", "cuda", "--samples", "5"),
    limits=("8GiB", "1GiB"),
    tests=(
        "tests/compression/fused_in_interpreter.py",
        "tests/compression/test_varlen_layer.py",
        "tests/compression/test_flash.py",
    ),
    heads={"7b": (28, 4), "3b": (36, 2)},
)
REHEARSAL = Size(
    "cpu",
    {"tiny": ("model=tiny", "model.device=cpu")},
    memory=("memory_limit=24MiB",),
    short=64,
    lengths=(400,),
    batches=(1, 2, "max"),
    new_tokens=4,
    repeats=1,
    samples=1,
    fork=("--samples", "1"),
    limits=("64MiB", "3MiB"),
    tests=("tests/compression/fused_in_interpreter.py",),
    heads={},
    budget="0.5",
)


@dataclass(frozen=True)
class Finding:
    """One number and what it is held against; `reached` is None where it could not be measured."""

    what: str
    value: str
    goal: str = ""
    reached: bool | None = None


@dataclass(frozen=True)
class Piece:
    """A command, and what its output says.

    Attributes:
        name: of its log; words: what follows `python`; read: (output, log) -> findings; failing: exit codes besides 0 that are
            an answer, as of rows that are `oom`.
    """

    name: str
    words: tuple[str, ...]
    read: Callable[[str, str], Iterable[Finding]]
    failing: tuple[int, ...] = ()


# ---------------------------------------------------------------------- pieces
def pieces(size: Size, folder: Path) -> Iterator[Piece]:
    """In the order in which they run."""
    first = next(iter(size.models.values()))
    yield from _smokes(size, first, folder)
    yield Piece(
        "kernels",
        ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "full or not full", *size.tests),
        _tests,
        failing=(1,),
    )
    answers = (
        "-m",
        "mmkv_bench",
        "run",
        "model=tiny",
        "dataset=[pages_walk]",
        "method=[full,snapkv,mmshift,adakv,kivi]",
    )
    answers += ("budget=64", f"limit={size.samples}", "stage=generate", "fidelity=off", "sharing=off")
    for place, read in (("cpu", _nothing), (size.place, lambda *_: _both(folder))):
        name = f"answers-{'cpu' if read is _nothing else 'device'}"
        yield Piece(name, (*answers, f"model.device={place}", f"out={folder / name}"), read)
    yield _decoding(size, first, folder)
    sums = ("-P", "benchmarks/on_device.py", "sums", size.place, str(size.lengths[-1]))
    yield Piece(
        "sums", sums, lambda out, _: [held("column sums, of the time of their products", _number(out), at_most=2)]
    )
    yield Piece(
        "fork", ("-P", "benchmarks/fork.py", *size.fork), _forks, failing=(1,)
    )  # bfloat16: other answers when shared
    yield from _divisions(size, folder)
    for batch in size.batches:
        for tokens in size.lengths:
            for model in size.models:
                yield _grid(size, folder, model, tokens, batch)


def efficiency(size: Size, model: Sequence[str], out: Path, *settings: str) -> tuple[str, ...]:
    """Words of a run of `scenario=efficiency`; rows that are in `out` are not made again."""
    run = (
        "-m",
        "mmkv_bench",
        "run",
        "scenario=efficiency",
        *model,
        f"budget={size.budget}",
        f"new_tokens={size.new_tokens}",
    )
    return (*run, *settings, "json=true", f"out={out}")


def _smokes(size: Size, model: Sequence[str], folder: Path) -> Iterator[Piece]:
    """With two layers: a limit that holds and one that does not, recordings for one and for three passes, kernels."""
    small = (*model, "model.layers=2") if size.place == "cuda" else tuple(model)
    run = ("method=[full,snapkv]", f"lengths=[{size.short}]")
    for limit, status in zip(size.limits, ("ok", "oom"), strict=True):
        name = f"smoke-{status}"
        words = efficiency(size, small, folder / "smoke" / name, *run, "repeats=1", f"memory_limit={limit}")
        yield Piece(name, words, partial(_limited, limit, status), failing=(1,))
    logs = [folder / "logs" / f"{RECORDED}{repeats}.log" for repeats in (1, 3)]
    for repeats, log in zip((1, 3), logs, strict=True):
        words = efficiency(size, small, folder / "smoke" / log.stem, *run, f"repeats={repeats}", "decode=compiled")
        yield Piece(log.stem, words, partial(_recorded, repeats, logs[0]))
    words = efficiency(size, small, folder / "smoke" / "kernels", *run, "repeats=1")
    kernels = ("-P", "benchmarks/on_device.py", "kernels", size.place, *words[3:])
    yield Piece("smoke-kernels", kernels, lambda out, _: [Finding("attention ran as", _last(out))])


def _decoding(size: Size, model: Sequence[str], folder: Path) -> Piece:
    """A step beside the bandwidth, and scoring beside the whole prefill."""
    long = size.lengths[-1]
    settings = (
        "method=[full,snapkv,mmshift]",
        f"lengths=[{size.short},{long}]",
        "decode=compiled",
        f"repeats={size.repeats}",
    )

    def read(out: str, _: str) -> Iterator[Finding]:
        lines = lines_of(out)
        for method, tokens in (("full", size.short), ("snapkv", long)):
            yield held(
                f"MBU of {method} at {tokens} tokens, compiled", _of(lines, method, tokens).get("mbu"), at_least=0.6
            )
        line = _of(lines, "mmshift", long)
        score, ttft = line.get("score_median"), line.get("ttft_median")
        share = score / ttft if score is not None and ttft else None
        yield held(f"mmshift's scoring, of the time to the first token at {long}", share, at_most=0.02)

    return Piece("decode", efficiency(size, model, folder / "rows", *settings), read)


def _divisions(size: Size, folder: Path) -> Iterator[Piece]:
    """Random weights divide no budget by the prompt: AdaKV's is the embedded model's on a page, its heads repeated."""
    if size.heads:
        words = ("-m", "mmkv_bench", "run", "model=tiny", "model.device=cpu", "dataset=[pages_walk]", "method=[adakv]")
        words += (
            f"budget={size.budget}",
            "limit=9",
            "stage=generate",
            "fidelity=off",
            f"out={folder / 'answers-divided'}",
        )
        yield Piece("divided", words, _nothing)
    for model, heads in size.heads.items():
        where = (str(folder / "answers-divided"), str(folder / f"answers-divided-{model}"))
        words = ("-P", "benchmarks/on_device.py", "spread", *where, *map(str, heads))
        yield Piece(f"divided-{model}", words, _nothing)


def _grid(size: Size, folder: Path, model: str, tokens: int, batch: int | str) -> Piece:
    """All methods at one shape; the rows are read by the report."""
    settings = [f"method=[{','.join(METHODS)}]", "prompts=image", f"lengths=[{tokens}]", f"batch=[{batch}]"]
    settings += [f"repeats={size.repeats if batch == 1 else 1}", *(size.memory if batch == "max" else ())]
    settings += [f"profiles={folder / f'answers-divided-{model}'}"] if model in size.heads else []

    def read(out: str, _: str) -> Iterator[Finding]:
        most = {line["method"]: line["batch"] for line in lines_of(out) if line["status"] == "ok"}
        if batch == "max":
            ratio = most["snapkv"] / most["full"] if {"snapkv", "full"} <= most.keys() else None
            largest = ", ".join(f"{method} {most.get(method)}" for method in METHODS)
            goal = 8.0 if tokens == max(size.lengths) else None
            yield held(f"{model}, {tokens} tokens: largest batch, snapkv's of full's ({largest})", ratio, at_least=goal)

    out = folder / ("largest" if batch == "max" else "rows")  # passes under a limit are not beside those without
    name = f"grid-{model}-{tokens}-{batch}"
    return Piece(name, efficiency(size, size.models[model], out, *settings), read, failing=(1,))


# ---------------------------------------------------------------------- what output says
def lines_of(out: str) -> list[dict[str, Any]]:
    return json.loads(_last(out)).get("efficiency", []) if _last(out).startswith("{") else []


def _last(out: str) -> str:
    return out.strip().rpartition("\n")[2]


def _limited(limit: str, status: str, out: str, _: str) -> list[Finding]:
    return [Finding(f"memory_limit={limit}", _statuses(out), status, _statuses(out) == status)]


def _recorded(repeats: int, first: Path, _: str, log: str) -> list[Finding]:
    """CUDA graphs that were recorded, by torch's log; more passes record no more."""
    counts = [len(re.findall("Recording function", text)) for text in (log, log if repeats == 1 else first.read_text())]
    return [
        Finding(
            f"recordings of compiled steps, repeats={repeats}", str(counts[0]), str(counts[1]), counts[0] == counts[1]
        )
    ]


def of_shape(lines: Lines, batch: str, tokens: int) -> list[Mapping[str, Any]]:
    """Lines of one piece of the grid: of that batch, or of each method's largest."""
    ours = [line for line in lines if line["prompt_tokens"] == tokens]
    if batch != "max":
        return [line for line in ours if line["batch"] == int(batch)]
    largest = {line["method"]: line for line in sorted(ours, key=lambda line: line["batch"]) if line["status"] == "ok"}
    return list(largest.values())


def _of(lines: Lines, method: str, tokens: int) -> Mapping[str, Any]:
    ours = (line for line in lines if (line["method"], line["prompt_tokens"], line["status"]) == (method, tokens, "ok"))
    return next(ours, {})


def _statuses(out: str) -> str:
    return ", ".join(sorted({str(line["status"]) for line in lines_of(out)})) or "no row"


def _nothing(*_: str) -> list[Finding]:
    return []


def _number(out: str) -> float | None:
    return float(_last(out)) if re.fullmatch(r"[\d.]+", _last(out)) else None


def _tests(out: str, _: str) -> list[Finding]:
    """Skipped ones are named in the log; a device runs some."""
    return [
        Finding("kernels against their definitions", _last(out).strip("= "), "none fails", "failed" not in _last(out))
    ]


def _forks(out: str, _: str) -> list[Finding]:
    cost = re.search(r"21 cells cost ([\d.]+) full runs", out)
    return [held("21 cells, in full runs", float(cost[1]) if cost else None, at_most=2.5)]


def _both(folder: Path) -> list[Finding]:
    """Answers of the two devices, by cell and sample; float32 on both."""
    from mmkv_bench.store.store import Store

    columns = ("cell", "sample_id", "status", "token_ids")
    rows = [Store(folder / f"answers-{of}").responses(columns=columns).to_pylist() for of in ("cpu", "device")]
    cpu, gpu = ({(row["cell"], row["sample_id"]): (row["status"], row["token_ids"]) for row in of} for of in rows)
    alike = sum(answer == gpu.get(key) for key, answer in cpu.items())
    return [
        held(f"answers of the embedded model like the CPU's, of {len(cpu)}", alike / max(len(cpu), 1), at_least=0.98)
    ]


def held(what: str, value: float | None, at_least: float | None = None, at_most: float | None = None) -> Finding:
    """A number beside its goal, where there is one."""
    goal = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}" if at_most is not None else ""
    if value is None:
        return Finding(what, "not measured", goal)
    reached = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    return Finding(what, f"{value:.3g}", goal, reached)
