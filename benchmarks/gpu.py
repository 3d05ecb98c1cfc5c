"""What a GPU must reach, measured on it into results/gpu/<device>/, in pieces that a further call continues.

    python benchmarks/gpu.py                   # an NVIDIA GPU with 40 GB or more; random weights, nothing is downloaded
    python benchmarks/gpu.py --minutes 9       # stops between or within pieces; the same command goes on
    python benchmarks/gpu.py --rehearse DIR    # the same pieces with the embedded model on this machine's CPU, into DIR

A piece is a command that anybody can run by itself; its log lies beside the report, which is written anew after every
piece. Pieces that ended well are not run again. First a smoke: a memory limit that holds, recordings of compiled steps,
the attention kernels that ran. Then the kernels against their definitions, answers on the GPU beside the CPU's, decoding
near the memory's bandwidth, column sums, forks; at last the grid of models, lengths, batches and methods, whose rows lie
in `rows`, small batches first. This process opens no CUDA context: it would hold memory that the pieces are to measure.
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
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from benchmarks.gpu_pieces import GPU, RECORDED, REHEARSAL, Piece, lines_of, of_shape, pieces
from mmkv_bench.forecast.device_speed import slug_of

MINUTES = 30
NEEDS = (
    "benchmarks/gpu.py measures an NVIDIA GPU and nvidia-smi names none here. It needs one with 40 GB of free memory or more, a "
    "CUDA build of torch with Triton (Linux) and a C++ compiler for decode=compiled; weights are random, so nothing is "
    "downloaded. `python benchmarks/gpu.py --rehearse DIR` runs the same pieces small on the CPU."
)


def run(piece: Piece, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a piece within this time; what it came to. Its log keeps all that it printed."""
    command, begun, log = (sys.executable, *piece.words), time.monotonic(), folder / "logs" / f"{piece.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    told = {"TORCH_LOGS": "cudagraphs"} if piece.name.startswith(RECORDED) else {}
    with log.open("w") as errors:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env={**os.environ, **told}
        )
        try:
            out, _ = child.communicate(timeout=seconds)
            ended = "ok" if child.returncode in (0, *piece.failing) else f"exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            child.terminate()
            out, _ = child.communicate()
            ended = "out of time"
    stderr = log.read_text(errors="replace")
    log.write_text(f"$ {shown(piece)}\n{out}\n--- stderr\n{stderr}")
    came_to: dict[str, Any] = {"ended": ended, "seconds": time.monotonic() - begun, "command": shown(piece)}
    came_to["findings"] = [asdict(one) for one in piece.read(out, stderr)] if ended == "ok" else []
    came_to["lines"] = []
    if piece.name.startswith("grid") and ended == "ok":
        _, _, tokens, batch = piece.name.split("-")
        came_to["lines"] = [
            {name: line.get(name) for name in KEPT} for line in of_shape(lines_of(out), batch, int(tokens))
        ]
    return came_to


def shown(piece: Piece) -> str:
    return shlex.join(["python", *(word for word in piece.words if not word.startswith("out="))])


COLUMNS = ("ttft", "vision", "compression", "score", "tpot")
PEAKS = ("prefill", "reduce", "decode")
KEPT = (
    "prompt_tokens",
    "batch",
    "method",
    "status",
    "mbu",
    *(f"{name}_median" for name in COLUMNS),
    *(f"peak_{p}" for p in PEAKS),
)


def report(name: str, state: Mapping[str, Mapping[str, Any]], left: Sequence[str], rehearsal: bool) -> str:
    """Markdown."""
    words = {True: "reached", False: "MISSED", None: ""}
    title = "Rehearsal on the embedded model: no statement about any GPU" if rehearsal else "What this GPU reaches"
    day, used = datetime.datetime.now(tz=datetime.UTC).date(), ("mmkv-bench", "torch", "transformers")
    versions = ", ".join(f"{package} {version(package)}" for package in used)
    lines = [
        f"# {title}",
        "",
        f"{name}. Written by `python benchmarks/gpu.py`, {day}, {versions}. Goals are those of an H100.",
        "",
    ]
    lines += ["| what | measured | goal | |", "| --- | --- | --- | --- |"]
    for one in (one for piece in state.values() for one in piece["findings"]):
        lines.append(_line(one["what"], one["value"], one["goal"], words[one["reached"]] if one["goal"] else ""))
    heads = ("model", "tokens", "batch", "method", *COLUMNS, "MBU", *(f"peak {name}" for name in PEAKS), "status")
    lines += ["", "## Models, lengths, batches, methods", ""]
    lines += ["Medians in ms; score is part of compression, which is part of ttft. Peaks in GiB.", ""]
    lines += [_line(*heads), _line(*("---" for _ in heads))]
    lines += [_row(key.split("-")[1], line) for key, piece in state.items() for line in piece["lines"]]
    lines += ["", "## Pieces", ""]
    lines += [f"- `{piece['command']}`: {piece['ended']}, {piece['seconds']:.0f} s" for piece in state.values()]
    lines += [f"- {one}: not run yet; the same command goes on" for one in left]
    return "\n".join(lines) + "\n"


def _row(model: str, line: Mapping[str, Any]) -> str:
    times = [_shown(line.get(f"{name}_median"), 1e3) for name in COLUMNS]
    peaks = [_shown(line.get(f"peak_{name}"), 2**-30) for name in PEAKS]
    what = (model, line["prompt_tokens"], line["batch"], line["method"])
    return _line(*what, *times, _shown(line.get("mbu"), 1), *peaks, line["status"])


def _line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _shown(value: float | None, factor: float) -> str:
    return "" if value is None else f"{value * factor:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", type=Path, metavar="DIR", help="small, on the CPU, into this folder")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for this call (default {MINUTES})")
    given = parser.parse_args()
    name = "CPU" if given.rehearse else _named()
    if name is None:
        print(f"error: {NEEDS}", file=sys.stderr)
        return 2
    size = REHEARSAL if given.rehearse else GPU
    folder = (given.rehearse or ROOT / "results" / "gpu" / slug_of(name, "cuda", 1)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "pieces.json"
    state: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    end, todo = time.monotonic() + 60 * given.minutes, list(pieces(size, folder))
    for place, piece in enumerate(todo):
        left = end - time.monotonic()
        if left <= 0:
            break
        if state.get(piece.name, {}).get("ended") != "ok":
            print(f"{place + 1} of {len(todo)}: {piece.name}", file=sys.stderr)
            state[piece.name] = run(piece, folder, left)
            kept.write_text(json.dumps(state, indent=1))
        waiting = [one.name for one in todo if one.name not in state]
        (folder / "report.md").write_text(report(name, state, waiting, given.rehearse is not None))
    print((folder / "report.md").read_text())
    return 0 if all(state.get(piece.name, {}).get("ended") == "ok" for piece in todo) else 1


def _named() -> str | None:
    """The first GPU, by nvidia-smi: torch would open a context to say it."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
            .stdout.splitlines()[0]
            .strip()
        )
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


if __name__ == "__main__":
    sys.exit(main())
