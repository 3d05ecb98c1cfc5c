"""Completion of command lines in bash, zsh and fish: verbs, their flags, and a run's settings as Hydra completes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mmkv_bench.cli.grammar import PROGRAM, VERBS, reader
from mmkv_bench.errors import ConfigError, nearest

_SHELLS = {name: Path(__file__).with_suffix(f".{name}") for name in ("bash", "zsh", "fish")}


def script(shell: str = "", *more: str) -> str:
    """Return the shell script that enables completion in bash, zsh or fish. Raises ConfigError for other shells."""
    if shell not in _SHELLS or more:
        raise ConfigError(f"--completion {shell}: {nearest(shell, _SHELLS)}")
    return _SHELLS[shell].read_text(encoding="utf-8").rstrip("\n").replace("PROGRAM", PROGRAM)


def candidates(words: Sequence[str]) -> list[str]:
    """Return the completions of a command line. words: one string, the line up to the cursor with the program's name."""
    line = words[0] if words else ""
    before = line.split()[1:]
    last = "" if not before or line[-1:].isspace() else before.pop()
    quote = last[:1] if last[:1] in ("'", '"') else ""
    return [quote + text for text in _offered(before, last.removeprefix(quote))]


def _offered(before: list[str], last: str) -> list[str]:
    """Return the verbs, flags and settings that begin with `last` and may follow the words `before`."""
    if not before and "=" not in last and not last.startswith("-"):
        verbs = [f"{verb} " for verb in VERBS if verb.startswith(last)]
        return verbs + (_settings([], last) if last else [])
    name, rest = (before[0], before[1:]) if before and before[0] in VERBS else ("run", before)
    _, parser = reader(name)
    if last.startswith("-"):
        return [f"{flag} " for flag in parser.flags() if flag.startswith(last)]
    for action in parser._actions:
        if action.choices and (not action.option_strings or (rest and rest[-1] in action.option_strings)):
            taken = action.option_strings or not rest
            choices = [f"{choice} " for choice in action.choices if taken and str(choice).startswith(last)]
            if choices:
                return choices
    if any(action.dest in ("overrides", "names") for action in parser._actions):
        return _settings([word for word in rest if "=" in word and not word.startswith("-")], last)
    return []


def _settings(before: Sequence[str], last: str) -> list[str]:
    """Return the settings of a run that complete `last`. In a list such as `method=[full,sn`, only the last element is
    completed."""
    from mmkv_bench.config.compose import completions

    opened = re.fullmatch(r"(?P<key>[\w.]+=)\[(?P<done>(.*,)?)(?P<part>\w*)", last)
    if opened is None:
        return completions(before, last)
    key, done = opened["key"], opened["done"]
    names = [text.removeprefix(key) for text in completions(before, key + opened["part"])]
    return [f"{key}[{done}{name}" for name in names if name not in done.split(",")]
