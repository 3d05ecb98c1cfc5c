"""What tables and scoring cost: committed rows printed, 100 methods compared, 10,000 cells scored again.

    python benchmarks/tables.py                       # prints Markdown; 10,000 cells x 100 samples, minutes
    python benchmarks/tables.py --cells 500 --write results/bench/tables.md

- tables: `python -m mmkv_bench tables` on a committed store, a process of its own.
- methods compared: the tables of one budget out of made-up graded scores of 500 samples in clusters of about 4.
- scoring: a made-up store of `pages` answers (half of them right, the others one of 150 texts, about as many as a sample of
  results/tiny/methods has), without a judge; its rows are made in a temporary folder. Beside it what lmms-eval's own code
  takes for such a cell: its loop without any function of ours, and its scorer alone.

CPU time is of all threads, user and system; other work on the machine does not count in it.
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
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

GOALS = {"tables": 15.0, "memory": 1536.0, "methods": 3.0, "scoring": 60.0}  # s, MiB, s, s
SAMPLES, TEXTS = 100, 150
TASK = "pages_small"


def timed(function: Callable[[], Any], times: int = 1) -> tuple[float, float]:
    """(CPU seconds, wall-clock seconds) of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(times):
        function()
    return (time.process_time() - cpu) / times, (time.perf_counter() - wall) / times


def printed(folder: Path) -> dict[str, float]:
    """One run of the tables command."""
    wall = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "mmkv_bench", "tables", str(folder)], stdout=subprocess.DEVNULL, cwd=ROOT
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: the tables of {folder} failed")
    return {
        "cpu": used.ru_utime + used.ru_stime,
        "wall": time.perf_counter() - wall,
        "mib": used.ru_maxrss / 1024,
    }


def compared(count: int) -> tuple[float, float]:
    """The table of `count` methods at one budget, built and printed, out of frames."""
    import pandas as pd

    from mmkv_bench.tables.build import build
    from mmkv_bench.tables.formats import markdown
    from mmkv_bench.tables.score_text import tables_of_scores
    from mmkv_bench.tables.stored_rows import Rows

    rng = np.random.default_rng(0)
    n = 500
    cells, samples = [], []
    for number in range(count):
        cells.append(cell_row(f"cell{number:05d}", f"method{number:03d}", 64))
        scores = np.clip(rng.normal(0.4 + 0.004 * number, 0.3, n), 0, 1)
        samples += [
            (cells[-1]["cell"], f"s{i:04d}", f"page{i // 4:04d}", "anls", value, "ok") for i, value in enumerate(scores)
        ]
    names = ["cell", "sample_id", "cluster", "metric", "value", "status"]
    rows = Rows(pd.DataFrame(cells), pd.DataFrame(samples, columns=names), pd.DataFrame(), pd.DataFrame())
    return timed(lambda: markdown(tables_of_scores(build(rows))))


def cell_row(cell: str, method: str, budget: int | None, dataset: str = "made_up") -> dict[str, Any]:
    """A `cells` row as far as tables read it."""
    texts = {
        "model": "tiny",
        "model_fingerprint": "m",
        "dataset_fingerprint": "d",
        "dtype": "float32",
        "attention": "sdpa",
    }
    texts |= {"torch": "2", "transformers": "5", "config": "{}", "versions": "{}", "device": "cpu", "generation": "{}"}
    return texts | {
        "cell": cell,
        "dataset": dataset,
        "method": method,
        "base": method,
        "reading": None if budget is None else "paper",
        "protocol": "paper",
        "budget_kind": "none" if budget is None else "entries",
        "budget_entries": budget,
        "budget_fraction": None,
        "seed": None,
        "parameters": "{}",
        "tuned": False,
        "numerics_version": 1,
    }


def made_store(folder: Path, count: int) -> tuple[Any, Any, list[Any]]:
    """A store with `count` answered cells, the task and the cells."""
    import pyarrow as pa

    from mmkv_bench.datasets.specs import spec_from_config
    from mmkv_bench.evaluation.documents import documents
    from mmkv_bench.store import parts
    from mmkv_bench.store.files import write_whole
    from mmkv_bench.store.schema import SCHEMA_VERSION, SCHEMAS
    from mmkv_bench.store.store import Store

    node = {"task": "pages", "size": "small", "count": 500, "generation": {}, "metrics": ["exact_match"]}
    spec = spec_from_config("pages", node)
    docs = documents(spec, SAMPLES)
    right = docs.bare[docs.split]["answer"][:SAMPLES]
    names = [f"{number:016x}" for number in range(count)]
    drawn = np.random.default_rng(0).integers(-TEXTS, TEXTS, size=(count, SAMPLES))
    answers = [right[i] if text < 0 else f"{text}." for line in drawn for i, text in enumerate(line)]
    rows = count * SAMPLES
    of_sample = {
        "sample_id": [ref.sample_id for ref in docs.refs],
        "cluster": [ref.cluster for ref in docs.refs],
        "doc_id": [ref.doc_id for ref in docs.refs],
        "prompt_hash": [docs.prompt_hashes[ref.doc_id] for ref in docs.refs],
    }
    columns: dict[str, Any] = {name: values * count for name, values in of_sample.items()}
    columns |= {"cell": np.repeat(np.array(names, dtype=object), SAMPLES), "answer": answers}
    columns |= {"token_ids": [[ord(letter) for letter in answer] for answer in answers]}
    columns |= {"n_tokens": [len(answer) for answer in answers], "fallback": [[]] * rows}
    now = datetime.datetime.now(datetime.UTC)
    constants = {"schema_version": SCHEMA_VERSION, "dataset": spec.dataset, "status": "ok", "measured": "group"}
    constants |= {"worker": "bench", "committed_at": now}
    schema = SCHEMAS["responses"]
    arrays = []
    for field in schema:
        if field.name in columns:
            arrays.append(pa.array(columns[field.name], field.type))
        elif field.name in constants:
            arrays.append(pa.repeat(pa.scalar(constants[field.name], field.type), rows))
        else:
            arrays.append(pa.nulls(rows, field.type))
    store = Store(folder)
    store.prepare()
    write_whole(folder / "responses" / "made.parquet", parts.parquet(pa.Table.from_arrays(arrays, schema=schema)))
    described = [
        cell_row(name, "full" if not i else f"m{i}", None if not i else 64, spec.dataset)
        | {"schema_version": SCHEMA_VERSION, "created_at": now}
        for i, name in enumerate(names)
    ]
    table = pa.Table.from_pylist(described, schema=SCHEMAS["cells"])
    write_whole(folder / "cells" / "packed.parquet", parts.parquet(table))
    cells = [
        SimpleNamespace(cell=row["cell"], dataset=spec.dataset, base=row["base"], protocol="paper") for row in described
    ]
    return store, spec, cells


def scored(count: int) -> dict[str, float]:
    """Seconds of scoring a store of that many cells, of finding nothing left to do, and lmms-eval's own for one cell."""
    from mmkv_bench.evaluation.environment import go_offline
    from mmkv_bench.evaluation.samples import Answer
    from mmkv_bench.evaluation.scoring import score

    go_offline()
    with tempfile.TemporaryDirectory(prefix="mmkv_bench_tables_") as folder:
        store, spec, cells = made_store(Path(folder), count)
        from mmkv_bench.evaluation.documents import documents
        from mmkv_bench.run.scoring import cells_to_score, score_dataset

        docs = documents(spec, SAMPLES)
        answers = {ref.sample_id: Answer("1.", "ok", ref.doc_id, docs.prompt_hashes[ref.doc_id]) for ref in docs.refs}
        score(spec, answers, SAMPLES)  # imports
        found: list[int] = []
        all_cells = timed(lambda: found.append(score_dataset(store, spec, cells)))
        if found != [count]:
            raise SystemExit(f"error: {found} cells of {count} were scored")
        idle = timed(lambda: cells_to_score(store, cells))
        if cells_to_score(store, cells):
            raise SystemExit("error: cells are left to score")
    alone = timed(lambda: score(spec, answers, SAMPLES), 5)
    loop, scorer = _floor(spec, docs)
    return {
        "cpu": all_cells[0],
        "wall": all_cells[1],
        "idle": idle[0],
        "alone": alone[0],
        "loop": loop,
        "scorer": scorer,
    }


def _floor(spec: Any, docs: Any) -> tuple[float, float]:
    """CPU seconds of lmms-eval's loop over one cell with no function of ours in it, and of its scorer alone."""
    from lmms_eval.api.task import ConfigurableTask

    from mmkv_bench.evaluation.documents import task_config
    from mmkv_bench.evaluation.environment import lmms_eval, task_environment

    module, config = lmms_eval(True), task_config(spec)

    def loop() -> Any:
        task = module.ScoringTask(config, docs.bare, set(range(SAMPLES)), True)
        module.run_loop(task, module.Respondent(lambda instance: "1."), limit=SAMPLES)
        return task

    with module.quiet(), task_environment(None):
        task = loop()
        own = [dict(doc) for doc in docs.bare[docs.split].select(range(SAMPLES))]
        plain = ConfigurableTask.process_results.__wrapped__
        return timed(loop, 5)[0], timed(lambda: [plain(task, doc, ["1."], None) for doc in own], 20)[0]


def report(folders: Sequence[Path], count: int, methods: int) -> str:
    """The Markdown of all measurements."""
    lines = ["# Tables and scoring", "", "Written by `python benchmarks/tables.py`; CPU time of all threads.", ""]
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("mmkv-bench", "lmms-eval", "pyarrow")
    )
    lines += [f"{datetime.date.today()}, {versions}, Python {platform.python_version()}, {platform.machine()}.", ""]
    lines += ["| `python -m mmkv_bench tables` | CPU s | wall s | peak MiB | goal |", "| --- | --- | --- | --- | --- |"]
    for folder in folders:
        used = printed(folder)
        goal = f"{GOALS['tables']:.0f} s, {GOALS['memory']:.0f} MiB" if folder.name == "methods" else ""
        lines.append(f"| {folder} | {used['cpu']:.1f} | {used['wall']:.1f} | {used['mib']:.0f} | {goal} |")
    cpu, wall = compared(methods)
    lines += [
        "",
        f"{methods} methods at one budget, 500 graded samples, every pair tested: {cpu:.2f} s CPU, {wall:.2f} s wall",
    ]
    lines[-1] += f" (goal for 100: {GOALS['methods']:.0f} s)."
    used = scored(count)
    each = used["cpu"] / count
    lines += [
        "",
        f"{count:,} cells x {SAMPLES} samples scored without a judge: {used['cpu']:.1f} s CPU, {used['wall']:.1f} s wall "
        f"(goal for 10,000: {GOALS['scoring']:.0f} s), {1000 * each:.2f} ms a cell; nothing left to do is found in "
        f"{used['idle']:.1f} s.",
        "",
        "| one cell | CPU ms | of a cell among many |",
        "| --- | --- | --- |",
    ]
    for name, key in (
        ("scored by itself", "alone"),
        ("lmms-eval's loop with no function of ours", "loop"),
        ("lmms-eval's scorer alone", "scorer"),
    ):
        lines.append(f"| {name} | {1000 * used[key]:.2f} | {used[key] / each:.2f}x |")
    return "\n".join(lines) + "\n"


def main() -> None:
    command = argparse.ArgumentParser(description="Time and memory of tables and scoring.")
    command.add_argument("--cells", type=int, default=10_000, help="cells that are scored (default: 10000)")
    command.add_argument("--methods", type=int, default=100, help="methods that are compared (default: 100)")
    command.add_argument("--rows", type=Path, nargs="*", default=[Path("results/tiny/methods")], help="stores to print")
    command.add_argument("--write", type=Path, help="also write the Markdown to this file")
    given = command.parse_args()
    text = report(given.rows, given.cells, given.methods)
    print(text, end="")
    if given.write:
        given.write.parent.mkdir(parents=True, exist_ok=True)
        given.write.write_text(text)


if __name__ == "__main__":
    main()
