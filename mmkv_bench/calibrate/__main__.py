"""`python -m mmkv_bench.calibrate <method>`: measures a model once and writes the artefact that the method is built with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mmkv_bench.errors import MMKVError, check_output

EMBEDDED = "pkg://mmkv_bench/tiny/weights"
HELP = {
    "prefixkv": "kept share of every layer for a grid of budgets",
    "sparsemm": "visual score of every query head",
    "hybridkv": "attention sparsity of the heads, and a threshold between static and dynamic ones",
    "mmshift": "mean and spread of the hidden states, prompt against answer, for its ablations",
}
SAMPLES = {"prefixkv": 10, "sparsemm": 250, "hybridkv": 40, "mmshift": 40}


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    command = argparse.ArgumentParser(prog="python -m mmkv_bench.calibrate", description=__doc__)
    methods = command.add_subparsers(dest="method", required=True, metavar="{" + ",".join(HELP) + "}")
    for name, text in HELP.items():
        one = methods.add_parser(name, help=text, description=f"Measure: {text}.")
        one.add_argument("--name", default="tiny", help="model.name of the runs that shall find the artefact")
        one.add_argument("--model", help="a name in conf/model, instead of --name and --path")
        one.add_argument("--weights", default="hub", help="as model.weights of a run, with --model (default: hub)")
        one.add_argument("--layers", type=int, help="as model.layers of a run, with --weights random")
        one.add_argument("--path", default=EMBEDDED, help="model folder or hub id (default: the embedded model)")
        one.add_argument("--revision", help="hub revision")
        one.add_argument("--dtype", default="auto", help="as model.dtype of a run (default: the checkpoint's)")
        one.add_argument("--device", default="cpu", choices=("cpu", "cuda", "auto"), help="default: cpu")
        one.add_argument("--samples", type=int, default=SAMPLES[name], help=f"pages (default: {SAMPLES[name]})")
        one.add_argument("--kinds", nargs="+", help="kinds of page in turn (default: all; PrefixKV's domains)")
        one.add_argument("--size", default="small", choices=("small", "large"), help="page size (default: small)")
        one.add_argument("--split", default="train", choices=("train", "dev"), help="never test pages (default: train)")
        one.add_argument("--threads", type=int, default=1, help="torch threads; bit-identical results need the same")
        one.add_argument("--out", type=Path, help="file (default: conf/calibration/<name>/<method>.json)")
        if name == "prefixkv":
            one.add_argument("--text", type=Path, help="instead of pages: a text file, or a folder of *.txt files")
            one.add_argument("--tokens", type=int, default=2048, help="of each passage of --text (default: 2048)")
            one.add_argument("--delta", type=float, default=0.0, help="tolerance of the search, in layers (default: 0)")
            one.add_argument("--steps", type=int, default=0, help="fixed number of halvings (default: until exact)")
        if name == "hybridkv":
            one.add_argument("--quantile", type=float, default=0.5, help="of the heads' sparsity, for theta")
            one.add_argument("--top", type=float, default=0.05, help="keys whose attention S* adds up, of the prompt's")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or an error's own."""
    options = parser().parse_args(argv)
    try:
        check_output()
        from mmkv_bench.calibrate.command import run

        path = run(options)
    except MMKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
