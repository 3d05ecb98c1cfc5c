"""Settings in other spellings on a command line: `--method snapkv`, `method snapkv` or `snapkv 64`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence

from mmkv_bench.config.files import groups, options
from mmkv_bench.config.names import KEY_ANSWERS, KEYS, canonical
from mmkv_bench.config.schema import SCHEMAS, keys
from mmkv_bench.config.shorthand import filled
from mmkv_bench.errors import ConfigError

_BUDGET = re.compile(r"\d+(\.\d+)?%?")
_SEVERAL = ("-m", "--multirun")
_CHOICES = ("method", "model", "dataset", "experiment")


def rephrased(
    program: str, words: Sequence[str], flags: Collection[str] = (), valued: Collection[str] = ()
) -> list[str]:
    """Return the words with other spellings of settings rewritten as settings. Other words stay unchanged.

    Args:
        program: the program with its verb.
        flags: the verb's flags, which stay unchanged.
        valued: the flags whose value is the next word.

    Raises:
        ConfigError: a word whose meaning depends on more than the word. The message says what to type for it, with the other
            words as settings.
    """
    left, result = [word for word in words if word not in _SEVERAL or word in flags], list[str]()
    answers: list[str] = []
    unknown: list[str] = []
    several = len(left) < len(words)
    while left:
        word = left.pop(0)
        key, divided, value = word.lstrip("-").partition("=")
        if word.partition("=")[0] in flags:
            result += [word, *([left.pop(0)] if word in valued and left else [])]
        elif divided and not word.startswith("-"):
            result.append(_setting(key, value) if several else word)
        elif _is_key(key) and (divided or (left and left[0][:1] != "-" and "=" not in left[0])):
            values = [value] if divided else [left.pop(0)]
            while word.startswith("--") and left and left[0][:1] != "-" and "=" not in left[0] and not _is_key(left[0]):
                values.append(left.pop(0))  # for example: --dataset one two
            try:
                setting = _setting("dataset" if word == "--data" else key, ",".join(values))
            except ConfigError as error:
                answers.append(str(error))
                continue
            speed = "scenario=efficiency"
            result += [speed, setting] if key == "batch" and speed not in (*program.split(), *result) else [setting]
        elif answer := KEY_ANSWERS.get(key.lower().replace("-", "_")):
            answers.append(f"{word}: {filled(answer, value)}")
        elif _is_key(key) and word.startswith("--"):
            answers.append(f"{word} has no value; write `{KEYS.get(key.replace('-', '_'), key)}=<value>`")
        elif word.startswith("--") and left and _BUDGET.fullmatch(left[0]):
            unknown.append(f"{word} {left.pop(0)}")  # a number behind an unknown flag is its value
        else:
            result.append(_choice(word))
    if answers:
        unknown += [word for word in result if word.startswith("-") and word.partition("=")[0] not in flags]
        known, errors = checked([word for word in result if word not in unknown])
        errors += [f"unknown flag {word.split()[0].partition('=')[0]!r}" for word in unknown]
        others = [f"The other words are written {_line(program, known)}"] if any("=" in one for one in known) else []
        raise ConfigError(joined(*dict.fromkeys([*answers, *errors]), *others))
    return [*result, *(part for pair in unknown for part in pair.split())]


def written(program: str, words: Sequence[str]) -> str:
    """Return the command line of settings. If a choice does not exist, raise ConfigError; the message has the command line with
    placeholders."""
    known, errors = checked(words)
    if errors:
        raise ConfigError(joined(*errors, f"With an existing choice, write {_line(program, known)}"))
    return _line(program, words)


def joined(*sentences: str) -> str:
    """Return sentences as one text. A question mark is not followed by a period."""
    return ". ".join(sentences).replace("?. ", "? ")


def checked(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace each choice that does not exist by `<key>`. Return the words, and one error message per such choice."""
    from mmkv_bench.config.compose import compose

    known, errors = [], []
    for word in words:
        key = word.partition("=")[0]
        try:
            if key in _CHOICES:
                compose([word])
        except ConfigError as error:
            errors.append(str(error))
            word = f"{key}=<{key}>"
        known.append(word)
    return known, errors


def _line(program: str, words: Sequence[str]) -> str:
    """Return a command line between backticks, with words quoted as a shell needs, except placeholders."""
    return re.sub(r"'(\w+=<\w+>)'", r"\1", f"`{shlex.join([*program.split(), *words])}`")


def _is_key(word: str) -> bool:
    key = word.lower().replace("-", "_")
    return key in {*keys(), *groups(), *KEYS, *KEY_ANSWERS} - {"config"} or (
        "." in key and key.partition(".")[0] in SCHEMAS
    )


def _setting(word: str, value: str) -> str:
    key = word.lower().replace("-", "_")
    if key in KEY_ANSWERS:
        raise ConfigError(f"{word}={value}: {filled(KEY_ANSWERS[key], value)}")
    key = KEYS.get(key, key)
    if "," in value and not value.startswith(("[", "{")) and key not in ("model", "experiment"):
        value = f"[{value}]"
    return f"{key}={value}"


def _choice(word: str) -> str:
    """Turn a name into the setting that chooses it (`snapkv` into `method=snapkv`) and a number into a budget. Return other words
    unchanged.
    """
    if _BUDGET.fullmatch(word):
        return f"budget={word}"
    chosen = [f"{group}={name}" for group in _CHOICES for name in [canonical(group, word)] if name in options(group)]
    return chosen[0] if len(chosen) == 1 and not word.startswith("-") else word
