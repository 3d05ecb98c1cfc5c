"""`mmkv-bench calibrate <method>`: measures a model once and writes the artefact that the method is built with."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmkv_bench.cli.grammar import Listed, Parser, count, not_negative
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

OF_PAGES = {"kinds": None, "size": "small", "split": "train"}
OF_DATASETS = ("draw", "instruction")
MEASURING = ("samples", "kinds", "size", "split", *OF_DATASETS, "text")


def options(parser: Parser) -> None:
    """Flags for the method, the model, and the pages or samples."""
    measured = "; ".join(f"{name}: {text}" for name, text in MEASURED.items())
    pages = ", ".join(f"{number} for {name}" for name, number in SAMPLES.items())
    parser.add_argument("method", choices=tuple(MEASURED), help=measured)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="instead of pages, samples of a dataset of a run: dataset=<name> with data=, data.root=, dataset.<key>=",
    )
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
    parser.add_argument("--samples", type=count, help=f"pages or samples (default: {pages})")
    parser.add_argument("--kinds", action=Listed, metavar="NAMES", help="kinds of page in turn (default: all)")
    parser.add_argument("--size", choices=("small", "large"), help="page size (default: small)")
    parser.add_argument("--split", choices=("train", "dev"), help="of pages, never test ones (default: train)")
    parser.add_argument(
        "--draw", type=not_negative, metavar="SEED", help="samples of a dataset by chance (default: its first ones)"
    )
    parser.add_argument(
        "--instruction",
        metavar="LOW:HIGH",
        help="samples of a dataset with more than LOW and at most HIGH tokens of text",
    )
    parser.add_argument(
        "--import",
        dest="imports",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing: take over the JSON files that PrefixKV's or SparseMM's authors released",
    )
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
        "mmkv-bench calibrate prefixkv --model llava_v1_5_7b dataset=textvqa --samples 10 --draw 0 --out textvqa.json",
        "mmkv-bench calibrate sparsemm --model qwen2_5_vl_7b --device cuda --out qwen.json",
        "mmkv-bench calibrate prefixkv --model llava_v1_5_7b --import confs/prefixkv_llava-v1.5-7b_0.*.json",
    )


def complete(given: argparse.Namespace) -> argparse.Namespace:
    """The options with the method's own defaults.

    Raises:
        ConfigError: a flag of another method, or of another source of samples.
    """
    own = OWN.get(given.method, {})
    _refuse_mixed(given)
    for method, flags in OWN.items():
        for flag, default in flags.items():
            if method == given.method:
                setattr(given, flag, default if getattr(given, flag) is None else getattr(given, flag))
            elif flag not in own and getattr(given, flag) is not None:
                raise ConfigError(f"--{flag} is {method}'s; {given.method} takes {_flags(own)}; drop it")
            elif flag not in own:
                delattr(given, flag)
    given.samples = given.samples or SAMPLES[given.method]
    for flag, default in OF_PAGES.items():
        setattr(given, flag, default if getattr(given, flag) is None else getattr(given, flag))
    return given


def _refuse_mixed(given: argparse.Namespace) -> None:
    """Samples come from one source: pages, a text, a dataset, or released files."""
    said = [flag for flag in MEASURING if getattr(given, flag) is not None]
    if given.imports and (said or given.overrides):
        what = given.overrides[0] if given.overrides else f"--{said[0]}"
        raise ConfigError(f"--import measures nothing, so {what} has no effect; drop one of the two")
    pages = [flag for flag in (*OF_PAGES, "text") if flag in said]
    if given.overrides and pages:
        raise ConfigError(f"--{pages[0]} is not for samples of a dataset ({given.overrides[0]}); drop one of the two")
    only = [flag for flag in OF_DATASETS if flag in said]
    if only and not given.overrides:
        raise ConfigError(f"--{only[0]} chooses among samples of a dataset; name one with dataset=<name>")


def answer(given: argparse.Namespace) -> int:
    """Measure, or import, write the file, say where it is."""
    given = complete(given)
    if given.overrides and given.method == "sparsemm":
        raise ConfigError(
            "sparsemm must know where each character of an answer stands, which pages tell and datasets do not; leave "
            f"{given.overrides[0]} out, or --import the head scores that its authors released"
        )
    questions = None
    if given.overrides:
        from mmkv_bench.diagnostics.dataset_samples import of_dataset

        questions = of_dataset(given.overrides, given.samples, given.draw, given.instruction)
    from mmkv_bench.calibrate.command import run

    print(f"wrote {run(given, questions)}")
    return 0


def _flags(own: Iterable[str]) -> str:
    return ", ".join(f"--{flag}" for flag in own) or "none of its own"
