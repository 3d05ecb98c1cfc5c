"""`mmkv-bench score`: score the stored answers of a run; nothing is generated."""

from __future__ import annotations

import argparse

from mmkv_bench.cli.grammar import Parser, configuration, overrides_of
from mmkv_bench.errors import ConfigError

SUMMARY = "score stored answers that are not scored yet, or not by this judge; as `run stage=score`"


def options(parser: Parser) -> None:
    """Settings of the run whose answers are scored."""
    configuration(parser)
    parser.examples(
        "mmkv-bench score experiment=demo",
        "mmkv-bench score dataset=mmvet out=runs/vet judge=openai judge.model=gpt-4o",
    )


def answer(given: argparse.Namespace) -> int:
    """Score what is stale and print the tables."""
    from mmkv_bench.cli.once import once

    overrides = overrides_of(given)
    for text in overrides:
        if text.partition("=")[0].lstrip("+") == "stage" and text.partition("=")[2] != "score":
            raise ConfigError(f"{text}: `score` generates nothing; drop it, or use `mmkv-bench run`")
    return once([*overrides, "stage=score"])
