"""`--help` and `--version` answer at once, from a fresh interpreter, with nothing heavy imported."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

from mmkv_bench.cli.grammar import VERBS
from mmkv_bench.config.files import groups, options
from mmkv_bench.config.schema import keys
from tests.cli.setting import CHECKOUT
from tests.each import each

HEAVY = ("torch", "transformers", "lmms_eval", "hydra", "omegaconf", "pandas", "pyarrow", "numpy", "wandb")

VERBS_HELP = """
import sys
from mmkv_bench.cli.grammar import VERBS
from mmkv_bench.cli.main import main
for verb in VERBS:
    assert main([verb, "--help"]) == 0, verb
    assert not (imported := set(sys.argv[1:]) & set(sys.modules)), (verb, imported)
"""


@cache
def fresh(*arguments: str) -> subprocess.CompletedProcess:
    """A process of its own, the same for the same arguments; its errors end with what it imported."""
    arguments = ("-X", "importtime", *arguments) if arguments[0] == "-m" else arguments
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=CHECKOUT)


@each("words", [["--help"], ["run", "-h"]])
def test_help_imports_nothing_heavy(words):
    ended = fresh("-m", "mmkv_bench", *words)
    assert ended.returncode == 0, ended.stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ended.stderr.splitlines()}
    assert "mmkv_bench" in imported
    assert not imported & set(HEAVY)


def test_help_of_no_verb_imports_anything_heavy():
    """All verbs in one interpreter, which names the first that does."""
    ended = fresh("-c", VERBS_HELP, *HEAVY)
    assert ended.returncode == 0 and ended.stdout.count("usage: ") >= len(VERBS), ended.stderr


def test_help_shows_groups_choices_keys_flags_and_examples():
    text = fresh("-m", "mmkv_bench", "run", "-h").stdout
    for group in groups():
        assert f"  {group}" in text
        assert all(name in text for name in options(group))
    for key in keys():
        assert f"\n  {key} " in text
    for part in ("--json", "--multirun", "examples", "methods.snapkv.window=16"):
        assert part in text


def test_the_overview_names_every_verb_with_its_sentence():
    text = fresh("-m", "mmkv_bench", "--help").stdout
    for name, verb in VERBS.items():
        assert f"\n  {name} " in text and verb["summary"] in text


def test_the_version_is_the_packages():
    from mmkv_bench import __version__

    assert fresh("-m", "mmkv_bench", "--version").stdout.strip() == f"mmkv_bench {__version__}"


@pytest.mark.slow
def test_the_examples_of_the_help_compose():
    import shlex

    from mmkv_bench.cli.verbs.run import usage
    from mmkv_bench.config.compose import compose

    lines = [line for line in usage().splitlines() if line.startswith("  python -m mmkv_bench ")]
    assert len(lines) > 4
    for line in lines:
        words = shlex.split(line.partition("   the ")[0].partition("   split ")[0])
        compose([word for word in words[3:] if not word.startswith("-")])
