"""One drawn command line through the real entry point, and what has to hold of it whatever it says."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from mmkv_bench.cli.main import main, run_guarded
from mmkv_bench.store.schema import FALLBACKS, STATUSES
from mmkv_bench.store.store import Store
from tests.cli.setting import overrides, refusal
from tests.fuzz.drawing import Case


@dataclass(frozen=True)
class Outcome:
    """code: the exit code, None when an exception came through; found: what does not hold; failed: rows without answer."""

    code: int | None
    found: tuple[str, ...]
    rows: int = 0
    failed: tuple[str, ...] = ()


def run(case: Case) -> Outcome:
    """The case in an empty folder, its rows in `rows` there unless it names a folder itself."""
    own = [word for word in case.arguments if word.startswith("out=")]
    arguments = ["model.device=cpu", *([] if own else ["out=rows"]), *case.arguments]
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run_guarded(arguments, _plan) if case.planned else main(arguments)
        except BaseException:  # noqa: BLE001 - whatever comes through is the finding
            return Outcome(None, (f"an exception came through: {traceback.format_exc()[-1500:]}",))
        finally:
            os.chdir(before)
        left = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
        found = [*_of_code(case, code), *_of_output(code, out.getvalue(), err.getvalue())]
        if code == 2 or case.planned:
            return Outcome(code, (*found, *([f"it left {', '.join(left[:5])}"] if left else [])))
        return _of_rows(code, found, Store(Path(folder) / (own or ["out=rows"])[0][4:]))


def _plan(arguments: list[str]) -> int:
    from mmkv_bench.config.compose import compose
    from mmkv_bench.plan.planner import make_plan
    from mmkv_bench.plan.validate import validate

    config = compose(overrides(arguments))
    validate(config)
    assert all(part.cells and part.samples for part in make_plan(config).parts), "a run without anything to do"
    return 0


def _of_code(case: Case, code: int) -> list[str]:
    allowed = {"valid": (0,), "invalid": (2,), "open": (0, 1, 2)}[case.expect]
    return [] if code in allowed else [f"exit code {code} of a case that is {case.expect}"]


def _of_output(code: int, out: str, err: str) -> list[str]:
    """A refusal is one sentence on stderr; nothing ever prints a traceback."""
    found = ["a traceback was printed"] if "Traceback" in out + err else []
    if code == 2:
        lines = [line for line in refusal(err).splitlines() if line.strip()]
        if len(lines) != 1 or not lines[0].startswith("mmkv_bench: ") or len(lines[0]) < 30:
            found.append(f"no sentence on stderr: {err[-800:]!r}")
        elif any(word in lines[0] for word in ("Error:", "Exception", "object at 0x", "NoneType")):
            found.append(f"a sentence of the machine's: {lines[0][:800]}")
    return [*found, *([f"stderr said {err[-800:]!r}"] if code and found else [])]


def _of_rows(code: int, found: list[str], store: Store) -> Outcome:
    """Every planned cell has a row of every sample, no paper cell holds more than its budget, words are enumerated."""
    cells = {row["cell"]: row for row in store.cells().to_pylist()}
    rows = store.responses().to_pylist()
    samples = {}
    for row in rows:
        samples.setdefault(row["dataset"], set()).add(row["sample_id"])
    wanted = {(cell, sample) for cell, row in cells.items() for sample in samples.get(row["dataset"], {"?"})}
    got = [(row["cell"], row["sample_id"]) for row in rows]
    if not cells or sorted(got) != sorted(wanted):
        found.append(f"{len(wanted)} rows were planned in {len(cells)} cells and {len(got)} are there")
    for row in rows:
        found += _of_row(row, cells[row["cell"]])
    failed = tuple(f"{cells[row['cell']]['method']}: {row['error']}" for row in rows if row["status"] != "ok")
    if bool(failed) != (code == 1):
        found.append(f"exit code {code} with {len(failed)} failed rows: {failed[:3]}")
    return Outcome(code, tuple(found), len(rows), failed)


def _of_row(row: dict, cell: dict) -> list[str]:
    name, found = f"{cell['method']} {cell['reading']} {cell['protocol']} {row['sample_id']}", []
    if row["status"] not in STATUSES:
        found.append(f"{name}: status {row['status']!r}")
    if unknown := set(row["fallback"] or ()) - set(FALLBACKS):
        found.append(f"{name}: fallbacks {unknown}")
    if row["status"] == "ok":
        asked, held = row["entries_asked"], row["entries_resident"]
        if asked is not None and cell["reading"] != "released" and held > asked:
            found.append(f"{name}: {held} entries held where {asked} were asked for")
        if sum(map(sum, row["kept"])) != held:
            found.append(f"{name}: heads hold {sum(map(sum, row['kept']))} and the row says {held}")
    return found
