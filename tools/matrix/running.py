"""Running one model of the matrix: its calibrations, the methods that it can run, and all datasets with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import MMKVError
from tools.matrix.grid import ALL, OK, Line

if TYPE_CHECKING:
    from mmkv_bench.config.schema import RunConfig
    from mmkv_bench.plan.plan import DatasetShare
    from mmkv_bench.store.store import Store

CALIBRATED = {"prefixkv": ("prefixkv", "kivi_prefixkv"), "sparsemm": ("sparsemm", "mmshift_sparsemm")}
OUTSIDE = ("methods.custom.path=examples/value_norm.py", "methods.kvpress.press=KnormPress")
LONGEST = 3  # tokens of an answer
LIMITS = {"qwen": ("model.max_pixels=100352", "model.video_max_pixels=50176")}  # families whose processors have some


def run_model(model: str, names: Sequence[str], out: Path, dtype: str) -> list[Line]:
    """All datasets and methods of one model; a finished cell is not run again.

    Args:
        model: a name in conf/model; names: of conf/dataset; out: folder for rows and calibrations; dtype: of the model.
    """
    limits = next((words for start, words in LIMITS.items() if model.startswith(start)), ())
    base = ["experiment=matrix", f"model={model}", f"model.dtype={dtype}", *limits, *OUTSIDE, f"out={out / model}"]
    try:
        words, uncalibrated = _calibrations(model, out / model / f"calibration_{dtype}", dtype)
        base += words
        chosen, refused = _methods(base, model, uncalibrated)
    except MMKVError as error:
        return [Line(model, name, ALL, "refused", str(error)) for name in names]
    lines = []
    for name, found in _run(base, names, chosen).items():
        if isinstance(found, tuple):
            lines.append(Line(model, name, ALL, *found))
            continue
        lines += [_line(model, name, method, rows) for method, rows in found.items()]
        lines += [Line(model, name, method, "refused", why) for method, why in refused.items()]
    return lines


def _calibrations(model: str, folder: Path, dtype: str) -> tuple[list[str], dict[str, str]]:
    """Overrides that give calibrated methods an artefact of this random model, measured on one page or piece of text; and
    method -> why its measurement was refused."""
    from mmkv_bench.calibrate.command import run as calibrate
    from mmkv_bench.cli.grammar import reader
    from mmkv_bench.cli.verbs.measure import with_defaults
    from mmkv_bench.config.compose import compose
    from mmkv_bench.datasets import fixtures
    from mmkv_bench.families.facts import model_facts
    from mmkv_bench.models.source import Source

    config = compose(["experiment=matrix", f"model={model}"])
    sees = model_facts(Source.of(config.model).hf_config).multimodal
    words: list[str] = []
    refused: dict[str, str] = {}
    for measured, methods in CALIBRATED.items():
        file = folder / f"{measured}.json"
        shape = ["--model", model, "--weights", "random", "--layers", "2", "--dtype", dtype]
        read = ["--kinds", "lookup"]
        if not sees and measured == "prefixkv":
            read = ["--text", str(fixtures.folder("needle") / "haystack"), "--tokens", "1000"]
        command = [measured, *shape, "--samples", "1", *read, "--out", str(file)]
        try:
            if not file.is_file():
                calibrate(with_defaults(reader("calibrate")[1].read(command)))
            words += [f"methods.{method}.calibration={file}" for method in methods]
        except MMKVError as error:
            refused |= dict.fromkeys(methods, f"its calibration: {error}")
    return words, refused


def _methods(base: Sequence[str], model: str, uncalibrated: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Methods of the experiment that this model can run, and those it cannot with the reason."""
    from mmkv_bench.calibrate.artefact import Calibrations
    from mmkv_bench.config.compose import compose
    from mmkv_bench.families.facts import model_facts
    from mmkv_bench.models.source import Source
    from mmkv_bench.plan.cells import build_methods, method_entries
    from mmkv_bench.plan.validate import validate, validate_combinations

    config = compose([*base, "dataset=pages_walk"])
    validate(config)
    source = Source.of(config.model)
    family, calibrations = model_facts(source.hf_config), Calibrations(model, source.fingerprint()[0])
    chosen, refused = [], dict(uncalibrated)
    for name in [*map(str, config.methods), *map(str, config.variants)]:
        if name in refused:
            continue
        single = _only(config, {name})
        try:
            methods = build_methods(method_entries(single.method_config), calibrations)
            validate_combinations(single.protocol, family, [method.compressor for method in methods], ["pages_walk"])
        except MMKVError as error:
            refused[name] = str(error)
        else:
            chosen.append(name)
    return chosen, refused


def _only(config: RunConfig, names: Collection[str]) -> RunConfig:
    """The configuration with some of its methods and variants."""
    return config.updated(
        methods={key: node for key, node in config.methods.items() if key in names},
        variants={key: node for key, node in config.variants.items() if key in names},
    )


def _run(base: Sequence[str], names: Sequence[str], chosen: Sequence[str]) -> dict[str, Any]:
    """Run datasets together, so that the model is built once; where that is refused, in halves, until what cannot run
    stands alone. Returns dataset -> method -> rows, or dataset -> (result, reason) of what cannot run."""
    from mmkv_bench.config.compose import compose
    from mmkv_bench.plan.planner import make_plan
    from mmkv_bench.plan.validate import validate
    from mmkv_bench.run.run import carry_out
    from mmkv_bench.store.store import Store

    try:
        config = _only(compose([*base, f"dataset=[{','.join(names)}]"]), chosen)
        # a token per byte makes references of a thousand tokens; tests measure them
        short = {
            name: {**node, "generation": {**(node["generation"] or {}), "max_new_tokens": LONGEST}, "measures": []}
            for name, node in config.datasets.items()
        }
        config = config.updated(datasets=short)
        validate(config)
        plan = make_plan(config)
        carry_out(plan)
        store = Store(plan.out)
        found = {part.name: _rows(store, part) for part in plan.parts}
    except Exception as error:  # noqa: BLE001 - a fault of ours is what the grid is there to show
        if len(names) > 1:
            half = len(names) // 2
            return _run(base, names[:half], chosen) | _run(base, names[half:], chosen)
        known = isinstance(error, MMKVError)
        return {names[0]: ("refused", str(error)) if known else ("crashed", f"{type(error).__name__}: {error}")}
    holes = [name for name, rows in found.items() if not all(rows.values())] if len(names) > 1 else []
    for name in holes:  # a dataset that stopped among others says why when it stands alone
        found |= _run(base, [name], chosen)
    return found


def _rows(store: Store, part: DatasetShare) -> dict[str, list[dict[str, Any]]]:
    """Method -> its rows on a dataset, of both protocols, each with its cell's git_commit and dtype."""
    methods = {cell.cell: cell.method for cell in part.cells}
    origin = {
        cell["cell"]: (cell["git_commit"] or "", cell["dtype"]) for cell in store.cells(list(methods)).to_pylist()
    }
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in methods.values()}
    for row in store.responses(list(methods), ("cell", "status", "error", "fallback")).to_pylist():
        git_commit, dtype = origin[row["cell"]]
        found[methods[row["cell"]]].append(row | {"git_commit": git_commit, "dtype": dtype})
    return found


def _line(model: str, dataset: str, method: str, rows: Sequence[Mapping[str, Any]]) -> Line:
    if not rows:
        return Line(model, dataset, method, "missing")
    bad = [row for row in rows if row["status"] != OK]
    result, reason = (bad[0]["status"], bad[0]["error"]) if bad else (OK, "")
    fallbacks = " ".join(sorted({fallback for row in rows for fallback in row["fallback"]}))
    origin = (" ".join(sorted({row[column] for row in rows})) for column in ("git_commit", "dtype"))
    return Line(model, dataset, method, result, reason, fallbacks, *origin)
