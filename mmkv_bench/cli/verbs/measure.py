"""`mmkv-bench calibrate` measures a model for the artefact of a method, `mmkv-bench diagnose` what papers analyse."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from mmkv_bench.cli.grammar import Parser, configuration, count, not_negative, overrides_of
from mmkv_bench.errors import ConfigError

EMBEDDED = "pkg://mmkv_bench/tiny/weights"
CALIBRATED = {
    "prefixkv": ("kept share of every layer for a grid of budgets", 10),
    "sparsemm": ("visual score of every query head", 250),
    "hybridkv": ("attention sparsity of the heads, and a threshold between static and dynamic ones", 40),
    "mmshift": ("mean and spread of the hidden states, prompt against answer, for its ablations", 40),
}
"""Method -> (what is measured, in how many samples)."""
OF_METHOD: dict[str, dict[str, Any]] = {
    "prefixkv": {"text": None, "tokens": 2048, "delta": 0.0, "steps": 0},
    "hybridkv": {"quantile": 0.5, "top": 0.05},
}
"""Flags of one method, with their defaults."""
OF_PAGES = {"kinds": None, "size": "small", "split": "train"}
OF_DATASETS = ("draw", "instruction")


def calibrate_options(parser: Parser) -> None:
    """Flags for the method, the model, and the pages or samples."""
    measured = "; ".join(f"{name}: {text}" for name, (text, _) in CALIBRATED.items())
    pages = ", ".join(f"{number} for {name}" for name, (_, number) in CALIBRATED.items())
    parser.add_argument("method", choices=tuple(CALIBRATED), help=measured)
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
    parser.lists({"kinds": "kinds of page in turn (default: all)"})
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


def calibrate(given: argparse.Namespace) -> int:
    """Measure, or import, and write the artefact."""
    given = with_defaults(given)
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


def with_defaults(given: argparse.Namespace) -> argparse.Namespace:
    """The options with the method's defaults.

    Raises:
        ConfigError: a flag of another method, or of another source of samples: pages, a text, a dataset, released files.
    """
    flags = [flag for flag in ("samples", *OF_PAGES, *OF_DATASETS, "text") if getattr(given, flag) is not None]
    if given.imports and (flags or given.overrides):
        what = given.overrides[0] if given.overrides else f"--{flags[0]}"
        raise ConfigError(f"--import measures nothing, so {what} has no effect; drop one of the two")
    pages = [flag for flag in flags if flag in (*OF_PAGES, "text")]
    if given.overrides and pages:
        raise ConfigError(f"--{pages[0]} is not for samples of a dataset ({given.overrides[0]}); drop one of the two")
    chance = [flag for flag in flags if flag in OF_DATASETS]
    if chance and not given.overrides:
        raise ConfigError(f"--{chance[0]} chooses among samples of a dataset; name one with dataset=<name>")
    accepted = OF_METHOD.get(given.method, {})
    for method, flag in ((method, flag) for method, flags in OF_METHOD.items() for flag in flags):
        if flag in accepted:
            continue
        if getattr(given, flag) is not None:
            takes = ", ".join(f"--{name}" for name in accepted) or "none of its own"
            raise ConfigError(f"--{flag} is {method}'s; {given.method} takes {takes}; drop it")
        delattr(given, flag)
    for flag, default in {**accepted, **OF_PAGES, "samples": CALIBRATED[given.method][1]}.items():
        setattr(given, flag, default if getattr(given, flag) is None else getattr(given, flag))
    return given


# ---------------------------------------------------------------------- diagnose
ANALYSES = {
    "hidden_states": "mean and spread of the query projection's input, prompt (text, visual) against answer",
    "coverage": "share of the answer's attention on the entries that method= keeps at budget=",
    "histogram": "density of the values of the query projection's input, prompt and answer",
    "outlier_hits": "share of outlier query channels that MM-ShiftKV's proxies reach, gamma 1 and 10",
    "lorenz": "Lorenz curve and Gini coefficient of the attention that tokens gather",
    "prefix_search": "PrefixKV's kept share of every layer at nine budgets, and how many halvings its search takes",
    "feature_error": "how far each layer's output is from the full cache's, decoding full's answer from what method= keeps",
    "entropy": "MEDA's cross-modal entropy",
    "cumulative_attention": "attention that text pays to its largest keys, 20 shares of them, per KV head",
    "focus": "how far decoding looks at the same 5 % of the keys again, per KV head (the answer is --tokens long)",
    "sinks": "attention on the first token per query head, share of heads above .3, largest activation over the median",
    "vision": "the answer's attention on visual tokens, how concentrated it is, visual sinks, likeness of visual keys",
    "power_spectrum": "energy of keys and values in 128 bands of frequency along the prompt",
}
OF_METHODS = ("coverage", "feature_error")


def diagnose_options(parser: Parser) -> None:
    """The analysis, the model and the samples."""
    summaries = "; ".join(f"{name}: {text}" for name, text in ANALYSES.items())
    parser.add_argument("name", choices=tuple(ANALYSES), help=summaries.replace("%", "%%"))
    configuration(parser)
    parser.add_argument("--samples", type=count, default=10, help="of the dataset (default: 10)")
    parser.add_argument("--draw", type=not_negative, metavar="SEED", help="samples by chance (default: the first ones)")
    parser.add_argument(
        "--tokens",
        type=count,
        default=64,
        help="of full's own answer, at most, where it is looked at (default: 64)",
    )
    parser.examples(
        "mmkv-bench diagnose lorenz dataset=pages_lookup --samples 20 out=runs/figures",
        "mmkv-bench diagnose coverage 'method=[snapkv,mmshift]' 'budget=[64,256]' dataset=pages_walk out=runs/figures",
        "mmkv-bench diagnose hidden_states model=qwen2_5_vl_7b dataset=ocrbench --samples 100 out=runs/figures",
    )


def diagnose(given: argparse.Namespace) -> int:
    """Measure what is missing, store it sample by sample, and print the folder."""
    from mmkv_bench.config.compose import compose
    from mmkv_bench.diagnostics.analysis import diagnose, methods_of
    from mmkv_bench.diagnostics.dataset_samples import KEYS, of_dataset
    from mmkv_bench.models.load import quiet_libraries

    if given.json:
        raise ConfigError(
            "--json: diagnose ends with no document; its rows are parquet, in the table diagnostics of out="
        )
    of_methods = ("method", "methods", "budget", "reading") if given.name in OF_METHODS else ()
    words, allowed = overrides_of(given), ("model", "dataset", "data", "out", *of_methods)
    groups = [word.partition("=")[0].partition(".")[0].lstrip("+") for word in words]
    for word, group in zip(words, groups, strict=True):
        if group not in (*KEYS, *allowed, "hydra"):
            raise ConfigError(f"{word} has no effect on {given.name}; allowed: {', '.join(allowed)} and their keys")
    config = compose(words)
    ours = [word for word, group in zip(words, groups, strict=True) if group in KEYS]
    if not any(word.startswith("dataset=") for word in ours):
        ours = [f"dataset={next(iter(config.datasets))}", *ours]
    quiet_libraries()
    questions = of_dataset(ours, given.samples, given.draw, calibrating=False)
    methods = partial(methods_of, config.method_config, config.budget, config.model.name) if of_methods else None
    out = Path(config.out)
    written = diagnose(given.name, config.model, questions, given.tokens, out, methods)
    earlier = f", {written.before} had been measured before" if written.before else ""
    print(f"wrote {written.numbers} numbers of {written.measured} samples to {out / 'diagnostics'}{earlier}")
    return 0
