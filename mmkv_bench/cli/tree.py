"""The tree: which verbs there are, and how a command line is divided between them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from mmkv_bench.cli.grammar import Parser
from mmkv_bench.errors import ConfigError, nearest

VERBS = (
    "run",
    "plan",
    "status",
    "sweep",
    "launch",
    "score",
    "tables",
    "plot",
    "report",
    "show",
    "papers",
    "verify",
    "data",
    "calibrate",
    "diagnose",
    "new",
    "check",
    "pack",
    "fetch",
    "export",
    "tokens",
)
"""The verbs, in the order of the help; `verbs/<name>.py` answers each."""


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
    if "=" in first or first.startswith(("-", "~", "+")):
        return "run", list(arguments)
    raise ConfigError(f"{first!r} is no verb; {nearest(first, VERBS)}; settings of a run are written key=value")


def reader(name: str) -> tuple[ModuleType, Parser]:
    """A verb's module and the parser of its words."""
    verb = import_module(f"mmkv_bench.cli.verbs.{name}")
    parser = Parser(name, verb.SUMMARY)
    verb.options(parser)
    return verb, parser
