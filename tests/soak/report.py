"""What a soak met, as a page."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping

from tests.soak.rounds import Met
from tests.soak.runs import COMMAND
from tests.soak.shot import LIMITS


def report(met: Met, reader: Mapping[str, int], seed: int) -> str:
    """Markdown; the promises that `Soak` holds by assertion are noughts in it, since it would have ended otherwise."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mmkv-bench", "pyarrow", "torch"))
    counts, kills = met.counts, met.counts["kills"]
    moments = ", ".join(f"{count} {moment}" for moment, count in sorted(met.moments.items()))
    early = [f"- {count} x {text.removeprefix('early: ')}" for text, count in reader.items() if "early: " in text]
    wrong = [f"- {count} x {text}" for text, count in reader.items() if text.startswith("WRONG")]
    unread = sum(count for text, count in reader.items() if text.startswith("WRONG"))
    end = f" Ended by {met.stopped}; the step under way then was not compared." if met.stopped else ""
    lines = [
        "# Soak",
        "",
        f"Written by `python -m tests.soak --kills {kills} --seed {seed}`: {met.minutes:.0f} minutes.{end} "
        f"{datetime.datetime.now(datetime.UTC).date()}, {versions}, Python {platform.python_version()}, {platform.machine()}.",
        "",
        f"`mmkv-bench {' '.join(COMMAND)} limit=<{', '.join(map(str, LIMITS))}>`: {met.cells} cells, one limit after the other "
        "into one store; scores are there from the first on, and later ones replace them.",
        "",
        "| | |",
        "| --- | --- |",
        f"| kills (SIGKILL) | {kills}: {moments} |",
        f"| of them in forks that began with imported libraries, the others in processes of their own | {counts['forked']} |",
        f"| steps (a limit), each ended and compared with the uninterrupted run | {counts['steps']} |",
        "| steps with other rows | 0 |",
        f"| samples that killed runs stored | {counts['samples']} |",
        "| stored samples lost, or stored twice | 0 |",
        "| kills that lost more than the sample in flight | 0 |",
        f"| journals with a torn last line, of that sample | {counts['torn lines']} |",
        f"| polls of the reader | {reader.get('polls', 0)} |",
        f"| of them counted (`status`) | {reader.get('counts', 0)} |",
        f"| of them with all frames (`load_rows`) | {reader.get('rows', 0)} |",
        f"| of them with tables (`make_table`) | {reader.get('tables', 0)} |",
        f"| of them that met an unreadable file or fewer rows than before | {unread} |",
        "",
        "Polls that came too early for tables, and were told so:" if early else "No poll was too early.",
        "",
        *early,
        *wrong,
    ]
    return "\n".join(lines).rstrip() + "\n"
