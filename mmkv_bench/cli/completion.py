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
    """Return the completions of a command line. words: one string, the program's name and all up to the cursor."""
    line = words[0] if words else ""
    words_before = line.split()[1:]
    last_word = "" if not words_before or line[-1:].isspace() else words_before.pop()
    opening_quote = last_word[:1] if last_word[:1] in ("'", '"') else ""
    return [opening_quote + text for text in _completions(words_before, last_word.removeprefix(opening_quote))]


def _completions(before: list[str], last: str) -> list[str]:
    """Return the verbs, flags, choices and settings that begin with `last` and may follow the words `before`."""
    if not before and "=" not in last and not last.startswith("-"):
        verbs = [f"{verb} " for verb in VERBS if verb.startswith(last)]
        return verbs + (_settings([], last) if last else [])
    name, words_after_verb = (before[0], before[1:]) if before and before[0] in VERBS else ("run", before)
    _, parser = reader(name)
    if last.startswith("-"):
        return [f"{flag} " for flag in parser.flags() if flag.startswith(last)]
    for action in parser._actions:
        if action.choices and (
            not action.option_strings or (words_after_verb and words_after_verb[-1] in action.option_strings)
        ):
            takes_choices = action.option_strings or not words_after_verb
            choices = [f"{choice} " for choice in action.choices if takes_choices and str(choice).startswith(last)]
            if choices:
                return choices
    if any(action.dest in ("overrides", "names") for action in parser._actions):
        return _settings([word for word in words_after_verb if "=" in word and not word.startswith("-")], last)
    return []


def _settings(before: Sequence[str], last: str) -> list[str]:
    """Return the settings of a run that complete `last`, in a list such as `method=[full,sn` the last element."""
    from mmkv_bench.config.compose import completions

    open_list = re.fullmatch(r"(?P<key>[\w.]+=)\[(?P<done>(.*,)?)(?P<part>\w*)", last)
    if open_list is None:
        return completions(before, last)
    key, finished_elements = open_list["key"], open_list["done"]
    completed_elements = [text.removeprefix(key) for text in completions(before, key + open_list["part"])]
    return [
        f"{key}[{finished_elements}{name}" for name in completed_elements if name not in finished_elements.split(",")
    ]
