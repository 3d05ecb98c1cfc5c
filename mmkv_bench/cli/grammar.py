"""The grammar of all verbs: `mmkv-bench <verb> [names] [key=value ...] [--flag value]`.

Names are folders, datasets or methods. key=value is the configuration of a run, which Hydra composes. Flags belong to
the verb. A flag with several values takes them with commas (`--metric anls,fidelity`), or is repeated. For settings in
other spellings (`--method snapkv`, `snapkv 64`), a message says how to write them.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from mmkv_bench.config.files import groups, options
from mmkv_bench.config.names import FLAG_ANSWERS, KEY_ANSWERS, KEYS, VERB_ANSWERS, canonical
from mmkv_bench.config.schema import SCHEMAS, keys
from mmkv_bench.config.shorthand import filled
from mmkv_bench.declared import read_declared
from mmkv_bench.errors import SIMILAR, ConfigError, nearest

PROGRAM = "mmkv-bench"

_DECLARED_VERBS = read_declared(__file__, "verbs.yaml")
VERBS: dict[str, dict[str, Any]] = {name: verb for name, verb in _DECLARED_VERBS.items() if not name.startswith("_")}
"""Verb to its file in `verbs/`, summary, arguments and examples, in the order of the help. The file has a function
`<verb>(given)`."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of exiting. Flags may stand anywhere between names."""

    text: Callable[[], str] | None = None
    """Returns the help, in place of argparse's."""
    example = ""
    """The first example of the verb."""

    def __init__(self, verb: str, summary: str) -> None:
        super().__init__(
            prog=f"{PROGRAM} {verb}",
            description=summary,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=110),
        )

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments. Raises ConfigError: an unknown flag, a missing or wrong value, or a missing name."""
        parsed_arguments, unknown = self.parse_known_intermixed_args(self._with_defaults(list(arguments)))
        settings = getattr(parsed_arguments, "overrides", None)
        unexpected_words = (
            unknown
            if settings is None
            else [word for word in (*unknown, *settings) if not _SETTING_PATTERN.match(word)]
        )
        if unexpected_words and settings is not None:
            valued_flags = [flag for action in self._actions if action.nargs is None for flag in action.option_strings]
            rephrased_words = rephrase_settings(self.prog, arguments, self._option_string_actions, valued_flags)
            if not {*unexpected_words} & {*rephrased_words}:
                raise ConfigError(
                    f"{unexpected_words[0]!r} is not written so; write {command_line_text(self.prog, rephrased_words)}"
                )
            unexpected_words = [word for word in unexpected_words if word in rephrased_words]
        for word in unexpected_words:
            flag = word.partition("=")[0]
            name = flag.lstrip("-").replace("_", "-")
            if answer := VERB_ANSWERS.get(name):
                raise ConfigError(f"{flag!r} is not a word of `{self.prog}`; {answer.format(words='')}")
            if answer := FLAG_ANSWERS.get(name):
                raise ConfigError(f"{flag} is not a flag of `{self.prog}`; {answer}")
            if word.startswith("-"):
                raise ConfigError(f"unknown flag {flag!r} of `{self.prog}`; {nearest(flag, self.flags())}")
            if word in unknown:
                raise ConfigError(f"{word!r} is one word too many for `{self.prog}`; see `{self.prog} --help`")
        return parsed_arguments

    def _with_defaults(self, words: list[str]) -> list[str]:
        """Write the default behind flags whose optional value is missing, so that argparse does not take the next name
        for it."""
        optional_value_actions = [action for action in self._actions if action.nargs == "?" and action.choices]
        action_by_flag = {flag: action for action in optional_value_actions for flag in action.option_strings}
        words_with_next = zip(words, [*words, ""][1:], strict=True)
        return [
            f"{word}={action_by_flag[word].const}"
            if word in action_by_flag and after not in (action_by_flag[word].choices or ())
            else word
            for word, after in words_with_next
        ]

    def flags(self) -> list[str]:
        """Return all flags of the verb, such as `--json`."""
        return sorted(flag for action in self._actions for flag in action.option_strings if flag.startswith("--"))

    def error(self, message: str) -> NoReturn:
        example = f"for example `{self.example}`" if self.example else f"see `{self.prog} --help`"
        raise ConfigError(f"{message.removeprefix('argument ')}; {example}")

    def format_help(self) -> str:
        return self.text() if self.text is not None else super().format_help()

    def add(self, name: str, stated: Mapping[str, Any]) -> None:
        """Add an argument. name, stated: its name and its properties in `verbs.yaml`."""
        keywords = dict(stated)
        if argument_kind := keywords.pop("kind", None):
            keywords["action"] = _ACTION_BY_KIND[argument_kind]
        if "type" in keywords:
            keywords["type"] = _TYPE_BY_NAME[keywords["type"]]
        if (choices := keywords.get("choices")) is not None:
            if isinstance(choices, Mapping):
                keywords["help"] = "; ".join(f"{choice}: {meaning}" for choice, meaning in choices.items())
            keywords["choices"] = [
                one for choice in choices for one in ([choice] if isinstance(choice, str) else choice)
            ]
        if "help" in keywords:
            keywords["help"] = keywords["help"].replace("%", "%%")
        self.add_argument(*name.split(), **keywords)


class Listed(argparse.Action):
    """An argparse action for a flag that takes several values, separated by commas or by repeating the flag."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: str | None = None
    ) -> None:
        texts = [text for text in str(values).split(",") if text]
        if not texts:
            raise ConfigError(f"{option_string} has no value; write one, or several with commas: {option_string} a,b")
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), *texts])


_SETTING_PATTERN = re.compile(r"~|[^-].*=|=", re.DOTALL)


def split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command line into its verb and the words after it.

    The verb is `run` if the first word is a setting or a flag. Other first words that are no verb are refused.
    """
    if not arguments:
        return "run", []
    first_word, *words_after_verb = arguments
    if first_word in VERBS:
        return first_word, words_after_verb
    if "=" in first_word or first_word.startswith(("-", "~", "+")):
        return "run", list(arguments)
    if answer := VERB_ANSWERS.get(first_word.lower().replace("_", "-")):
        line, words_go_on, _ = answer.partition("{words}")
        if words_go_on:
            program = line.rpartition("`")[2]
            sweep_flag = [] if "sweep" in program else ["-m"]  # other verbs write a list in brackets
            try:
                words_after_verb = rephrase_settings(
                    program, [*sweep_flag, *(word for word in words_after_verb if word != "--slurm")]
                )
            except ConfigError as error:
                raise ConfigError(f"{first_word!r} is not a verb; {answer.format(words='')}. {error}") from None
        words_after_verb, errors = (
            (words_after_verb, []) if "sweep" in line else replace_unknown_choices(words_after_verb)
        )
        settings = "".join(f" {word if '<' in word else shlex.quote(word)}" for word in words_after_verb)
        raise ConfigError(f"{first_word!r} is not a verb; {join_sentences(*errors, answer.format(words=settings))}")
    rephrased_words = rephrase_settings(PROGRAM, arguments)
    if all("=" in word for word in rephrased_words):
        raise ConfigError(f"{first_word!r} is not a verb; write {command_line_text(PROGRAM, rephrased_words)}")
    suggestion = nearest(first_word, VERBS)
    if not suggestion.startswith(SIMILAR):
        suggestion = f"`{PROGRAM} --help` lists the verbs, and settings of a run are written key=value"
    raise ConfigError(f"{first_word!r} is not a verb; {suggestion}")


def reader(name: str) -> tuple[Callable[[argparse.Namespace], int], Parser]:
    """Return the function that does a verb's work, and the parser of the verb's arguments."""
    verb = VERBS[name]
    module, parser = import_module(f"mmkv_bench.cli.verbs.{verb['file']}"), Parser(name, verb["summary"])
    for argument, keywords in verb["arguments"].items():
        for shown, stated in _CONFIGURATION.items() if argument == "configuration" else [(argument, keywords)]:
            parser.add(shown, stated)
    if examples := verb.get("examples"):
        parser.epilog = "\n".join(["examples", *(f"  {line}" for line in examples)])
        parser.example = examples[0]
    if name == "run":
        parser.text = module.usage
    return getattr(module, name), parser


# ---------------------------------------------------------------------- values of flags
MOST = 1_000_000
"""Largest count on a command line. A larger number would be a typing error."""


def count(text: str) -> int:
    """Parse a whole number from 1 to MOST, for argparse."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:19]) <= MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number >= 1 and at most {MOST}")
    return int(text)


def not_negative(text: str) -> int:
    """Parse a whole number >= 0, for argparse."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
    return int(text)


def amount(text: str) -> float:
    """Parse a finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def rows_folder(path: str | Path) -> Path:
    """Return a path if it is a folder of result rows, else raise ConfigError. For argparse."""
    if not (Path(path) / "store.json").is_file():
        if re.fullmatch(r"[0-9a-f]{6,64}", str(path)):
            remedy = f"name it behind the folder of its rows: <rows> {path}"
            raise ConfigError(f"{path} is a cell, and not a folder of result rows; {remedy}")
        raise ConfigError(f"{path} is not a folder of result rows; name the rows folder that a run printed")
    return Path(path)


# ---------------------------------------------------------------------- the configuration of a run
_CONFIGURATION: dict[str, dict[str, Any]] = {
    "overrides": {"nargs": "*", "metavar": "key=value", "help": f"as for `{PROGRAM} run`"},
    "--config-dir -cd": {
        "kind": "append",
        "metavar": "DIR",
        "help": "a further folder of config groups (experiment/, ...)",
    },
    "--json": {"kind": "flag", "help": "end stdout with one JSON document"},
}
"""Arguments of the verbs that compose a run's configuration."""
_ACTION_BY_KIND: dict[str, Any] = {"flag": "store_true", "list": Listed, "append": "append"}
_TYPE_BY_NAME: dict[str, Callable[[str], Any]] = {
    one.__name__.lower(): one for one in (int, float, Path, count, not_negative, amount, rows_folder)
}
"""Names in `verbs.yaml` to the types of argparse."""


def overrides_of(given: argparse.Namespace) -> list[str]:
    """Return the overrides of the configuration in a parsed command line, with those that its flags stand for."""
    overrides = list(given.overrides)
    for text in given.config_dir or ():
        if not text or not Path(text).is_dir():
            raise ConfigError(
                f"--config-dir {text} is not a folder; give a folder with config groups (experiment/, ...)"
            )
    if given.config_dir:
        folders = ", ".join(f"'file://{Path(text).resolve()}'" for text in given.config_dir)
        overrides.append(f"hydra.searchpath=[{folders}]")
    return [*overrides, "json=true"] if given.json else overrides


# ---------------------------------------------------------------------- settings in other spellings
_BUDGET_PATTERN = re.compile(r"\d+(\.\d+)?%?")
_SWEEP_FLAGS = ("-m", "--multirun")
_CHOICE_KEYS = ("method", "model", "dataset", "experiment")


def rephrase_settings(
    program: str, words: Sequence[str], flags: Collection[str] = (), valued: Collection[str] = ()
) -> list[str]:
    """Return the words of a command line with other spellings of settings (`--method snapkv`, `64`) as `key=value`.

    Other words stay, but `-m` and `--multirun` are dropped unless they are in `flags`.

    Args:
        program: the program with its verb.
        flags: the verb's flags, which stay unchanged.
        valued: the flags whose value is the next word.

    Raises:
        ConfigError: a word that has no such form. The message says what to write, with the other words as settings.
    """
    remaining_words, result = [word for word in words if word not in _SWEEP_FLAGS or word in flags], list[str]()
    answers: list[str] = []
    unknown_flags: list[str] = []
    is_sweep = len(remaining_words) < len(words)
    while remaining_words:
        word = remaining_words.pop(0)
        key, divided, value = word.lstrip("-").partition("=")
        if word.partition("=")[0] in flags:
            result += [word, *([remaining_words.pop(0)] if word in valued and remaining_words else [])]
        elif divided and not word.startswith("-"):
            result.append(_setting(key, value) if is_sweep else word)
        elif _is_key(key) and (
            divided or (remaining_words and remaining_words[0][:1] != "-" and "=" not in remaining_words[0])
        ):
            values = [value] if divided else [remaining_words.pop(0)]
            while (
                word.startswith("--")
                and remaining_words
                and remaining_words[0][:1] != "-"
                and "=" not in remaining_words[0]
                and not _is_key(remaining_words[0])
            ):
                values.append(remaining_words.pop(0))  # for example: --dataset one two
            try:
                setting = _setting("dataset" if word == "--data" else key, ",".join(values))
            except ConfigError as error:
                answers.append(str(error))
                continue
            efficiency_setting = "scenario=efficiency"
            result += (
                [efficiency_setting, setting]
                if key == "batch" and efficiency_setting not in (*program.split(), *result)
                else [setting]
            )
        elif answer := KEY_ANSWERS.get(key.lower().replace("-", "_")):
            answers.append(f"{word}: {filled(answer, value)}")
        elif _is_key(key) and word.startswith("--"):
            answers.append(f"{word} has no value; write `{KEYS.get(key.replace('-', '_'), key)}=<value>`")
        elif word.startswith("--") and remaining_words and _BUDGET_PATTERN.fullmatch(remaining_words[0]):
            unknown_flags.append(f"{word} {remaining_words.pop(0)}")  # a number behind an unknown flag is its value
        else:
            result.append(_choice(word))
    if answers:
        unknown_flags += [word for word in result if word.startswith("-") and word.partition("=")[0] not in flags]
        known_words, errors = replace_unknown_choices([word for word in result if word not in unknown_flags])
        errors += [f"unknown flag {word.split()[0].partition('=')[0]!r}" for word in unknown_flags]
        other_words_sentence = (
            [f"The other words are written {_line(program, known_words)}"]
            if any("=" in one for one in known_words)
            else []
        )
        raise ConfigError(join_sentences(*dict.fromkeys([*answers, *errors]), *other_words_sentence))
    return [*result, *(part for pair in unknown_flags for part in pair.split())]


def command_line_text(program: str, words: Sequence[str]) -> str:
    """Return the command line of these settings as text. program: the program with its verb.

    Raises ConfigError if a choice (such as a method) does not exist; the message has a placeholder for it.
    """
    known_words, errors = replace_unknown_choices(words)
    if errors:
        raise ConfigError(join_sentences(*errors, f"With an existing choice, write {_line(program, known_words)}"))
    return _line(program, words)


def join_sentences(*sentences: str) -> str:
    """Join sentences to one text, with periods between them, but none after a question mark."""
    return ". ".join(sentences).replace("?. ", "? ")


def replace_unknown_choices(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace choices that do not exist by placeholders `<key>`. Return the words, and an error message for each."""
    from mmkv_bench.config.compose import compose

    known_words, errors = [], []
    for placeholder in words:
        key = placeholder.partition("=")[0]
        try:
            if key in _CHOICE_KEYS:
                compose([placeholder])
        except ConfigError as error:
            errors.append(str(error))
            placeholder = f"{key}=<{key}>"
        known_words.append(placeholder)
    return known_words, errors


def _line(program: str, words: Sequence[str]) -> str:
    """Return a command line between backticks, quoted for a shell except placeholders."""
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
    """Return the setting for a name (`method=snapkv`) or a budget (`budget=64`). Other words stay unchanged."""
    if _BUDGET_PATTERN.fullmatch(word):
        return f"budget={word}"
    choice_settings = [
        f"{group}={name}" for group in _CHOICE_KEYS for name in [canonical(group, word)] if name in options(group)
    ]
    return choice_settings[0] if len(choice_settings) == 1 and not word.startswith("-") else word
