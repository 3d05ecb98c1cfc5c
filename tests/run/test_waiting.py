"""Promise: a terminal says at once what is waited for, and keeps nothing of it; logs get nothing."""

from __future__ import annotations

import io

import pytest

from mmkv_bench.run.waiting import waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(text: str) -> str:
    """The line that a terminal shows: what follows the last erasing."""
    return text.rsplit("\r\x1b[2K", maxsplit=1)[-1]


def test_a_terminal_shows_it_until_the_work_is_done_or_fails():
    stream = Terminal()
    with waiting("loading the model", stream):
        assert shown(stream.getvalue()) == "loading the model ..."
    assert shown(stream.getvalue()) == ""
    with pytest.raises(ValueError, match="broken"), waiting("loading the model", stream):
        raise ValueError("broken")
    assert shown(stream.getvalue()) == ""


def test_logs_get_nothing():
    stream = io.StringIO()
    with waiting("loading the model", stream):
        pass
    assert stream.getvalue() == ""
