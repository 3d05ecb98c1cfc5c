"""`mmkv-bench sweep`: one run per element of comma lists, here or through Hydra's launchers."""

from __future__ import annotations

import argparse

from mmkv_bench.cli.grammar import Parser, configuration, overrides_of

SUMMARY = "one run per element of comma lists (model=tiny,hf seed=0,1), here or as Slurm jobs (launcher=...)"


def options(parser: Parser) -> None:
    """Settings of the runs."""
    configuration(parser)
    parser.examples(
        "mmkv-bench sweep method=mmshift seed=0,1,2",
        "mmkv-bench sweep 'method=[full,snapkv]' page_size=small,large out=runs/pages",
    )


def answer(given: argparse.Namespace) -> int:
    """Check every job, then run them all; the highest exit code of any."""
    from mmkv_bench.run.multirun import multirun

    return multirun(overrides_of(given))
