"""`mmkv-bench` and `python -m mmkv_bench`: the verb, then its own words. No verb is `run`.

Nothing heavy is imported before the request has been checked: a mistake costs a second and one sentence on stderr, exit
code 2, and leaves nothing behind.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mmkv_bench.cli.grammar import PROGRAM
from mmkv_bench.cli.guard import guarded
from mmkv_bench.cli.tree import VERBS, reader, split


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 done, 1 failed while working, 2 refused, 130 interrupted."""
    return guarded(list(sys.argv[1:] if argv is None else argv), _main)


def _main(arguments: Sequence[str]) -> int:
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help"):
        print(overview())
        return 0
    if first == "--version":
        from mmkv_bench import __version__

        print(f"mmkv_bench {__version__}")
        return 0
    if first == "--completion":
        from mmkv_bench.cli.completion import script

        print(script(*arguments[1:]))
        return 0
    if first == "--complete":
        from mmkv_bench.cli.completion import candidates

        print("\n".join(candidates(arguments[1:])))
        return 0
    name, rest = split(arguments)
    verb, parser = reader(name)
    if {"-h", "--help"} & {*rest}:
        print(verb.help_text() if hasattr(verb, "help_text") else parser.format_help().rstrip())
        return 0
    return verb.answer(parser.read(rest))


def overview() -> str:
    """Text of `mmkv-bench --help`: every verb with its sentence."""
    from mmkv_bench import __version__

    width = max(map(len, VERBS)) + 3
    return "\n".join(
        [
            f"mmkv_bench {__version__}: what KV-cache compression costs multimodal models, in counted budgets.",
            "",
            f"usage: {PROGRAM} <verb> [names] [key=value ...] [--flag value]     (or: python -m mmkv_bench <verb> ...)",
            "",
            "verbs",
            *(f"  {name:<{width}}{reader(name)[0].SUMMARY}" for name in VERBS),
            "",
            f"{PROGRAM} <verb> --help says all of one verb; without a verb it is a run:",
            f"  {PROGRAM} method=mmshift budget=64",
            "",
            "further flags",
            "  --version                   version of mmkv_bench",
            "  --completion SHELL          a script that completes commands in bash, zsh or fish:",
            f'                              eval "$({PROGRAM} --completion bash)"',
        ]
    )
