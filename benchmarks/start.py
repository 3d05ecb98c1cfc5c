"""What commands cost before they work: the modules that they import, beside those that they cannot do without.

    python benchmarks/start.py                        # prints Markdown; a few minutes
    python benchmarks/start.py --write results/bench/start.md

Each command is a process of its own, started several times in turn with the others; the least is taken, which other work
on the machine disturbs least. CPU time is of all threads, user and system. `imports` are the seconds that the interpreter
spends on modules (`-X importtime`, each module's own share summed); what is left of a command is its work.

- What needs no model is held against `import torch`.
- A run with one sample to make is held against what it cannot do without: torch, the classes of the model and of its
  processor, lmms-eval's tasks, and the libraries that read settings and write rows; and against these with lmms-eval's
  evaluation loop, which the run calls and which brings the clients of its judges along.
- The first line on a terminal is timed from the start of the process.

Bytecode is kept, as an installation keeps it, whatever the shell says.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder: its statistics.py must not stand in for the standard module

# ruff: noqa: E402
import argparse
import datetime
import importlib.metadata
import os
import platform
import pty
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

GOALS = {"light": 0.5, "run": 1.1, "line": 1.0}  # of import torch; of what cannot be avoided; seconds
UNAVOIDABLE = (
    "import torch",
    "from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor",
    "from transformers.image_processing_utils import BatchFeature",
    "import hydra, pyarrow.parquet, datasets",
    "from lmms_eval.api.task import ConfigurableMessagesTask",
)
LOOP = "from lmms_eval import evaluator"
_IMPORT = re.compile(r"^import time:\s+(\d+) \|", re.MULTILINE)


@dataclass
class Cost:
    """CPU and import seconds of one process, the least of several."""

    cpu: float = float("inf")
    imports: float = float("inf")

    def take(self, cpu: float, imports: float) -> None:
        """One more process."""
        self.cpu, self.imports = min(self.cpu, cpu), min(self.imports, imports)


def measured(arguments: Sequence[str]) -> tuple[float, float]:
    """(CPU seconds, seconds of importing) of `python <arguments>`."""
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", *arguments], stdout=subprocess.DEVNULL, stderr=told, cwd=ROOT
        )
        _, status, used = os.wait4(process.pid, 0)
        told.seek(0)
        text = told.read()
    if status:
        raise SystemExit(f"error: python {' '.join(arguments)} failed:\n{text[-2000:]}")
    return used.ru_utime + used.ru_stime, sum(map(int, _IMPORT.findall(text))) / 1e6


def first_line(arguments: Sequence[str]) -> float:
    """Seconds until a terminal shows something of `python <arguments>`; the process is ended then."""
    started = time.perf_counter()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - the terminal is its own
    os.read(terminal, 1)
    seconds = time.perf_counter() - started
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(terminal)
    return seconds


def costs(folder: Path, times: int) -> dict[str, Cost]:
    """Every process `times` times, in turn; the run of one sample into a new folder each time."""
    run = ["-m", "mmkv_bench", "method=mmshift", "budget=64", "limit=1"]
    timed = [
        "-m",
        "mmkv_bench",
        "scenario=efficiency",
        "method=snapkv",
        "budget=24",
        "lengths=[40]",
        "repeats=1",
        "new_tokens=4",
    ]
    done, passes = folder / "done", f"out={folder / 'passes'}"
    measured([*run, f"out={done}"])
    measured([*timed, passes])
    commands = {
        "import torch": ["-c", "import torch"],
        "what a run cannot avoid": ["-c", "; ".join(UNAVOIDABLE)],
        "with the loop": ["-c", "; ".join([*UNAVOIDABLE, LOOP])],
        "a finished run": [*run, f"out={done}"],
        "a finished run of scenario=efficiency": [*timed, passes],
        "status": ["-m", "mmkv_bench", "status", f"{done}"],
        "tables": ["-m", "mmkv_bench", "tables", f"{done}"],
        "plan": ["-m", "mmkv_bench", "plan", *run[2:], f"out={done}"],
        "plan of scenario=efficiency": [
            "-m",
            "mmkv_bench",
            "plan",
            "scenario=efficiency",
            "lengths=[590,1180]",
            "new_tokens=32",
            "method=snapkv",
            f"out={done}",
        ],
        "--help": ["-m", "mmkv_bench", "--help"],
    }
    found = {name: Cost() for name in [*commands, "a run of one sample"]}
    for turn in range(times):
        for name, words in commands.items():
            found[name].take(*measured(words))
        found["a run of one sample"].take(*measured([*run, f"out={folder / f'new{turn}'}"]))
    return found


def report(found: dict[str, Cost], line: float) -> str:
    """Markdown."""
    torch, least, loop = map(found.pop, ("import torch", "what a run cannot avoid", "with the loop"))
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "lmms-eval")
    )
    lines = [
        "# Starting",
        "",
        "Written by `python benchmarks/start.py`.",
        "",
        f"{datetime.date.today()}, {versions}, Python {platform.python_version()}, {platform.machine()}.",
        "",
        f"`import torch`: {torch.cpu:.2f} s CPU, {torch.imports:.2f} s importing. What a run of the embedded model cannot avoid: "
        f"{least.cpu:.2f} s CPU, {least.imports:.2f} s importing; with lmms-eval's loop {loop.cpu:.2f} and {loop.imports:.2f}.",
        "",
        "| | CPU s | imports s | imports, of | ratio | goal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, cost in found.items():
        run = name == "a run of one sample"
        other, what = (least, "what it cannot avoid") if run else (torch, "import torch")
        goal = GOALS["run" if run else "light"]
        lines.append(
            f"| {name} | {cost.cpu:.2f} | {cost.imports:.2f} | {what} | {cost.imports / other.imports:.2f} | {goal} |"
        )
    ratio = found["a run of one sample"].imports / loop.imports
    lines += ["", f"A run of one sample imports for {ratio:.2f} of what it cannot avoid with lmms-eval's loop."]
    lines += ["", f"The first line of a run on a terminal comes after {line:.2f} s (goal: {GOALS['line']:.0f} s)."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="processes of each kind (default: 3)")
    parser.add_argument("--write", type=Path, help="file to write as well")
    asked = parser.parse_args()
    # Or every process would compile every module anew, ours and others'.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        found = costs(Path(folder), asked.times)
        line = min(
            first_line(["-m", "mmkv_bench", "method=mmshift", "limit=1", f"out={folder}/line"])
            for _ in range(asked.times)
        )
    text = report(found, line)
    print(text, end="")
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()
