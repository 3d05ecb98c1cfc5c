"""`mmkv-bench` and `python -m mmkv_bench`: the verb, then its own words. No verb is `run`.

Nothing heavy is imported before the request has been checked: a mistake costs a second and one sentence on stderr, exit
code 2, and leaves nothing behind.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from mmkv_bench.cli.grammar import PROGRAM, Parser
from mmkv_bench.cli.guard import guarded
from mmkv_bench.errors import ConfigError, nearest

VERBS = (
    "run",
    "sweep",
    "launch",
    "score",
    "tables",
    "verify",
    "data",
    "calibrate",
    "check",
    "pack",
    "tokens",
)
"""The verbs, in the order of the help; `verbs/<name>.py` answers each."""

COMING = ("status", "plot", "papers", "report", "show", "export", "diagnose", "new", "fetch")
"""Words that are kept for verbs of later versions, so that no configuration takes them."""


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


def split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The verb of a command line and the words after it; `run` where the first word is a setting or a flag.

    Raises:
        ConfigError: the first word is neither a verb nor a setting nor a flag.
    """
    if not arguments:
        return "run", []
    first, *rest = arguments
    if first in VERBS:
        return first, rest
    if first in COMING:
        raise ConfigError(
            f"{first} is kept for a later version, this one has nothing to do for it; verbs: {', '.join(VERBS)}"
        )
    if "=" in first or first.startswith(("-", "~", "+")):
        return "run", list(arguments)
    raise ConfigError(f"{first!r} is no verb; {nearest(first, VERBS)}; settings of a run are written key=value")


def reader(name: str) -> tuple[ModuleType, Parser]:
    """A verb's module and the parser of its words."""
    verb = import_module(f"mmkv_bench.cli.verbs.{name}")
    parser = Parser(name, verb.SUMMARY)
    verb.options(parser)
    return verb, parser


def overview() -> str:
    """What `mmkv-bench --help` prints: every verb with its sentence."""
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
