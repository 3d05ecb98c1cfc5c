"""Promises: nothing that is printed commands a terminal, nothing in a csv is a formula, and no secret reaches a sweep's jobs."""

from __future__ import annotations

import sys

from mmkv_bench.cli.main import main, run_guarded
from mmkv_bench.errors import ConfigError
from mmkv_bench.tables.formats import csv_text
from tests.cli.setting import refusal


def test_names_command_no_terminal(capsys):
    def work(arguments):
        print("\x1b[8mhidden\x1b[0m \x1b[2J\x1b]0;title\x07 back\rover \x9b2J \u202etxt", "a\tb")
        raise ConfigError("no method \x1b[2Jx")

    before = sys.stdout
    assert run_guarded([], work) == 2 and sys.stdout is before
    said = capsys.readouterr()
    assert said.out == "\\x1b[8mhidden\\x1b[0m \\x1b[2J\\x1b]0;title\\x07 back\\rover \\x9b2J \\u202etxt a\tb\n"
    assert "\x1b" not in said.err and "\\x1b[2Jx" in said.err


def test_no_field_of_a_csv_is_a_formula():
    lines = [{"method": name, "score": -0.5} for name in ("=1+1", "+x", "@x", "-x", "-0.5", "-", "snapkv")]
    assert csv_text(lines).splitlines()[1:] == [
        f"{name},-0.5" for name in ("'=1+1", "'+x", "'@x", "'-x", "-0.5", "-", "snapkv")
    ]


def test_a_sweep_takes_no_secret_as_it_is(capsys, tmp_path):
    for word in (
        "judge.api_key=sk-123456789",
        "judge={name: x, api_key: abcdefghij}",
        "judge.url=https://u:pw123@host/",
    ):
        assert main(["sweep", f"out={tmp_path / 'x'}", "seed=0,1", "launcher=slurm", word, "dry=true"]) == 2
        said = capsys.readouterr()
        assert "oc.env:" in said.err and word.partition("=")[2] not in said.err + said.out, word
    assert main(["sweep", "judge.api_key=${oc.env:NOT_SET}", "seed=0,1", "launcher=slurm", "dry=true"]) == 2
    assert "is given in plain text" not in capsys.readouterr().err


def test_what_would_not_end_and_places_that_cannot_be_are_refused(capsys, tmp_path):
    (tmp_path / "file").touch()
    for words, sentence in (
        (["calibrate", "mmshift", "--samples", "9" * 23], "at most 1000000"),
        (["score", f"out={tmp_path / ('x' * 300)}"], "name"),
        (["plot", "budget", "results/tiny/large", "--out", str(tmp_path / "file" / "x")], "cannot be used"),
    ):
        assert main(words) == 2, words
        assert sentence in refusal(capsys.readouterr().err), words
