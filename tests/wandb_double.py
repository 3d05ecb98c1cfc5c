"""A wandb for tests that does what it is told to: keeps what it meets, raises, or never answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOUBLE = """
import json, os, time

def meet(what, value=None):
    with open(os.environ["MET"], "a") as file:
        file.write(json.dumps([what, value]) + "\\n")
    if os.environ["FAILS"] == what:
        raise RuntimeError("wandb-core is gone")
    while os.environ["BLOCKS"] == what:
        time.sleep(60)

class Run:
    summary = {}
    def log(self, values): meet("log", values)
    def finish(self, exit_code): meet("finish", exit_code)

class Settings:
    def __init__(self, **given): pass

def Table(columns, data): return [columns, data]

def init(**given):
    meet("init", given["id"])
    return Run()

def teardown(): meet("teardown")
"""


def installed(monkeypatch, folder: Path) -> Callable[[], list[tuple[str, Any]]]:
    """Puts it in wandb's place for processes that begin from here on, whose variables FAILS and BLOCKS name what it does not do;
    gives a function that says what it met, in order."""
    (folder / "double").mkdir()
    (folder / "double" / "wandb.py").write_text(DOUBLE)
    monkeypatch.setenv("PYTHONPATH", str(folder / "double"), prepend=os.pathsep)
    monkeypatch.setenv("MET", str(folder / "met"))
    monkeypatch.setenv("FAILS", "")
    monkeypatch.setenv("BLOCKS", "")
    return lambda: [tuple(json.loads(line)) for line in (folder / "met").read_text().splitlines()]
