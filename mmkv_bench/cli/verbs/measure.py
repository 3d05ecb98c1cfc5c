"""`mmkv-bench calibrate` measures a model for a method's calibration; `mmkv-bench diagnose` measures the papers' analyses."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from mmkv_bench.cli.grammar import overrides_of
from mmkv_bench.errors import ConfigError

SAMPLES = {"prefixkv": 10, "sparsemm": 250, "hybridkv": 40, "mmshift": 40}
"""Method to its default number of calibration samples."""
OF_METHOD: dict[str, dict[str, Any]] = {
    "prefixkv": {"text": None, "tokens": 2048, "delta": 0.0, "steps": 0},
    "hybridkv": {"quantile": 0.5, "top": 0.05},
}
"""Flags of one method only, with their defaults."""
OF_PAGES = {"kinds": None, "size": "small", "split": "train"}
OF_DATASETS = ("draw", "instruction")


def calibrate(given: argparse.Namespace) -> int:
    """Write a method's calibration artefact, measured on samples or imported. Return 0."""
    given = with_defaults(given)
    if given.overrides and given.method == "sparsemm":
        raise ConfigError(
            "sparsemm needs the position of each answer character, which only generated pages have; leave "
            f"{given.overrides[0]} out, or import its authors' head scores with --import"
        )
    questions = None
    if given.overrides:
        from mmkv_bench.diagnostics.dataset_samples import of_dataset

        questions = of_dataset(given.overrides, given.samples, given.draw, given.instruction)
    from mmkv_bench.calibrate.command import run

    print(f"wrote {run(given, questions)}")
    return 0


def with_defaults(given: argparse.Namespace) -> argparse.Namespace:
    """Return the options of `mmkv-bench calibrate` with defaults filled in, without those of other methods.

    Raises ConfigError: a flag of another method, or of another source of samples (pages, a text, a dataset, released
    files).
    """
    given_flags = [flag for flag in ("samples", *OF_PAGES, *OF_DATASETS, "text") if getattr(given, flag) is not None]
    if given.imports and (given_flags or given.overrides):
        first_given = given.overrides[0] if given.overrides else f"--{given_flags[0]}"
        raise ConfigError(f"--import measures nothing, so {first_given} has no effect; drop one of them")
    page_flags = [flag for flag in given_flags if flag in (*OF_PAGES, "text")]
    if given.overrides and page_flags:
        raise ConfigError(
            f"--{page_flags[0]} does not work with samples of a dataset ({given.overrides[0]}); drop one of them"
        )
    dataset_flags = [flag for flag in given_flags if flag in OF_DATASETS]
    if dataset_flags and not given.overrides:
        raise ConfigError(f"--{dataset_flags[0]} chooses among samples of a dataset; name one with dataset=<name>")
    default_by_flag = OF_METHOD.get(given.method, {})
    for method, flag in ((method, flag) for method, given_flags in OF_METHOD.items() for flag in given_flags):
        if flag in default_by_flag:
            continue
        if getattr(given, flag) is not None:
            accepted_flags = ", ".join(f"--{name}" for name in default_by_flag)
            allowed_clause = (
                f"allowed for {given.method}: {accepted_flags}"
                if accepted_flags
                else f"{given.method} takes no such flag"
            )
            raise ConfigError(f"--{flag} is only for {method}; {allowed_clause}; drop --{flag}")
        delattr(given, flag)
    for flag, default in {**default_by_flag, **OF_PAGES, "samples": SAMPLES[given.method]}.items():
        setattr(given, flag, default if getattr(given, flag) is None else getattr(given, flag))
    return given


# ---------------------------------------------------------------------- diagnose
OF_METHODS = ("coverage", "feature_error")


def diagnose(given: argparse.Namespace) -> int:
    """Measure what is missing, store it sample by sample, and print the folder. Return 0."""
    from mmkv_bench.config.compose import compose
    from mmkv_bench.diagnostics.analysis import diagnose, methods_of
    from mmkv_bench.diagnostics.dataset_samples import KEYS, of_dataset
    from mmkv_bench.models.load import quiet_libraries

    if given.json:
        raise ConfigError(
            "--json does not work with diagnose, which prints no document; drop it; the rows are parquet files, "
            "in table diagnostics of out="
        )
    of_methods = ("method", "methods", "budget", "reading") if given.name in OF_METHODS else ()
    overrides, allowed_keys = overrides_of(given), ("model", "dataset", "data", "out", *of_methods)
    key_groups = [word.partition("=")[0].partition(".")[0].lstrip("+") for word in overrides]
    for word, group in zip(overrides, key_groups, strict=True):
        if group not in (*KEYS, *allowed_keys, "hydra"):
            raise ConfigError(
                f"{word} has no effect on {given.name}; allowed: {', '.join(allowed_keys)} and their keys"
            )
    config = compose(overrides)
    dataset_overrides = [word for word, group in zip(overrides, key_groups, strict=True) if group in KEYS]
    if not any(word.startswith("dataset=") for word in dataset_overrides):
        dataset_overrides = [f"dataset={next(iter(config.datasets))}", *dataset_overrides]
    quiet_libraries()
    questions = of_dataset(dataset_overrides, given.samples, given.draw, calibrating=False)
    methods_of_model = (
        partial(methods_of, config.method_config, config.budget, config.model.name) if of_methods else None
    )
    result_folder = Path(config.out)
    diagnosis = diagnose(given.name, config.model, questions, given.tokens, result_folder, methods_of_model)
    earlier_clause = f", {diagnosis.before} had been measured before" if diagnosis.before else ""
    print(
        f"wrote {diagnosis.numbers} numbers of {diagnosis.measured} samples to {result_folder / 'diagnostics'}{earlier_clause}"
    )
    return 0
