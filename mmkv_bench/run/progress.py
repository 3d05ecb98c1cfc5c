"""Progress of a run on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TextIO


class Progress:
    """A display of the number of finished samples, answers or cells: a bar on a terminal, lines elsewhere.

    Args:
        total: number to finish, without the results of earlier runs.
        label: text before the numbers, such as a dataset's name.
        stream: destination; stderr by default.
        every: seconds between lines.
    """

    def __init__(self, total: int, label: str, stream: TextIO | None = None, every: float = 10.0):
        self.total, self.label, self.every = total, label, every
        self.stream = stream or sys.stderr
        self.count = self._printed_count = 0
        self._bar: Any = None  # rich's, on a terminal

    def __enter__(self) -> Self:
        self._start = self._printed_time = self._last = time.monotonic()
        if self.stream.isatty():
            self._bar = self._terminal_bar()
            self._task = self._bar.add_task(self.label, total=self.total)
            self._bar.start()
        return self

    def advance(self, samples: int = 1) -> None:
        """Add to the count, and show it."""
        self.count += samples
        self._last = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, advance=samples)
        elif self.count and (not self._printed_count or self._last - self._printed_time >= self.every):
            self._print_line()

    def relabel(self, label: str) -> None:
        self.label = label
        if self._bar is not None:
            self._bar.update(self._task, description=label)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self.count > self._printed_count:
            self._print_line()

    def _print_line(self) -> None:
        self._printed_time, self._printed_count = time.monotonic(), self.count
        elapsed, time_left = self._printed_time - self._start, self.left()
        progress_line = f"{self.label}: {self.count}/{self.total}, {duration(elapsed)} gone, {time_left} left"
        print(progress_line, file=self.stream, flush=True)

    def left(self) -> str:
        """Return the remaining time as text, estimated from the mean time so far; `?` before the first sample."""
        if not self.count:
            return "?"
        seconds_per_sample = (self._last - self._start) / self.count
        return duration(max(0.0, (self.total - self.count) * seconds_per_sample - (time.monotonic() - self._last)))

    def _terminal_bar(self):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        class Left(ProgressColumn):
            """Progress column with the remaining time. The column of rich shows none before the second sample."""

            def render(_, task):
                return Text(self.left(), style="progress.remaining")

        return Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            Left(),
            console=Console(file=self.stream),
        )


def duration(seconds: float) -> str:
    """Format a duration in seconds: `42 s`, `3:05 min`, `2:10 h`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}:{seconds:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"


@contextmanager
def waiting(what: str, stream: TextIO | None = None, log: bool = False) -> Iterator[None]:
    """Show `what ...` on a terminal while a block runs, then erase the text.

    stream: destination; stderr by default.
    log: whether to print the text on a stream that is no terminal.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        if log:
            print(f"{what} ...", file=stream, flush=True)
        yield
        return
    stream.write(f"{what} ...")
    stream.flush()
    try:
        yield
    finally:
        stream.write("\r\x1b[2K")  # erases the line
        stream.flush()
