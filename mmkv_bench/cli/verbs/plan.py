"""`mmkv-bench plan`: what a run of these settings would do, and how much of it is done."""

from __future__ import annotations

import argparse
import json

from mmkv_bench.cli.grammar import Parser, configuration, overrides_of

SUMMARY = "what a run would do: its cells and samples, and how many of them there are already; loads nothing"


def options(parser: Parser) -> None:
    """Settings of the run."""
    configuration(parser)
    parser.examples(
        "mmkv-bench plan experiment=demo",
        "mmkv-bench plan model=qwen2_5_vl_7b 'dataset=[docvqa,chartqa]' 'method=[snapkv,mmshift]' 'budget=[64,20%]'",
    )


def answer(given: argparse.Namespace) -> int:
    """Print it. No model and no data are opened, and no connection is made."""
    from mmkv_bench.config.compose import compose
    from mmkv_bench.plan.plan import outline
    from mmkv_bench.plan.validate import validate
    from mmkv_bench.run.outlined import document, outlined
    from mmkv_bench.store.store import Store

    config = compose(overrides_of(given))
    validate(config)
    plan = outline(config)
    standing = plan.standing(Store(plan.out))
    print(outlined(plan, standing))
    if given.json:
        print(json.dumps(document(plan, standing)))
    return 0
