"""`mmkv-bench diagnose`: measure a paper's analysis in the prompts of a dataset; rows of the table `diagnostics`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from mmkv_bench.cli.grammar import Parser, configuration, count, not_negative, overrides_of
from mmkv_bench.errors import ConfigError

SUMMARY = "measure what the papers' analyses look at, layer by layer, in prompts of a dataset"

MEASURED = {
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
    "power_spectrum": "energy of keys and values in 128 bands of frequency along the prompt",
}
SAMPLES, TOKENS = 10, 64
OF_METHODS = ("coverage", "feature_error")
SETTINGS_OF_METHODS = ("method", "methods", "budget", "reading")


def options(parser: Parser) -> None:
    """Declare the analysis, the model and the samples."""
    summaries = "; ".join(f"{name}: {text}" for name, text in MEASURED.items())
    parser.add_argument("name", choices=tuple(MEASURED), help=summaries.replace("%", "%%"))
    configuration(parser)
    parser.add_argument("--samples", type=count, default=SAMPLES, help=f"of the dataset (default: {SAMPLES})")
    parser.add_argument("--draw", type=not_negative, metavar="SEED", help="samples by chance (default: the first ones)")
    parser.add_argument(
        "--tokens",
        type=count,
        default=TOKENS,
        help=f"of full's own answer, at most, where it is looked at (default: {TOKENS})",
    )
    parser.examples(
        "mmkv-bench diagnose lorenz dataset=pages_lookup --samples 20 out=runs/figures",
        "mmkv-bench diagnose coverage 'method=[snapkv,mmshift]' 'budget=[64,256]' dataset=pages_walk out=runs/figures",
        "mmkv-bench diagnose hidden_states model=qwen2_5_vl_7b dataset=ocrbench --samples 100 out=runs/figures",
    )


def answer(given: argparse.Namespace) -> int:
    """Measure what is missing, store it sample by sample, say where."""
    from mmkv_bench.config.compose import compose
    from mmkv_bench.diagnostics.analysis import diagnose, methods_of
    from mmkv_bench.diagnostics.dataset_samples import KEYS, of_dataset
    from mmkv_bench.models.process import quiet_libraries

    if given.json:
        raise ConfigError(
            "--json: diagnose ends with no document; its rows are parquet, in the table diagnostics of out="
        )
    words = overrides_of(given)
    ours = [word for word in words if _group(word) in KEYS]
    allowed = ("model", "dataset", "data", "out", *(SETTINGS_OF_METHODS if given.name in OF_METHODS else ()))
    others = [word for word in words if _group(word) not in (*KEYS, *allowed, "hydra")]
    if others:
        raise ConfigError(f"{others[0]} has no effect on {given.name}; allowed: {', '.join(allowed)} and their keys")
    config = compose(words)
    if not any(word.partition("=")[0] == "dataset" for word in ours):
        ours = [f"dataset={next(iter(config.datasets))}", *ours]
    quiet_libraries()
    questions = of_dataset(ours, given.samples, given.draw, calibrating=False)
    methods = partial(methods_of, config) if given.name in OF_METHODS else None
    out = Path(config.out)
    written = diagnose(given.name, config.model, questions, given.tokens, out, methods)
    earlier = f", {written.before} had been measured before" if written.before else ""
    print(f"wrote {written.numbers} numbers of {written.measured} samples to {out / 'diagnostics'}{earlier}")
    return 0


def _group(word: str) -> str:
    return word.partition("=")[0].partition(".")[0].lstrip("+")
