"""`mmkv-bench launch`: one run split over the processes or devices of this machine."""

from __future__ import annotations

import argparse

from mmkv_bench.cli.grammar import Parser, configuration, count, overrides_of
from mmkv_bench.errors import ConfigError

SUMMARY = "one run split over the processes or devices of this machine"


def options(parser: Parser) -> None:
    """Number of processes, and the settings of the run."""
    parser.add_argument(
        "--processes", type=count, metavar="N", help="default: one per visible device; without a device it must be said"
    )
    configuration(parser)
    parser.examples("mmkv-bench launch --processes 4 experiment=demo")


def answer(given: argparse.Namespace) -> int:
    """Generate in N processes, score once at the end."""
    from mmkv_bench.run.launch import launch

    for text in given.overrides:
        if text.startswith("processes="):
            raise ConfigError(f"{text} is a flag: write --processes {text.partition('=')[2]}")
    return launch(overrides_of(given), given.processes)
