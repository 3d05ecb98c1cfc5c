"""Promise: every word of the field leads to settings that compose, or to a command whose words its verb takes."""

from __future__ import annotations

import re
import shlex
from itertools import zip_longest

import pytest

from mmkv_bench.cli.grammar import VERBS, reader
from mmkv_bench.config import names as field_words
from mmkv_bench.config.compose import compose, launcher_of
from mmkv_bench.config.files import conf_dir, groups, options
from mmkv_bench.config.schema import keys
from mmkv_bench.config.shorthand import filled
from tests import cover

ROWS = str(conf_dir().parent / "results" / "tiny" / "large")

GIVEN = dict.fromkeys(("split", "dataset_split"), "dev")
"""Values of words to which neither a share nor a number would mean anything."""


def settings_compose(words: list[str]) -> None:
    compose(words)
    if any(word.startswith("hydra.launcher.") for word in words):
        launcher_of(words)


def command_reads(line: str) -> None:
    verb, *words = shlex.split(line)
    if verb in VERBS:
        reader(verb)[1].read([word for word in words if word != "--help"])
    else:
        assert verb in ("--help", "--version"), line


@pytest.mark.slow
def test_every_synonym_is_of_a_key_or_name_that_there_is():
    taken = {*keys(), *groups()} - {"methods", "datasets"}
    assert not taken & {*field_words.KEYS, *field_words.KEY_ANSWERS}
    words = {False: ["method=snapkv"], True: ["launcher=slurm"]}
    for key in sorted({*field_words.KEYS.values()} - {*groups()}):
        value = {"seed": 1, "limit": 1, "repeats": 1, "budget": 64, "logger.mode": "online"}.get(key, "x")
        value = 1 if key.endswith(("_min", "_gb", "_node", "_task", "nodes", "window", "pool")) else value
        words[key.startswith("hydra.")].append(f"{key}={value}")
    for each in words.values():  # a key that there is not is named by the refusal
        settings_compose(each)
    for each in zip_longest(*([f"{key}={value}" for value in sorted({*values.values()}, key=str)]
                              for key, values in field_words.VALUES.items())):  # fmt: skip
        compose([word for word in each if word is not None])
    for group, names in field_words.NAMES.items():
        assert {*names.values()} <= {*options(group)}


@pytest.mark.slow
@cover.shares(3)
def test_every_answer_can_be_typed(share):
    answers = {
        word: filled(text, "0.5" if "{rest}" in text or "{kept}" in text else GIVEN.get(word, "8"))
        for word, text in field_words.KEY_ANSWERS.items()
    }
    answers |= {name: text for names in field_words.NAME_ANSWERS.values() for name, text in names.items()}
    answers |= {verb: text.format(words="") for verb, text in field_words.VERB_ANSWERS.items()}
    typed = set()
    for text in sorted({*answers.values()}):
        commands = re.findall(r"`([^`]*)`", text)
        assert commands or "leave it out" in text, text
        typed |= {*commands}
    for line in sorted(line for line in typed if line.startswith("mmkv-bench ")):
        command_reads(line.removeprefix("mmkv-bench ").replace("<rows>", ROWS))
    for line in cover.turn(sorted(line for line in typed if not line.startswith("mmkv-bench ")), 0, share):
        settings_compose([*(["launcher=slurm"] if line.startswith("hydra.") else []), *shlex.split(line)])
