"""Whole runs on the simulated second device: rows, hashes and scores are those of the CPU's run; only device and times differ."""

from __future__ import annotations

import pytest

from tests.run.setting import cells, done, everything, responses
from tests.second_device import second_device

COMMANDS = {
    "shared": ("dataset=pages_walk", "method=[snapkv,hybridkv,kivi]", "budget=16", "limit=1"),
    "alone": ("dataset=pages_walk", "method=look_m", "budget=16", "limit=1", "sharing=off", "fidelity=off"),
}
"""Runs that must not care where they compute; a further scenario is a further line."""


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_rows_of_a_run_there_are_those_of_the_cpu(tmp_path, command):
    words = COMMANDS[command]
    done(tmp_path / "cpu", *words)
    with second_device() as device:
        done(tmp_path / "cuda", *words, "model.device=cuda")
        assert device.memory.peak().allocated > 2**20
    assert everything(tmp_path / "cuda") == everything(tmp_path / "cpu")
    assert {row["device"] for row in cells(tmp_path / "cuda").values()} == {"second device"}
    for row in responses(tmp_path / "cuda").values():
        assert row["peak_device_bytes"] > 0 and row["peak_resident_bytes"] is None
