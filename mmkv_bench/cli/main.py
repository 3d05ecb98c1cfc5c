"""`mmkv-bench` and `python -m mmkv_bench`: the verb, then its own words. No verb is `run`.

Nothing heavy is imported before the request has been checked: a mistake costs a second and one sentence on stderr, exit
code 2, and leaves nothing behind.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mmkv_bench import __version__
from mmkv_bench.cli.grammar import PROGRAM, VERBS, reader, split
from mmkv_bench.cli.guard import guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 done, 1 failed while working, 2 refused, 130 interrupted."""
    return guarded(list(sys.argv[1:] if argv is None else argv), _main)


def _main(arguments: Sequence[str]) -> int:
    first, *others = arguments or [""]
    if first in ("-h", "--help"):
        print(overview())
    elif first == "--version":
        print(f"mmkv_bench {__version__}")
    elif first == "--completion":
        from mmkv_bench.cli.completion import script

        print(script(*others))
    elif first == "--complete":
        from mmkv_bench.cli.completion import candidates

        print("\n".join(candidates(others)))
    else:
        name, words = split(arguments)
        answer, parser = reader(name)
        if not {"-h", "--help"} & {*words}:
            return answer(parser.read(words))
        print(parser.format_help().rstrip())
    return 0


def overview() -> str:
    """Text of `mmkv-bench --help`: every verb with its sentence."""
    width = max(map(len, VERBS)) + 3
    verbs = "\n".join(f"  {name:<{width}}{sentence}" for name, (_, sentence) in VERBS.items())
    return f"""\
mmkv_bench {__version__}: what KV-cache compression costs multimodal models, in counted budgets.

usage: {PROGRAM} <verb> [names] [key=value ...] [--flag value]     (or: python -m mmkv_bench <verb> ...)

verbs
{verbs}

{PROGRAM} <verb> --help says all of one verb; without a verb it is a run:
  {PROGRAM} method=mmshift budget=64

further flags
  --version                   version of mmkv_bench
  --completion SHELL          a script that completes commands in bash, zsh or fish:
                              eval "$({PROGRAM} --completion bash)"
"""[:-1]
