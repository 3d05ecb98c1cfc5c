"""The grammar that all verbs share: `mmkv-bench <verb> [names] [key=value ...] [--flag value]`.

Names are folders, datasets or methods; key=value is the configuration of a run, which Hydra composes; flags belong to
the verb. Several values of a flag are one word with commas (`--metric anls,fidelity`) or the flag again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mmkv_bench.errors import ConfigError, nearest

PROGRAM = "mmkv-bench"


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are our errors; flags may stand before, between and after names."""

    def __init__(self, verb: str, summary: str) -> None:
        super().__init__(
            prog=f"{PROGRAM} {verb}",
            description=summary,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=110),
        )

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The arguments of a command line.

        Raises:
            ConfigError: a flag that the verb does not have, one whose value is missing or not allowed, a missing name.
        """
        given, unknown = self.parse_known_intermixed_args(list(arguments))
        for word in unknown:
            if word.startswith("-"):
                flag = word.partition("=")[0]
                raise ConfigError(f"unknown flag {flag!r} of `{self.prog}`; {nearest(flag, self.flags())}")
            raise ConfigError(f"{word!r} is one word too many for `{self.prog}`; see `{self.prog} --help`")
        return given

    def flags(self) -> list[str]:
        """The flags that the verb takes, as they are written."""
        return sorted(flag for action in self._actions for flag in action.option_strings if flag.startswith("--"))

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print with its usage."""
        raise ConfigError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")

    def examples(self, *lines: str) -> None:
        """Commands that the help ends with."""
        self.epilog = "\n".join(["examples", *(f"  {line}" for line in lines)])


class Listed(argparse.Action):
    """A flag of several values: `--metric a,b` or `--metric a --metric b`; choices hold for each."""

    def __init__(self, *given: Any, allowed: Sequence[str] = (), **rest: Any) -> None:
        super().__init__(*given, **rest)
        self.allowed = tuple(allowed)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Append the values of one use."""
        found = [text for text in str(values).split(",") if text]
        for text in found:
            if self.allowed and text not in self.allowed:
                raise ConfigError(f"{option_string} {text}: {nearest(text, self.allowed)}")
        if not found:
            raise ConfigError(f"{option_string} has no value; write one, or several with commas: {option_string} a,b")
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), *found])


MOST = 1_000_000
"""Largest count on a command line: more is a slip of the finger, and would not end."""


def count(text: str) -> int:
    """A whole number from 1 to MOST, for argparse."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:19]) <= MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number >= 1 and at most {MOST}")
    return int(text)


def not_negative(text: str) -> int:
    """A whole number >= 0, for argparse."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
    return int(text)


def amount(text: str) -> float:
    """A finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def configuration(parser: argparse.ArgumentParser) -> None:
    """The arguments of verbs that compose a run's configuration."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"as for `{PROGRAM} run`")
    parser.add_argument(
        "--config-dir",
        "-cd",
        action="append",
        metavar="DIR",
        help="a further folder of config groups (experiment/, ...)",
    )
    parser.add_argument("--json", action="store_true", help="end stdout with one JSON document")


def overrides_of(given: argparse.Namespace) -> list[str]:
    """The overrides of a command line, with what its flags add to them."""
    overrides = list(given.overrides)
    if given.config_dir:
        folders = ", ".join(f"'file://{_folder(text)}'" for text in given.config_dir)
        overrides.append(f"hydra.searchpath=[{folders}]")
    return [*overrides, "json=true"] if given.json else overrides


def rows_folder(path: Path) -> Path:
    """A folder that holds result rows.

    Raises:
        ConfigError: it does not.
    """
    if not (path / "store.json").is_file():
        raise ConfigError(f"{path} is not a folder of result rows; name the rows folder that a run printed")
    return path


def _folder(text: str) -> str:
    if not text or not Path(text).is_dir():
        raise ConfigError(f"--config-dir {text} is not a folder; give one that holds config groups (experiment/, ...)")
    return str(Path(text).resolve())
