"""Promise: a terminal says at once what is waited for, and keeps nothing of it; a log keeps the first line."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from mmkv_bench.run.progress import waiting
from tests.cli.setting import CHECKOUT
from tests.each import each


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


def test_logs_get_the_one_line_that_says_a_run_has_begun():
    stream = io.StringIO()
    with waiting("reading the configuration", stream):
        assert stream.getvalue() == ""
    with waiting("loading", stream, log=True):
        assert stream.getvalue() == "loading ...\n"
    assert stream.getvalue() == "loading ...\n"


@pytest.mark.slow
@each("call", ["run.run_once(words)", "launch.launch(words, 2)"])
def test_a_runs_first_line_in_a_log_comes_before_anything_heavy_is_imported(call, tmp_path):
    """Not timed: torch and pandas take seconds, what is imported before the line takes less than one."""
    code = """
import sys

class Log:
    isatty = staticmethod(lambda: False)
    flush = staticmethod(lambda: None)

    def write(self, text):
        print("said", repr(text), "heavy:", sorted({"torch", "pandas", "pyarrow", "transformers", "lmms_eval"} & {*sys.modules}))
        sys.stdout.flush()
        raise KeyboardInterrupt

sys.stderr, stderr = Log(), sys.stderr
from mmkv_bench.cli.verbs import run
from mmkv_bench.run import launch
words = ["method=snapkv", "limit=1", "out=" + sys.argv[1]]
try:
    CALL
except KeyboardInterrupt:
    pass
"""
    ended = subprocess.run(
        [sys.executable, "-c", code.replace("CALL", call), str(tmp_path)],
        capture_output=True,
        text=True,
        env=CHECKOUT,
        check=True,
    )
    assert ended.stdout == "said 'loading ...' heavy: []\n"
