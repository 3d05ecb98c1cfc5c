"""What a GPU must reach, measured on it into results/gpu/<device>/; all but the largest batch within ten minutes.

    python benchmarks/gpu.py            # an NVIDIA GPU with 40 GB or more; random weights, nothing is downloaded
    python benchmarks/gpu.py --minutes 90      # so long for all of it
    python benchmarks/gpu.py --rehearse DIR    # the same steps with the embedded model on this machine's CPU, into DIR

Each step is a command that anybody can run by itself; it stands in the report with its log beside it, and the report is
written anew after every step, so that a step that fails or runs out of time loses no other. Steps: decoding near the memory's
bandwidth and the share of scoring in the prefill (`scenario=efficiency`, compiled), column sums beside what their products
cost at least, 21 cells beside one full run (`benchmarks/fork.py`), and the largest batch at the longest prompt. That one
comes last: every size that it tries prefills as many prompts, which takes an hour at 32K tokens of a 7B model.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder: its statistics.py must not stand in for the standard module

# ruff: noqa: E402
import argparse
import datetime
import json
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmkv_bench import devices
from mmkv_bench.errors import MMKVError

MINUTES = 10
NEEDS = (
    "benchmarks/gpu.py measures an NVIDIA GPU and torch sees none here. It needs one with 40 GB of free memory or more, a "
    "CUDA build of torch with Triton (Linux), a C++ compiler for decode=compiled, and ten minutes; weights are random, so "
    "nothing is downloaded. `python benchmarks/gpu.py --rehearse DIR` runs the same steps small on the CPU."
)


@dataclass(frozen=True)
class Size:
    """How large everything is: of the measurement, and of its rehearsal.

    Attributes:
        model: its settings; place: torch's name of the device; short, long: prompt tokens; budget: of the prompt.
        batch_tokens: new tokens of the largest batch; memory: further settings of that search.
        heads, dim: of the column sums; fork: arguments of benchmarks/fork.py.
    """

    model: tuple[str, ...]
    place: str
    short: int
    long: int
    new_tokens: int
    batch_tokens: int
    repeats: int
    memory: tuple[str, ...]
    fork: tuple[str, ...]
    heads: int = 7
    dim: int = 128
    budget: str = "0.1"


GPU = Size(
    ("model=qwen2_5_vl_7b", "model.weights=random", "model.device=cuda"),
    "cuda",
    short=2048,
    long=32768,
    new_tokens=64,
    batch_tokens=128,
    repeats=5,
    memory=(),
    fork=("--random", "qwen2_5_vl_7b", "--device", "cuda", "--samples", "5"),
)
REHEARSAL = Size(
    ("model=tiny", "model.device=cpu"),
    "cpu",
    short=64,
    long=256,
    new_tokens=4,
    batch_tokens=4,
    repeats=1,
    memory=("memory_limit=8MiB",),
    fork=("--samples", "1"),
)


@dataclass(frozen=True)
class Finding:
    """One number and what it is held against; `reached` is None where it could not be measured."""

    what: str
    value: str
    goal: str
    reached: bool | None


class Steps:
    """Runs commands within the time that is left, and keeps what they print."""

    def __init__(self, folder: Path, minutes: float):
        self.folder, self.end = folder, time.monotonic() + 60 * minutes
        self.ran: list[tuple[str, float, str]] = []

    def run(self, name: str, command: Sequence[str]) -> str | None:
        """What the command printed, or None where it failed or had no time left; its log says why."""
        started, left = time.monotonic(), self.end - time.monotonic()
        log = self.folder / f"{name}.log"
        ended, printed = "no time was left", ""
        if left > 0:
            with log.open("w") as errors:
                try:
                    done = subprocess.run(
                        command, check=False, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, timeout=left
                    )
                    printed, ended = done.stdout, "ok" if done.returncode == 0 else f"exit code {done.returncode}"
                except subprocess.TimeoutExpired as late:
                    printed = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
                    ended = "out of time"
            log.write_text(f"$ {_shown(command)}\n{printed}\n--- stderr\n{log.read_text(errors='replace')}")
        self.ran.append((_shown(command), time.monotonic() - started, ended))
        return printed if printed and ended != "out of time" else None

    def efficiency(self, name: str, size: Size, *settings: str) -> list[dict[str, Any]]:
        """Lines of one run of `scenario=efficiency` in this size; empty where it failed."""
        run = ("-m", "mmkv_bench", "scenario=efficiency", *size.model, f"budget={size.budget}")
        with tempfile.TemporaryDirectory() as out:
            printed = self.run(name, [sys.executable, *run, *settings, "json=true", f"out={out}"])
        last = (printed or "").strip().rpartition("\n")[2]
        return json.loads(last)["efficiency"] if last.startswith("{") else []


def _shown(command: Sequence[str]) -> str:
    words = [word for word in command if not word.startswith("out=")]
    return shlex.join(["python" if word == sys.executable else word for word in words])


# ---------------------------------------------------------------------- steps
def decoding(steps: Steps, size: Size) -> Iterable[Finding]:
    """A step beside the bandwidth, and scoring beside the whole prefill."""
    settings = ("method=[full,snapkv,mmshift]", f"lengths=[{size.short},{size.long}]", "decode=compiled")
    lines = steps.efficiency("decode", size, *settings, f"new_tokens={size.new_tokens}", f"repeats={size.repeats}")
    share = f"{float(size.budget):.0%}"
    for method, tokens, text in (
        ("full", size.short, f"MBU of full at {size.short} tokens"),
        ("snapkv", size.long, f"MBU of snapkv with {share} of {size.long} tokens"),
    ):
        yield held(text, _of(lines, method, tokens, "mbu"), at_least=0.6)
    line = _line(lines, "mmshift", size.long)
    score, ttft = line.get("score_median"), line.get("ttft_median")
    yield held(
        f"mmshift's scoring, of the time to the first token at {size.long}",
        score / ttft if score is not None and ttft else None,
        at_most=0.02,
    )


def batches(steps: Steps, size: Size) -> Iterable[Finding]:
    """The largest batch that finishes, with a tenth kept and with all; admitted one by one, and together."""
    for way, goal in (("one_by_one", 8.0), ("together", None)):
        settings = (
            "method=[full,snapkv]",
            f"lengths=[{size.long}]",
            "batch=[max]",
            f"batch_prefill={way}",
            *size.memory,
        )
        lines = steps.efficiency(f"batch-{way}", size, *settings, f"new_tokens={size.batch_tokens}", "repeats=1")
        most = {name: max((line["batch"] for line in _lines(lines, name)), default=None) for name in ("full", "snapkv")}
        ratio = most["snapkv"] / most["full"] if most["full"] and most["snapkv"] else None
        text = f"largest batch at {size.long} tokens, {way.replace('_', ' ')}: snapkv {most['snapkv']}, full {most['full']}"
        yield held(text, ratio, at_least=goal)


def sums(steps: Steps, size: Size) -> Iterable[Finding]:
    """Column sums of one KV head's group beside the time of their products: scores of every causal pair, twice, since the
    first pass finds each row's denominator."""
    import torch

    from mmkv_bench.compression.numerics.attention import column_sums
    from mmkv_bench.generation.device_speed import measured

    speed, device = measured(size.place), devices.at(size.place)
    dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(heads, size.long, size.dim, generator=generator).to(device.place, dtype)
        for heads in (size.heads, 1)
    )
    best = least_seconds(lambda: column_sums(query, key, size.dim**-0.5), device)
    pairs = size.long * (size.long + 1) // 2 * size.heads
    limit = 2 * pairs * 2 * size.dim / speed.rates[str(dtype).removeprefix("torch.")]
    steps.ran.append((f"column sums, {size.heads} query heads, {size.long} tokens, {dtype}", best, "ok"))
    yield held(
        f"column sums at {size.long} tokens: {best * 1e3:.2f} ms, of the time of their products",
        best / limit,
        at_most=2,
    )


def forks(steps: Steps, size: Size) -> Iterable[Finding]:
    """21 cells of one shared prefill beside one full run."""
    printed = steps.run("fork", [sys.executable, "-P", str(Path("benchmarks") / "fork.py"), *size.fork])
    found = re.search(r"21 cells cost ([\d.]+) full runs", printed or "")
    yield held("21 cells, in full runs", float(found[1]) if found else None, at_most=2.5)


STEPS: tuple[Callable[[Steps, Size], Iterable[Finding]], ...] = (decoding, sums, forks, batches)


def least_seconds(work: Callable[[], object], device: devices.Device, rounds: int = 5) -> float:
    """Of one call, after two that warm up."""
    found = []
    for number in range(rounds + 2):
        device.synchronise()
        start = device.mark()
        work()
        end = device.mark()
        device.synchronise()
        if number >= 2:
            found.append(device.between(start, end))
    return min(found)


def _lines(lines: Sequence[Mapping[str, Any]], method: str) -> list[Mapping[str, Any]]:
    return [line for line in lines if line["method"] == method and line["status"] == "ok"]


def _line(lines: Sequence[Mapping[str, Any]], method: str, tokens: int) -> Mapping[str, Any]:
    return next((line for line in _lines(lines, method) if line["prompt_tokens"] == tokens), {})


def _of(lines: Sequence[Mapping[str, Any]], method: str, tokens: int, column: str) -> float | None:
    return _line(lines, method, tokens).get(column)


def held(what: str, value: float | None, at_least: float | None = None, at_most: float | None = None) -> Finding:
    """A number beside its goal, where there is one."""
    goal = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}" if at_most is not None else ""
    if value is None:
        return Finding(what, "not measured", goal, None)
    reached = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    return Finding(what, f"{value:.3g}", goal, reached)


# ---------------------------------------------------------------------- report
def report(size: Size, findings: Sequence[Finding], steps: Steps, rehearsal: bool) -> str:
    """Markdown."""
    import torch
    import transformers

    from mmkv_bench.store.provenance import device_name, version

    words = {True: "reached", False: "MISSED", None: ""}
    title = "Rehearsal on the embedded model: no statement about any GPU" if rehearsal else "What this GPU reaches"
    lines = [f"# {title}", ""]
    lines += [
        f"{device_name(size.place)}, {' '.join(size.model)}. Written by `python benchmarks/gpu.py`; goals are those of an H100.",
        "",
        f"{datetime.datetime.now(tz=datetime.UTC).date()}, mmkv-bench {version('mmkv-bench')}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}.",
        "",
        "| what | measured | goal | |",
        "| --- | --- | --- | --- |",
        *(f"| {one.what} | {one.value} | {one.goal} | {words[one.reached] if one.goal else ''} |" for one in findings),
        "",
        "## Steps",
        "",
        *(f"- `{command}`: {ended}, {seconds:.0f} s" for command, seconds, ended in steps.ran),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", type=Path, metavar="DIR", help="small, on the CPU, into this folder")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all steps (default {MINUTES})")
    given = parser.parse_args()
    rehearsal = given.rehearse
    if rehearsal is None and devices.KINDS["cuda"].count() == 0:
        print(f"error: {NEEDS}", file=sys.stderr)
        return 2
    from mmkv_bench.models.devices import slug_of
    from mmkv_bench.store.provenance import device_name

    size = REHEARSAL if rehearsal else GPU
    folder = rehearsal or ROOT / "results" / "gpu" / slug_of(device_name(size.place), devices.at(size.place).kind, 1)
    folder.mkdir(parents=True, exist_ok=True)
    steps, findings = Steps(folder, given.minutes), []
    for step in STEPS:
        findings += step(steps, size)
        (folder / "report.md").write_text(report(size, findings, steps, rehearsal is not None))
    print((folder / "report.md").read_text())
    return 0 if all(one.reached is not None for one in findings) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MMKVError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
