"""Where child processes of tests find the package: in this checkout, installed or not."""

from __future__ import annotations

import os
from pathlib import Path

import mmkv_bench

CHECKOUT = {**os.environ, "PYTHONPATH": str(Path(mmkv_bench.__file__).parents[1])}


def refusal(err: str) -> str:
    """What stderr, a log, says after the line that a run has begun, if it had."""
    return err.removeprefix("loading ...\n")


def verb(name: str):
    """A verb as a function of its words, which returns the exit code."""
    from mmkv_bench.cli.main import main

    return lambda words: main([name, *words])


def overrides(words: list[str]) -> list[str]:
    """The overrides of a run's command line; a flag that does not exist is refused."""
    from mmkv_bench.cli.grammar import overrides_of, reader, split

    name, rest = split(words)
    return overrides_of(reader(name)[1].read(rest))
