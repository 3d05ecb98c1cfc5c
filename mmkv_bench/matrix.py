"""`python -m mmkv_bench.matrix`: which model family runs which dataset with which method, found out by running them.

Every family has random weights of two layers at true width and its own processor; every dataset has small data of our
own making in its upstream schema; one sample, all methods, protocols paper and strict, on CPU (conf/experiment/matrix.yaml).
A cell of the grid is `ok` or the reason why not: refused before any work (which sentence), or failed (which status).
Answers of random weights mean nothing and are not scored; tests hold every task's scorer to known answers on the same data.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config import options
from mmkv_bench.errors import MMKVError

if TYPE_CHECKING:
    from omegaconf import DictConfig

FAMILIES = (
    "qwen2_vl_7b",
    "qwen2_5_vl_3b",
    "qwen3_vl_8b",
    "llava_v1_5_7b",
    "llava_v1_6_vicuna_7b",
    "llava_v1_6_mistral_7b",
    "llava_onevision_7b",
    "llava_video_7b",
    "internvl3_2b",
    "llama_3_8b",
)
"""One model of each family, by its name in conf/model."""

CALIBRATED = {"prefixkv": ("prefixkv", "kivi_prefixkv"), "sparsemm": ("sparsemm", "mmshift_sparsemm")}
OUTSIDE = ("methods.custom.path=examples/value_norm.py", "methods.kvpress.press=KnormPress")
NOT_DATA = ("pages", "lmms_eval")  # the mix of the other pages; a task of the user's choice
LONGEST = 3  # tokens of an answer
LIMITS = {"qwen": ("model.max_pixels=100352", "model.video_max_pixels=50176")}  # families whose processors have some
OK = "ok"
ALL = "all methods"
UNRUN = "no run of it is recorded yet; make matrix makes it"


@dataclass(frozen=True)
class Line:
    """One cell of the grid. `reason` is empty for `ok`; `fallbacks` are those of its rows."""

    model: str
    dataset: str
    method: str
    result: str
    reason: str = ""
    fallbacks: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 when a cell of the grid is a hole without a reason."""
    asked = _parser().parse_args(argv)
    if asked.one:
        lines = run_model(asked.one, asked.datasets or datasets(), asked.out)
        (asked.out / f"{asked.one}.json").write_text(json.dumps([asdict(line) for line in lines]))
        return 0
    with ThreadPoolExecutor(asked.processes) as pool:
        list(pool.map(lambda model: _start(model, asked), [] if asked.render else asked.models or FAMILIES))
    lines = read(asked.out, asked.models or FAMILIES, asked.datasets or datasets())
    text = render(lines)
    if asked.write:
        asked.write.mkdir(parents=True, exist_ok=True)
        (asked.write / "README.md").write_text(text)
        (asked.write / "grid.csv").write_text(csv(lines))
    print(text)
    return int(any(not line.reason for line in lines if line.result != OK))


def _start(model: str, asked: argparse.Namespace) -> None:
    """A process for each model: what it leaves in memory is no concern of the next."""
    words = [sys.executable, "-m", "mmkv_bench.matrix", "--one", model, "--out", str(asked.out)]
    done = subprocess.run([*words, *(["--datasets", *asked.datasets] if asked.datasets else [])], check=False)
    if done.returncode:
        print(f"{model} ended with exit code {done.returncode}; the grid shows what it had", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="python -m mmkv_bench.matrix", description=__doc__)
    command.add_argument("--models", nargs="+", help=f"names in conf/model (default: {', '.join(FAMILIES)})")
    command.add_argument("--datasets", nargs="+", help="names in conf/dataset (default: all)")
    command.add_argument("--out", type=Path, default=Path("runs/matrix"), help="rows (default: runs/matrix)")
    command.add_argument("--write", type=Path, help="folder for README.md and grid.csv (make matrix: results/matrix)")
    command.add_argument("--processes", type=int, default=1, help="models run side by side (default: 1)")
    command.add_argument("--render", action="store_true", help="run nothing, show what was run before")
    command.add_argument("--one", help=argparse.SUPPRESS)
    return command


def datasets() -> list[str]:
    """Every dataset of conf/dataset that names one task."""
    return [name for name in options("dataset") if name not in NOT_DATA]


# ---------------------------------------------------------------------- running
def run_model(model: str, names: Sequence[str], out: Path) -> list[Line]:
    """All datasets and methods of one model; a finished cell is not run again."""
    out.mkdir(parents=True, exist_ok=True)
    limits = next((words for start, words in LIMITS.items() if model.startswith(start)), ())
    base = ["experiment=matrix", f"model={model}", *limits, *OUTSIDE]
    try:
        base += _calibrations(model, out)
        chosen, refused = _methods(base, out, model)
    except MMKVError as error:
        return [Line(model, name, ALL, "refused", str(error)) for name in names]
    faults = _run(base, names, chosen, out / model)
    lines = []
    for name in names:
        if name in faults:
            lines.append(Line(model, name, ALL, *faults[name]))
            continue
        lines += [_line(model, name, method, rows) for method, rows in _rows(name, chosen, out / model).items()]
        lines += [Line(model, name, method, "refused", why) for method, why in refused]
    return lines


def _calibrations(model: str, out: Path) -> list[str]:
    """Overrides that give calibrated methods an artefact of this random model, measured on one page where its family
    can be measured; methods without one are refused with the reason later."""
    from mmkv_bench.calibrate.__main__ import parser
    from mmkv_bench.calibrate.command import run as calibrate

    words = []
    for measured, methods in CALIBRATED.items():
        file = out / model / "calibration" / f"{measured}.json"
        shape = ["--model", model, "--weights", "random", "--layers", "2", "--dtype", "bfloat16"]
        command = [measured, *shape, "--samples", "1", "--kinds", "lookup", "--out", str(file)]
        try:
            if not file.is_file():
                calibrate(parser().parse_args(command))
        except MMKVError as error:
            print(f"{model}: no calibration of {measured}: {error}", flush=True)
        words += [f"methods.{method}.calibration={file}" for method in methods]
    return words


def _methods(base: Sequence[str], out: Path, model: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Methods of the experiment that this model can run, and those it cannot with the reason."""
    from mmkv_bench.calibrate.artefact import Calibrations
    from mmkv_bench.models.families import family_of
    from mmkv_bench.models.source import Source
    from mmkv_bench.planning.cells import bases, build_methods
    from mmkv_bench.planning.compose import compose, method_defaults
    from mmkv_bench.planning.validate import validate, validate_combinations

    config = compose([*base, "dataset=pages_walk", f"out={out / model}"])
    validate(config)
    source = Source.of(config.model)
    family, calibrations = family_of(source.hf_config()), Calibrations(model, source.fingerprint()[0])
    chosen, refused = [], []
    for name in [*map(str, config.methods), *map(str, config.variants)]:
        single = _only(config, name)
        try:
            methods = build_methods(single, method_defaults(bases(single)), calibrations)
            validate_combinations(single, family, methods)
        except MMKVError as error:
            refused.append((name, str(error).replace(f"{out}/", "runs/matrix/")))  # no machine's path in the grid
        else:
            chosen.append(name)
    return chosen, refused


def _only(config: DictConfig, name: str) -> DictConfig:
    """The configuration with one of its methods or variants."""
    from omegaconf import OmegaConf

    single = config.copy()
    OmegaConf.set_struct(single, False)
    single.methods = {key: node for key, node in config.methods.items() if str(key) == name}
    single.variants = {key: node for key, node in config.variants.items() if str(key) == name}
    return single


def _run(base: Sequence[str], names: Sequence[str], chosen: Sequence[str], root: Path) -> dict[str, tuple[str, str]]:
    """Run datasets together, so that the model is built once; where that is refused, in halves, until what cannot run
    stands alone. Returns dataset -> (result, reason) of those."""
    from omegaconf import OmegaConf

    from mmkv_bench.planning.compose import compose
    from mmkv_bench.planning.run import run
    from mmkv_bench.planning.validate import validate

    try:
        config = compose([*base, f"dataset=[{','.join(names)}]", f"out={root}"])
        OmegaConf.set_struct(config, False)
        config.methods = {key: node for key, node in config.methods.items() if str(key) in chosen}
        config.variants = {key: node for key, node in config.variants.items() if str(key) in chosen}
        for node in config.datasets.values():
            node.generation = {**(node.generation or {}), "max_new_tokens": LONGEST}
            node.measures = []  # a token per byte makes references of a thousand tokens; tests measure them
        validate(config)
        run(config)
    except Exception as error:  # noqa: BLE001 - a fault of ours is what the grid is there to show
        if len(names) > 1:
            half = len(names) // 2
            return _run(base, names[:half], chosen, root) | _run(base, names[half:], chosen, root)
        known = isinstance(error, MMKVError)
        return {names[0]: ("refused", str(error)) if known else ("crashed", f"{type(error).__name__}: {error}")}
    return {}


def _rows(name: str, chosen: Sequence[str], root: Path) -> dict[str, list[dict[str, Any]]]:
    """Method -> its rows on a dataset, of both protocols."""
    from mmkv_bench.evaluation import spec_from_config
    from mmkv_bench.planning.compose import compose
    from mmkv_bench.planning.report import plain
    from mmkv_bench.store.store import Store

    config = compose(["experiment=matrix", f"dataset={name}"])
    label = spec_from_config(name, plain(config.datasets[name]), plain(config.data)).dataset
    store = Store(root)
    cells = {row["cell"]: row["method"] for row in store.cells().to_pylist() if row["dataset"] == label}
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in chosen}
    for row in store.responses(list(cells), ("cell", "status", "error", "fallback")).to_pylist():
        found.setdefault(cells[row["cell"]], []).append(row)
    return found


def _line(model: str, dataset: str, method: str, rows: Sequence[Mapping[str, Any]]) -> Line:
    fallbacks = " ".join(sorted({fallback for row in rows for fallback in row["fallback"]}))
    bad = [row for row in rows if row["status"] != OK]
    if not rows:
        return Line(model, dataset, method, "missing")
    return Line(model, dataset, method, *((bad[0]["status"], bad[0]["error"]) if bad else (OK, "")), fallbacks)


# ---------------------------------------------------------------------- showing
def read(out: Path, models: Sequence[str], names: Sequence[str]) -> list[Line]:
    """The lines that earlier runs left below `out`, and one for every dataset that a model was not run on."""
    lines = []
    for model in models:
        file = out / f"{model}.json"
        found = [Line(**line) for line in json.loads(file.read_text())] if file.is_file() else []
        run = {line.dataset for line in found}
        lines += [line for line in found if line.dataset in names]
        lines += [Line(model, name, ALL, "not run", UNRUN) for name in names if name not in run]
    return lines


def csv(lines: Sequence[Line]) -> str:
    """One line per cell of the grid."""
    import csv as library
    import io

    stream = io.StringIO()
    writer = library.writer(stream, lineterminator="\n")
    writer.writerow(["model", "dataset", "method", "result", "reason", "fallbacks"])
    writer.writerows([list(asdict(line).values()) for line in lines])
    return stream.getvalue()


def render(lines: Sequence[Line]) -> str:
    """The grid as markdown: a table of datasets by models, each cell telling how many methods are ok, and the letters of
    the reasons of the others; then the reasons, with methods and datasets."""
    models = list(dict.fromkeys(line.model for line in lines))
    names = sorted({line.dataset for line in lines})
    letters = _letters(lines)
    held: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        held.setdefault((line.dataset, line.model), []).append(line)
    text = [
        "# Model family x dataset x method",
        "",
        "Made by `make matrix` (`python -m mmkv_bench.matrix --write results/matrix`), which runs every cell: random weights",
        "of two layers at true width, the family's own processor, one sample of data of our own making in the upstream",
        "schema, budget 20%, protocols paper and strict, on CPU. A number is the methods whose rows are all ok; a letter",
        "stands for a reason below. [grid.csv](grid.csv) has one line per cell.",
        "",
        "| dataset | " + " | ".join(models) + " |",
        "|---" * (len(models) + 1) + "|",
    ]
    for name in names:
        row = [_cell(held.get((name, model), []), letters) for model in models]
        text.append(f"| {name} | " + " | ".join(row) + " |")
    text += ["", "## Reasons", ""]
    text += [f"- **{letter}** {_reason(reason, lines)}" for reason, letter in letters.items()]
    return "\n".join(text) + "\n"


def _letters(lines: Sequence[Line]) -> dict[tuple[str, str], str]:
    """(result, reason) -> a, b, ..., z, aa, ab, ... in order of appearance."""
    found: dict[tuple[str, str], str] = {}
    for line in lines:
        if line.result != OK:
            number = len(found)
            name = chr(ord("a") + number % 26)
            found.setdefault(
                (line.result, line.reason), (chr(ord("a") + number // 26 - 1) if number > 25 else "") + name
            )
    return found


def _cell(lines: Sequence[Line], letters: Mapping[tuple[str, str], str]) -> str:
    good = sum(line.result == OK for line in lines)
    reasons = dict.fromkeys(letters[line.result, line.reason] for line in lines if line.result != OK)
    return " ".join([f"{good} ok"] * bool(good) + list(reasons))


def _reason(key: tuple[str, str], lines: Sequence[Line]) -> str:
    mine = [line for line in lines if (line.result, line.reason) == key]
    what = f"{key[0]}: {key[1]}" if key[1] else f"{key[0]}, **without a reason**"
    return f"{what} ({_some('method', [line.method for line in mine])})"


def _some(what: str, names: Sequence[Any]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names) if len(names) <= 6 else f"{len(names)} {what}s"


if __name__ == "__main__":
    sys.exit(main())
