"""`mmkv-bench run`: compose a configuration, generate what is missing, score it, print the tables."""

from __future__ import annotations

import argparse

from mmkv_bench.cli.grammar import Parser, configuration, overrides_of

SUMMARY = "answer, score and print tables: what `mmkv-bench method=mmshift budget=64` does"

_HYDRA = {"--cfg": "-c", "--info": "-i", "--package": "-p"}
"""Hydra's own flags that print and stop, and take a word."""
_CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}


def options(parser: Parser) -> None:
    """Settings of a run, and Hydra's flags that print it instead."""
    configuration(parser)
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="one run per element of comma lists: as `mmkv-bench sweep`"
    )
    for flag, short in _HYDRA.items():
        parser.add_argument(
            flag, short, choices=_CHOICES.get(flag), help="Hydra's: print and stop (--cfg job: the configuration)"
        )
    for flag in ("--resolve", "--hydra-help"):
        parser.add_argument(flag, action="store_true", help="Hydra's")


def help_text() -> str:
    """Groups, keys, flags and examples."""
    from mmkv_bench.cli.settings import usage

    return usage()


def answer(given: argparse.Namespace) -> int:
    """Run it; 1 where some row is a failure."""
    overrides = overrides_of(given)
    flags = [word for flag in _HYDRA if getattr(given, flag[2:]) for word in (flag, getattr(given, flag[2:]))]
    flags += [flag for flag in ("--resolve", "--hydra-help") if getattr(given, flag[2:].replace("-", "_"))]
    if flags:
        from mmkv_bench.run.multirun import show

        return show(overrides, flags)
    if given.multirun:
        from mmkv_bench.cli.verbs.sweep import sweep

        return sweep(overrides)
    from mmkv_bench.cli.once import once

    return once(overrides)
