"""Completion in real shells: keys are typed into a terminal, and what stands on the line is read back."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest

from mmkv_bench.cli.completion import candidates, script
from mmkv_bench.cli.grammar import VERBS
from mmkv_bench.errors import ConfigError
from tests.cli.setting import CHECKOUT
from tests.each import each

TYPED = {
    "mmkv-bench tab": "mmkv-bench tables ",
    "mmkv-bench run method=snapkv_k": "mmkv-bench run method=snapkv_kvpress",
    "mmkv-bench tables --form": "mmkv-bench tables --format ",
    "mmkv-bench launch --processes 2 budg": "mmkv-bench launch --processes 2 budget=",
}
"""What is typed before the tabulator -> what the line is after it."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment in which `mmkv-bench` is this checkout's."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "mmkv-bench"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mmkv_bench "$@"\n')
    program.chmod(0o755)
    home = tmp_path_factory.mktemp("home")
    return CHECKOUT | {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(home), "TERM": "dumb", "PS1": "> "}


@pytest.mark.slow
def test_what_may_follow():
    assert {text.strip() for text in candidates(["mmkv-bench "])} >= {*VERBS}
    assert candidates(["mmkv-bench tables rows --format "]) == ["md ", "csv ", "latex ", "html "]
    assert candidates(["mmkv-bench data ch"]) == ["check "]
    assert candidates(["mmkv-bench 'method=[full,snapkv_"]) == ["'method=[full,snapkv_kvpress"]
    assert "method=snapkv" in candidates(["mmkv-bench sweep budget=16 method=s"])
    assert candidates(["mmkv-bench tab"]) == ["tables "]
    assert candidates(["mmkv-bench run nothing.of.the.kind="]) == []
    with pytest.raises(ConfigError, match="fish"):
        script("tcsh")


@pytest.mark.full
@each("shell", ["bash", "zsh"])
def test_a_tabulator_completes_the_line(shell, environment, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    start = tmp_path / "start"
    start.write_text(script(shell) + "\n")
    flags = ["--norc", "--noprofile", "-i"] if shell == "bash" else ["-f", "-i"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(shell, [shell, *flags], environment)
    try:
        setup = (
            "ZDOTDIR=$HOME; autoload -Uz compinit; compinit -u -D\n"
            if shell == "zsh"
            else "bind 'set bell-style none'\n"
        )
        os.write(terminal, f"{setup}stty -echo; . {start}; echo rea''dy\n".encode())
        read_until(terminal, "ready")
        for typed, line in TYPED.items():
            # The line becomes the argument of an echo: what the shell itself holds, not what it draws.
            os.write(terminal, f"{typed}\t".encode())
            os.write(terminal, b"]'\x01echo '[\n")
            assert f"[{line}]" in read_until(terminal, "]\r\n")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.full
def test_fish_offers_the_same(environment, tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    for typed, line in TYPED.items():
        command = f"{script('fish')}\ncomplete -C '{typed}'"
        ended = subprocess.run(
            ["fish", "-N", "-c", command], capture_output=True, text=True, check=False, env=environment
        )
        offered = [text.split("\t")[0] for text in ended.stdout.splitlines()]
        assert line.split()[-1] in [text.strip() for text in offered], ended


def read_until(terminal: int, mark: str, patience: float = 60.0) -> str:
    """What a terminal shows, up to a mark."""
    shown, ends = "", time.monotonic() + patience
    while mark not in shown:
        if not select.select([terminal], [], [], max(0.0, ends - time.monotonic()))[0]:
            raise AssertionError(f"{mark!r} was not shown within {patience} s: {shown!r}")
        shown += os.read(terminal, 4096).decode(errors="replace")
    return shown
