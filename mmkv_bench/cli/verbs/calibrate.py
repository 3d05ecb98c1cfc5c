"""`mmkv-bench calibrate <method>`: measures a model once and writes the artefact that the method is built with."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmkv_bench.cli.grammar import Listed, Parser, count
from mmkv_bench.errors import ConfigError

SUMMARY = "measure a model once and write the artefact that a method is built with"

EMBEDDED = "pkg://mmkv_bench/tiny/weights"
MEASURED = {
    "prefixkv": "kept share of every layer for a grid of budgets",
    "sparsemm": "visual score of every query head",
    "hybridkv": "attention sparsity of the heads, and a threshold between static and dynamic ones",
    "mmshift": "mean and spread of the hidden states, prompt against answer, for its ablations",
}
SAMPLES = {"prefixkv": 10, "sparsemm": 250, "hybridkv": 40, "mmshift": 40}
OWN: dict[str, dict[str, Any]] = {
    "prefixkv": {"text": None, "tokens": 2048, "delta": 0.0, "steps": 0},
    "hybridkv": {"quantile": 0.5, "top": 0.05},
}
"""Flags of one method, with their defaults."""


def options(parser: Parser) -> None:
    """Which method, which model, on which pages."""
    measured = "; ".join(f"{name}: {text}" for name, text in MEASURED.items())
    pages = ", ".join(f"{number} for {name}" for name, number in SAMPLES.items())
    parser.add_argument("method", choices=tuple(MEASURED), help=measured)
    parser.add_argument(
        "--name", default="tiny", help="model.name of the runs that shall find the artefact (default: tiny)"
    )
    parser.add_argument("--model", help="a name in conf/model, instead of --name and --path")
    parser.add_argument("--weights", default="hub", help="as model.weights of a run, with --model (default: hub)")
    parser.add_argument("--layers", type=int, help="as model.layers of a run, with --weights random")
    parser.add_argument("--path", default=EMBEDDED, help="model folder or hub id (default: the embedded model)")
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument("--dtype", default="auto", help="as model.dtype of a run (default: the checkpoint's)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "auto"), help="default: cpu")
    parser.add_argument("--samples", type=count, help=f"pages (default: {pages})")
    parser.add_argument("--kinds", action=Listed, metavar="NAMES", help="kinds of page in turn (default: all)")
    parser.add_argument("--size", default="small", choices=("small", "large"), help="page size (default: small)")
    parser.add_argument("--split", default="train", choices=("train", "dev"), help="never test pages (default: train)")
    parser.add_argument("--threads", type=count, default=1, help="torch threads; bit-identical results need the same")
    parser.add_argument("--out", type=Path, help="file (default: conf/calibration/<name>/<method>.json)")
    parser.add_argument("--text", type=Path, help="prefixkv, instead of pages: a text file, or a folder of *.txt files")
    parser.add_argument("--tokens", type=int, help="prefixkv: of each passage of --text (default: 2048)")
    parser.add_argument("--delta", type=float, help="prefixkv: tolerance of the search, in layers (default: 0)")
    parser.add_argument("--steps", type=int, help="prefixkv: fixed number of halvings (default: until exact)")
    parser.add_argument("--quantile", type=float, help="hybridkv: of the heads' sparsity, for theta (default: 0.5)")
    parser.add_argument(
        "--top", type=float, help="hybridkv: keys whose attention S* adds up, of the prompt's (default: 0.05)"
    )
    parser.examples(
        "mmkv-bench calibrate prefixkv",
        "mmkv-bench calibrate sparsemm --model qwen2_5_vl_7b --device cuda --out qwen.json",
    )


def complete(given: argparse.Namespace) -> argparse.Namespace:
    """The options with the method's own defaults.

    Raises:
        ConfigError: a flag of another method.
    """
    own = OWN.get(given.method, {})
    for method, flags in OWN.items():
        for flag, default in flags.items():
            if method == given.method:
                setattr(given, flag, default if getattr(given, flag) is None else getattr(given, flag))
            elif flag not in own and getattr(given, flag) is not None:
                raise ConfigError(f"--{flag} is {method}'s; {given.method} takes {_flags(own)}; drop it")
            elif flag not in own:
                delattr(given, flag)
    given.samples = given.samples or SAMPLES[given.method]
    return given


def answer(given: argparse.Namespace) -> int:
    """Measure, write the file, say where it is."""
    given = complete(given)
    from mmkv_bench.calibrate.command import run

    print(f"wrote {run(given)}")
    return 0


def _flags(own: Iterable[str]) -> str:
    return ", ".join(f"--{flag}" for flag in own) or "none of its own"
