"""`python -m tools.matrix`: which model family runs which dataset with which method, found out by running them.

Every family has random weights of two layers at true width and its own processor; every dataset has small data of our
own making in its upstream schema; one sample, all methods, protocols paper and strict, on CPU (conf/experiment/matrix.yaml).
A cell of the grid is `ok` or the reason why not: refused before any work (which sentence), or failed (which status).
Answers of random weights mean nothing and are not scored; tests hold every task's scorer to known answers on the same data.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmkv_bench.config.files import options
from mmkv_bench.datasets import fixtures
from mmkv_bench.errors import nearest
from tools.matrix.grid import OK, UNRUN, as_csv, merged, read, render, write

FAMILIES = (
    "qwen2_vl_7b",
    "qwen2_5_vl_3b",
    "qwen3_vl_8b",
    "llava_v1_5_7b",
    "llava_v1_6_vicuna_7b",
    "llava_v1_6_mistral_7b",
    "llava_onevision_7b",
    "llava_video_7b",
    "internvl3_2b",
    "smolvlm_256m",
    "smolvlm2_2_2b",
    "llama_3_8b",
    "gemma3_270m",
    "gemma3_4b",
    "gemma4_e2b",
)
"""One model of each family, by its name in conf/model."""
LARGE = ("gpt_oss_20b", "qwen3_5_9b")
"""Families whose smallest shape takes more memory than the grid's machine has; tests hold them on narrow weights."""

PAGES = ("chain", "handwritten", "lookup", "multi_image", "redundant", "walk")
"""Tasks of the embedded model's pages, which are drawn and need no fixture."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 when a cell of the grid is a hole without a reason or a model's process failed; 2 for a model or a
    dataset that is not in the grid."""
    asked = _parser().parse_args(argv)
    if asked.one:
        from tools.matrix.running import run_model

        write(
            asked.out / f"{asked.one}.json", run_model(asked.one, asked.datasets or datasets(), asked.out, asked.dtype)
        )
        return 0
    models, names = asked.models or FAMILIES, asked.datasets or datasets()
    if asked.write and (others := [model for model in models if model not in FAMILIES]):
        print(f"error: {others[0]} is not in the grid; {nearest(others[0], FAMILIES)}", file=sys.stderr)
        return 2
    if asked.write and (others := [name for name in names if name not in datasets()]):
        print(f"error: {others[0]} is not in the grid; {nearest(others[0], datasets())}", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(asked.processes) as pool:
        ended = list(pool.map(lambda model: _start(model, asked), [] if asked.render else models))
    lines = read(asked.out, models, names)
    if asked.write:  # the whole grid, with what this command did not run as it stands there
        lines = merged(lines, asked.write / "grid.csv", FAMILIES, datasets())
        run = {line.model for line in lines if line.reason != UNRUN}
        lines = [line for line in lines if line.model in run]
    text = render(lines)
    if asked.write:
        asked.write.mkdir(parents=True, exist_ok=True)
        (asked.write / "README.md").write_text(text)
        (asked.write / "grid.csv").write_text(as_csv(lines))
    print(text)
    return int(any(ended) or any(not line.reason for line in lines if line.result != OK))


def _start(model: str, asked: argparse.Namespace) -> int:
    """A process for each model: what it leaves in memory is no concern of the next. Returns its exit code."""
    words = [sys.executable, "-m", "tools.matrix", "--one", model, "--out", str(asked.out), "--dtype", asked.dtype]
    done = subprocess.run([*words, *(["--datasets", *asked.datasets] if asked.datasets else [])], check=False)
    if done.returncode:
        print(f"{model} ended with exit code {done.returncode}; the grid shows what it had before", file=sys.stderr)
    return done.returncode


def _parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__)
    command.add_argument(
        "--models",
        nargs="+",
        help=f"names in conf/model (default: {', '.join(FAMILIES)})",
    )
    command.add_argument(
        "--datasets", nargs="+", help="names in conf/dataset (default: those with a fixture, and pages)"
    )
    command.add_argument("--out", type=Path, default=Path("runs/matrix"), help="rows (default: runs/matrix)")
    command.add_argument(
        "--write",
        type=Path,
        help="folder whose README.md and grid.csv take up what was run (make matrix: results/matrix)",
    )
    command.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the models (default: bfloat16; float32 is several times faster on a CPU without bfloat16 arithmetic)",
    )
    command.add_argument("--processes", type=int, default=1, help="models run side by side (default: 1)")
    command.add_argument("--render", action="store_true", help="run nothing, show what was run before")
    command.add_argument("--one", help=argparse.SUPPRESS)
    return command


def datasets() -> list[str]:
    """Every dataset with data of our own making in an upstream schema, and the embedded model's pages.

    Texts of our own, the reader's pages and streams belong to one model each and have stores of their own."""
    drawn = {*fixtures.names(), *(f"pages_{task}" for task in PAGES)}
    return [name for name in options("dataset") if name in drawn]


if __name__ == "__main__":
    sys.exit(main())
