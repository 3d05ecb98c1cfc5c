"""What a large store costs: resume check, status, score, tables and pack of made-up rows, and whether that is linear in rows.

    python benchmarks/store.py --scale 0.1            # a tenth of the rows; prints Markdown
    python benchmarks/store.py --write results/bench/store.md      # the full size, tens of minutes
    python benchmarks/store.py --only deep --measure status resume

Two stores, each also made at half the rows: `wide`, 10,000 cells x 100 samples (of 50 models, each a job of 200 cells with
its own part), and `deep`, 200 cells x 20,000 samples (one job, a part every 256 samples). Cells and parts are files as a run
writes them, rows fill every column that a run of the embedded model fills. They are made in a temporary folder (`--keep`
names another, which stays, and where an interrupted bench goes on; pages too, blank behind the frozen ones: no measurement looks
at a picture). Each measurement is a process of its own: CPU time of all threads, user and system, imports included, and the
largest resident set. A machine's pace moves by a fifth within an hour, and with what runs beside, so that beside the whole two
stores of half the rows are measured, one after the other (with one core after it); their mean is what the whole is held
against.

- resume: what a finished run of all cells reads before it says so; one job: of the cells of one model alone.
- status: the command; again: with the index that the first one left.
- score: lmms-eval's scorers over all answers, no judge; its rows are written. tables: the command, afterwards.
- pack: the command, last.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder: its statistics.py must not stand in for the standard module

# ruff: noqa: E402
import argparse
import contextlib
import datetime
import importlib.metadata
import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

SHAPES = {"wide": (10_000, 100), "deep": (200, 20_000)}
"""Cells, samples."""
OF_MODEL, OF_PART = 200, 256  # cells of a model; samples of a part
MEASURES = ("resume", "resume, one job", "status", "status again", "score", "tables", "pack")
MEMORY = 2048.0  # MiB
STATUS = 2.0  # CPU s, imports included
_BUDGETS = (32, 64, 128, 256, 512)
_TEXTS = 150  # different wrong answers to a sample


# ---------------------------------------------------------------------- made-up rows
def spec_of(samples: int) -> Any:
    """The task that the rows answer: pages of the embedded model's."""
    from mmkv_bench.datasets.specs import spec_from_config

    return spec_from_config(
        "pages", {"task": "pages", "size": "small", "count": samples, "generation": {}, "metrics": ["exact_match"]}
    )


def blank_pages(samples: int) -> None:
    """Pages of the embedded model's task for the scorer, which looks at no picture: the frozen ones as they are, blank ones
    behind them (20,000 pages take ten minutes to draw and 5 GB). In the cache that `pages_cache` names, never in the user's.
    """
    from PIL import Image

    from mmkv_bench.datasets import page_data
    from mmkv_bench.datasets.page_data import DataChunk
    from mmkv_bench.tiny.pages import Sample

    name = spec_of(samples).name
    blank = Image.new("RGB", (1, 1))
    chunks = -(-samples // page_data.CHUNK)
    frozen = len(page_data.frozen_digests()[page_data.frozen_name(name, "test")])
    named = page_data.named(name, "test", chunks * page_data.CHUNK)
    for number in range(frozen, chunks):
        chunk = DataChunk(page_data.folder(name, "test"), number)
        own = named[number * page_data.CHUNK : (number + 1) * page_data.CHUNK]
        rows = [
            Sample(sample, sample, kind, [blank], f"blank page {sample}", f"{sample[-6:]}.") for sample, kind in own
        ]
        if not chunk.exists():
            chunk.publish(page_data._table(rows), manifest=page_data.generator())


def pages_cache(folder: Path) -> dict[str, str]:
    """The environment of a process that makes or reads a store in `folder`."""
    return os.environ | {"MMKV_BENCH_CACHE": str(folder.parent / "pages")}


def make(folder: Path, cells: int, samples: int) -> None:
    """A store of that many answered cells, nothing scored."""
    from mmkv_bench.evaluation.documents import documents
    from mmkv_bench.store import parts
    from mmkv_bench.store.store import Store

    blank_pages(samples)
    docs = documents(spec_of(samples), samples)
    refs = docs.refs
    known = {
        "sample_id": np.array([ref.sample_id for ref in refs], object),
        "cluster": np.array([ref.cluster for ref in refs], object),
        "doc_id": np.array([ref.doc_id for ref in refs]),
        "prompt_hash": np.array([docs.prompt_hashes[ref.doc_id] for ref in refs], object),
        "right": np.array(docs.bare[docs.split]["answer"][:samples], object),
    }
    Store(folder).prepare()
    described = cell_rows(cells, spec_of(samples).dataset, samples)
    for name, row in described:
        (folder / "cells" / f"{name}.parquet").write_bytes(_bytes(parts.parquet(row)))
    names = np.array([name for name, _ in described], object)
    rng = np.random.default_rng(0)
    for model, start in enumerate(range(0, cells, OF_MODEL)):
        own = names[start : start + OF_MODEL]
        for number, first in enumerate(range(0, samples, OF_PART)):
            table = part_rows(own, {key: values[first : first + OF_PART] for key, values in known.items()}, rng)
            file = folder / "responses" / f"w{model}-{number:012x}.parquet"
            file.write_bytes(_bytes(parts.part(table)))


def _bytes(write: Any) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def cell_rows(count: int, dataset: str, samples: int) -> list[tuple[str, Any]]:
    """(hash, row of `cells`): models of 200 cells each, `full` and methods at five budgets."""
    import hashlib
    import json

    import pyarrow as pa

    from mmkv_bench.store.schema import SCHEMA_VERSION, SCHEMAS

    config = json.dumps(
        {"limit": samples, "datasets": {dataset: {"count": samples}}, "model": {"name": "m"}, "padding": "x" * 4000}
    )
    made = []
    for number in range(count):
        model, place = divmod(number, OF_MODEL)
        method, budget = place // len(_BUDGETS), _BUDGETS[place % len(_BUDGETS)]
        full = place == 0
        row = dict.fromkeys(SCHEMAS["cells"].names)
        row |= {"model": f"m{model}", "model_fingerprint": f"m{model}", "dataset": dataset, "dataset_fingerprint": "d"}
        row |= {"dtype": "float32", "attention": "sdpa", "torch": "2.15.0", "transformers": "5.23.0", "device": "cpu"}
        row |= {"config": config, "versions": "{}", "generation": "{}", "parameters": "{}", "tuned": False}
        row |= {"method": "full" if full else f"method{method:02d}", "base": "full" if full else f"method{method:02d}"}
        row |= {"reading": None if full else "paper", "protocol": "paper", "numerics_version": 1}
        row |= {"budget_kind": "none" if full else "entries", "budget_entries": None if full else budget}
        row |= {"cell": hashlib.sha256(f"{model}/{place}".encode()).hexdigest()[:16], "schema_version": SCHEMA_VERSION}
        row |= {"created_at": datetime.datetime.now(datetime.UTC)}
        made.append((row["cell"], pa.Table.from_pylist([row], schema=SCHEMAS["cells"])))
    return made


def part_rows(cells: np.ndarray, known: dict[str, np.ndarray], rng: np.random.Generator) -> Any:
    """The rows of a part: sample after sample, all cells of each; half of the answers are right."""
    import pyarrow as pa

    from mmkv_bench.store.schema import SCHEMA_VERSION, SCHEMAS

    samples, rows = len(known["doc_id"]), len(known["doc_id"]) * len(cells)
    sample, cell = np.repeat(np.arange(samples), len(cells)), np.tile(np.arange(len(cells)), samples)
    drawn = rng.integers(-_TEXTS, _TEXTS, rows)
    wrong = np.array([f"{text}." for text in range(_TEXTS)], object)
    answers = np.where(drawn < 0, known["right"][sample], wrong[np.maximum(drawn, 0)])
    lengths = np.array([len(answer) for answer in answers])
    letters = np.frombuffer("".join(answers.tolist()).encode("latin-1"), np.uint8).astype(np.int32)
    steps = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int32))
    failed = rng.random(rows) < 0.001
    ok = ~failed
    status = np.where(failed, "oom", "ok")
    kept = pa.ListArray.from_arrays(
        np.arange(0, rows * 4 + 1, 4, dtype=np.int32),
        pa.ListArray.from_arrays(
            np.arange(0, rows * 8 + 1, 2, dtype=np.int32), np.repeat(cell * 2 + 32, 8).astype(np.int32)
        ),
    )
    columns: dict[str, Any] = {name: known[name][sample] for name in ("sample_id", "cluster", "doc_id", "prompt_hash")}
    columns |= {"cell": cells[cell], "status": status, "answer": pa.array(answers, mask=failed)}
    columns |= {"error": pa.array(np.full(rows, "CUDA out of memory", object), mask=ok)}
    columns |= {"token_ids": pa.ListArray.from_arrays(steps, letters), "n_tokens": lengths, "kept": kept}
    columns |= {"forced_kl": pa.ListArray.from_arrays(steps, rng.random(len(letters)).round(6))}
    columns |= {"forced_agree": pa.ListArray.from_arrays(steps, rng.random(len(letters)) < 0.9)}
    columns |= {"kept_digest": np.char.mod("%016x", rng.integers(0, 2**62, rows)).astype(object)}
    for name in ("encode_s", "prefill_s", "compress_s", "decode_s"):
        columns[name] = rng.random(rows)
    for name in ("entries_resident", "entries_planned", "entries_reachable", "bytes_device", "bytes_held"):
        columns[name] = cell * 1024 + sample
    return _table(SCHEMAS["responses"], columns, _constants(SCHEMA_VERSION), rows, failed, pa)


def _constants(version: int) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC)
    made = {"schema_version": version, "dataset": spec_of(1).dataset, "measured": "group", "worker": "bench"}
    made |= {"committed_at": now, "prompt_tokens": 300, "context_tokens": 300, "visual_tokens": 256}
    return made | {"tokens_from_compressed": 3, "finish_reason": "eos", "fallback": [], "fork_group": "0" * 16}


def _table(schema: Any, columns: dict[str, Any], constants: dict[str, Any], rows: int, failed: Any, pa: Any) -> Any:
    arrays = []
    for field in schema:
        if field.name in columns:
            found = columns[field.name]
            arrays.append(found.cast(field.type) if isinstance(found, pa.Array) else pa.array(found, field.type))
        elif field.name in constants:
            arrays.append(pa.repeat(pa.scalar(constants[field.name], field.type), rows))
        else:
            arrays.append(pa.nulls(rows, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


# ---------------------------------------------------------------------- one measurement, in a process of its own
def measure(what: str, folder: Path, samples: int) -> None:
    """Do it; the process that started this one reads what it took."""
    from mmkv_bench.cli.main import main as command
    from mmkv_bench.store.store import Store

    if what in ("status", "status again", "tables", "pack"):
        if command([what.removesuffix(" again"), str(folder)]):
            raise SystemExit(f"error: {what} failed")
        return
    store = Store(folder)
    described = store.cells(columns=("cell", "model", "dataset", "base", "protocol"))
    if what == "resume, one job":
        import pyarrow.compute as pc

        described = described.filter(pc.equal(described["model"], "m0"))
    cells: list[Any] = [SimpleNamespace(**row) for row in described.to_pylist()]
    if what == "score":
        from mmkv_bench.evaluation.environment import go_offline
        from mmkv_bench.run.scoring import score_dataset

        go_offline()
        if score_dataset(store, spec_of(samples), cells) != len(cells):
            raise SystemExit("error: cells are left to score")
        return
    from mmkv_bench.plan.plan import COLUMNS, Coverage, DatasetShare

    ids = store.responses([cells[0].cell], ["sample_id"])["sample_id"].to_pylist()
    coverage = Coverage(store.responses([cell.cell for cell in cells], COLUMNS, coded=True))
    if coverage.missing(DatasetShare("pages", "pages", spec_of(samples), cells, ids)):
        raise SystemExit("error: samples are missing")


def measured(what: str, folder: Path, samples: int) -> dict[str, float]:
    """CPU seconds, wall-clock seconds and MiB of one measurement."""
    wall = time.perf_counter()
    words = [sys.executable, __file__, "--do", what, "--keep", str(folder), "--samples", str(samples)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=ROOT, env=pages_cache(folder))
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: {what} of {folder} failed")
    return {
        "cpu": used.ru_utime + used.ru_stime,
        "wall": time.perf_counter() - wall,
        "mib": used.ru_maxrss / 1024,
    }


# ---------------------------------------------------------------------- the report
@contextlib.contextmanager
def workplace(keep: Path | None) -> Iterator[Path]:
    """The folder of the stores."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="mmkv_bench_store_") as folder:
        yield Path(folder)


def size(folder: Path) -> tuple[int, float]:
    """Files and MiB."""
    files = [path for path in folder.rglob("*.parquet") if path.is_file()]
    return len(files), sum(path.stat().st_size for path in files) / 2**20


def make_for(folder: Path, cells: int, samples: int, like: Path | None = None) -> None:
    """A store for measurements; like: one of the same size, which it is a copy of as long as that was not measured."""
    shutil.rmtree(folder, ignore_errors=True)  # perhaps half made
    if like is not None and list(json.loads(like.with_suffix(".json").read_text())) == ["size"]:
        shutil.copytree(like, folder)
    else:
        words = [sys.executable, __file__, "--make", str(cells), "--samples", str(samples), "--keep", str(folder)]
        subprocess.run(words, check=True, env=pages_cache(folder))
    folder.with_suffix(".json").write_text(json.dumps({"size": size(folder)}))


def noted(what: str, folder: Path, samples: int) -> dict[str, float]:
    """`measured`, once for each store: an interrupted bench goes on where it was."""
    notes = folder.with_suffix(".json")
    known = json.loads(notes.read_text())
    used: dict[str, float] = known.get(what) or measured(what, folder, samples)
    notes.write_text(json.dumps(known | {what: used}))
    print(f"{folder.name} {what}: {used['cpu']:.2f} s CPU, {used['mib']:.0f} MiB", file=sys.stderr, flush=True)
    return used


def compared(shape: str, scale: float, folder: Path, measures: Sequence[str]) -> list[str]:
    """Lines of one shape: each measurement at its size and at half the rows."""
    cells, samples = SHAPES[shape]
    cells, samples = (int(cells * scale), samples) if shape == "wide" else (cells, int(samples * scale))
    half = (cells // 2, samples) if shape == "wide" else (cells, samples // 2)
    sizes = {"half": half, "again": half, "whole": (cells, samples)}
    folders = {name: folder / f"{shape}-{name}-{count}-{of_each}" for name, (count, of_each) in sizes.items()}
    for name, own in folders.items():
        if not own.with_suffix(".json").exists():
            make_for(own, *sizes[name], folders["half"] if name == "again" else None)

    def taken(what: str, *names: str) -> list[dict[str, float]]:
        return [noted(what, folders[name], sizes[name][1]) for name in names]

    found: dict[str, dict[str, dict[str, float]]] = {}
    with ThreadPoolExecutor(2 if (os.cpu_count() or 1) > 1 else 1) as pool:
        for what in measures:
            whole, halves = pool.submit(taken, what, "whole"), pool.submit(taken, what, "half", "again")
            found[what] = {
                "whole": whole.result()[0],
                "half": {"cpu": sum(used["cpu"] for used in halves.result()) / 2},
            }
    files, mib = json.loads(folders["whole"].with_suffix(".json").read_text())["size"]
    lines = [f"`{shape}`: {cells:,} cells x {samples:,} samples, {files:,} files, {mib:,.0f} MiB unscored.", ""]
    lines += ["| | CPU s | of half the rows | ratio | peak MiB | goal |", "| --- | --- | --- | --- | --- | --- |"]
    for what, used in found.items():
        whole, half = used["whole"], used["half"]
        goal = f"{STATUS:.0f} s, " * (what == "status again" and shape == "wide") + f"{MEMORY:.0f} MiB"
        ratio = whole["cpu"] / half["cpu"]
        lines.append(f"| {what} | {whole['cpu']:.2f} | {half['cpu']:.2f} | {ratio:.2f} | {whole['mib']:.0f} | {goal} |")
    return [*lines, ""]


def imports() -> float:
    """CPU seconds of a process that only imports what reading rows takes."""
    words = [sys.executable, "-c", "import pyarrow.parquet, pyarrow.compute, numpy, json"]
    process = subprocess.Popen(words, cwd=ROOT)
    _, _, used = os.wait4(process.pid, 0)
    return used.ru_utime + used.ru_stime


def report(shapes: Sequence[str], scale: float, measures: Sequence[str], keep: Path | None) -> str:
    """The Markdown of all measurements."""
    written = f"python benchmarks/store.py --scale {scale:g} --only {' '.join(shapes)}"
    if tuple(measures) != MEASURES:
        written += f" --measure {' '.join(shlex.quote(what) for what in measures)}"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mmkv-bench", "pyarrow", "numpy"))
    lines = [
        "# Large stores",
        "",
        f"Written by `{written}`; CPU time of all threads, imports included.",
        "",
    ]
    lines += [f"{datetime.date.today()}, {versions}, Python {platform.python_version()}, {platform.machine()}.", ""]
    lines += [f"Importing pyarrow and numpy alone: {min(imports() for _ in range(3)):.2f} s.", ""]
    with workplace(keep) as folder:
        for shape in shapes:
            lines += compared(shape, scale, folder, measures)
    return "\n".join(lines)


def main() -> None:
    command = argparse.ArgumentParser(description="Time and memory of large stores.")
    command.add_argument("--scale", type=float, default=1.0, help="part of the rows (default: 1)")
    command.add_argument("--only", nargs="*", default=list(SHAPES), choices=list(SHAPES), help="which stores")
    command.add_argument("--measure", nargs="*", default=list(MEASURES), choices=MEASURES, help="what to measure")
    command.add_argument("--keep", type=Path, help="folder of the stores, which stays")
    command.add_argument("--write", type=Path, help="also write the Markdown to this file")
    command.add_argument("--make", type=int, help=argparse.SUPPRESS)
    command.add_argument("--do", help=argparse.SUPPRESS)
    command.add_argument("--samples", type=int, help=argparse.SUPPRESS)
    given = command.parse_args()
    if given.do:
        measure(given.do, given.keep, given.samples)
        return
    if given.make:
        make(given.keep, given.make, given.samples)
        return
    text = report(given.only, given.scale, given.measure, given.keep)
    print(text, end="")
    if given.write:
        given.write.parent.mkdir(parents=True, exist_ok=True)
        given.write.write_text(text)


if __name__ == "__main__":
    main()
