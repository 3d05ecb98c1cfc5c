"""Rows that agree with what a paper prints, and wrong values for everything that makes them evidence of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mmkv_bench.methods.build import settings
from mmkv_bench.methods.node import flat_parameters
from mmkv_bench.models.files import hub_fingerprint
from mmkv_bench.papers.evidence import Evidence
from mmkv_bench.papers.judgement import FilledCell, fill
from mmkv_bench.papers.layout import TableLayout, load
from mmkv_bench.store.store import Store
from tests.papers.genuine import genuine
from tests.tables.examples import Example, cell_row, zeros_and_ones

MODEL, DATA = "qwen2_5_vl_7b", "milebench_mmcoqa"
OTHER_COMMIT = "d" * 40

_SETTINGS = (
    *(("split", "train"), ("task", "milebench_webqa"), ("include_path", "/home/me/tasks")),
    *(("placeholders", "remove"), ("cluster_key", "question_type")),
)
COLUMNS: Mapping[str, tuple[Any, ...]] = {
    "model": ("qwen2_5_vl_3b", "llava_v1_5_7b", "qwen2_5_vl_7b_finetuned", "Qwen2.5-VL-7B"),
    "model_fingerprint": ("f" * 16, "0123456789abcdef", hub_fingerprint("me/finetuned", "c" * 40)),
    "model_revision": (None, "main"),
    "weights": ("folder", "random", None),
    "dataset": ("milebench_webqa", f"{DATA}_fixture", "MMCoQA"),
    "base": ("random", "h2o", "custom"),
    "reading": ("released",),
    "protocol": ("strict", "query_agnostic"),
    "budget_kind": ("entries",),
    "budget_entries": (64,),
    "budget_fraction": ("0.2", "0.11"),
    "seed": (3, 7),
    "parameters": ({"window": 16}, {"pool": 7}, {"pooling": "max"}),
    "dtype": ("float16", "float32", "int4", "fp8"),
    "attention": ("eager", "flash_attention_2"),
    "numerics_version": (0, 2),
    "method_version": (2, 9),
    "git_dirty": (True,),
    "git_commit": ("e" * 40,),
    "generation": (
        *({"max_new_tokens": tokens} for tokens in (16, 511, None)),
        *({"do_sample": True}, {"temperature": 1.0}, {"top_p": 0.9}, {"num_beams": 4}, {"until": ["\n"]}),
        *({"repetition_penalty": 1.2}, {"decode": "compiled"}, {"cut_prompt": "left"}),
    ),
    "config": (
        *({"model": {"path": path}} for path in ("/home/me/finetuned", "me/finetuned", None)),
        *({"model": {"revision": revision}} for revision in ("main", OTHER_COMMIT, "v1.1")),
        *({"model": {name: value}} for name in ("min_pixels", "max_pixels", "video_max_pixels") for value in (784, 50176)),
        *({"model": {"max_prompt_tokens": 512}}, {"model": {"frames": 8}}, {"model": {"layers": 4}}),
        *({"datasets": {DATA: {name: value}}} for name, value in _SETTINGS),
        {"datasets": {}},
    ),
}  # fmt: skip
"""Column -> values that are wrong wherever they stand; of JSON what is changed in it."""
APART: Mapping[str, tuple[Any, ...]] = {
    "dataset_fingerprint": ("0" * 16,),
    "model_revision": (OTHER_COMMIT,),  # with the fingerprint that belongs to it: another commit of the same repository
}
"""What nothing states: wrong only beside rows that have another."""
TIMES: Mapping[str, tuple[Any, ...]] = {
    "device": ("NVIDIA A100", "NVIDIA H200"),
    "cpu": ("another processor",),  # where the device is one
    "dtype": COLUMNS["dtype"],
    "attention": COLUMNS["attention"],
    "generation": ({"decode": "compiled"},),
    "config": ({"profiles": "rows"}, {"memory_limit": 40}, {"model": {"path": "me/finetuned"}}),
}
"""The same of timed passes."""


def scored(
    folder: Path,
    right: tuple[int, int] = (133, 108),
    n: int = 200,
    answer: dict[str, Any] | None = None,
    judge: str = "",
    of_method: tuple[int, ...] | None = None,
    **given: Any,
) -> tuple[TableLayout, Evidence]:
    """MMCoQA of HybridKV's Table 1, full (66.5) and SnapKV at 10 % (54.0), as printed.

    answer: columns of SnapKV's answers; judge: who scored them; of_method: places that are scored; given: columns of both cells.
    """
    example, metric = Example(), "accuracy"
    for method, budget, correct in (("full", None, right[0]), ("snapkv", "0.1", right[1])):
        parameters = "{}" if method == "full" else json.dumps(flat_parameters(settings(method)))
        made = genuine(MODEL, DATA, method, **({"parameters": parameters} | given))
        own = answer if budget else None
        cell = example.add(method, budget, zeros_and_ones(correct, n), sample={"metric": metric}, answer=own, **made)
    if of_method is not None:
        own = [row for row in example.samples if row["cell"] == cell]
        example.samples = [row for row in example.samples if row["cell"] != cell] + [own[place] for place in of_method]
    scores = {
        "cell": cell,
        "dataset": "ocrbench",
        "metric": metric,
        "n": n,
        "n_ok": n,
        "interval": "none",
        "judge": judge,
    }
    example.metrics += [scores] if judge else []
    for part in (example.cells, example.samples, example.responses) if "torch" in given else ():
        for row in part:
            row["cell"] = f"{row['cell']}-{given['torch']}"
    spec = load("hybridkv_table01")
    cells = [one for one in spec.cells if (one.address.model, one.address.dataset) == (MODEL, DATA)]
    cells = [one for one in cells if one.address.method.name in ("full", "snapkv")]
    return replace(spec, cells=tuple(cells)), Evidence.of([example.write(folder)])


def timed(folder: Path, device: str = "NVIDIA H100", disturbed: tuple[str, ...] = ()) -> tuple[TableLayout, Evidence]:
    """Total times of FlashCache's Table 8 at 32K, half of what is printed (30.51 and 21.75 s): the same ratio."""
    store, place = Store(folder), 0
    for name, method, budget, seconds in (("a", "full", None, 30.51 / 2), ("b", "flashcache", "0.1", 21.75 / 2)):
        parameters = "{}" if method == "full" else json.dumps(flat_parameters(settings(method)))
        made = genuine(MODEL, "made_up_image", method, parameters=parameters, device=device)
        store.write_cells([cell_row(name, method, budget, **made)])
        common = {"cell": name, "dataset": "made_up_image", "prompt_tokens": 32000, "visual_tokens": 31000, "batch": 1}
        common |= {"new_tokens": 512, "status": "ok", "order_seed": 0, "measured": "own", "prompts": "image"}
        for repeat in range(3):
            place += 1
            told = common | {"repeat": repeat, "place": place}
            total = told | {"phase": "total", "seconds": seconds, "disturbed": list(disturbed)}
            store.write_timings([total, told | {"phase": "decode", "seconds": 1.0}])
    spec = load("flashcache_table08")
    cells = [one for one in spec.cells if (one.address.metric, one.address.length) == ("total_s", 32000)]
    return replace(spec, cells=tuple(cells)), Evidence.of([folder])


def forged(evidence: Evidence, row: int, column: str, value: Any) -> Evidence:
    """The same evidence with one value of one row changed; of JSON the keys that are given, to any depth."""
    cells = evidence.cells.copy()
    old = cells[column].iloc[row]
    new = json.dumps(_over(json.loads(old), value)) if isinstance(value, dict) else value
    cells[column] = pd.Series([new if at == row else one for at, one in enumerate(cells[column])], dtype=object)
    if column == "model_revision" and value == OTHER_COMMIT:
        path = json.loads(cells["config"].iloc[row])["model"]["path"]
        cells.loc[row, "model_fingerprint"] = hub_fingerprint(path, OTHER_COMMIT)
    return Evidence(evidence.roots, cells)


def filled(spec: TableLayout, evidence: Evidence) -> tuple[FilledCell, ...]:
    """The table's cells: full and the method."""
    return fill(spec, evidence).cells


def draw(rng: np.random.Generator, table: Mapping[str, tuple[Any, ...]]) -> tuple[str, Any]:
    """A column and a wrong value for it, every column as likely."""
    column = str(rng.choice(list(table)))
    values = table[column]
    return column, values[rng.integers(len(values))]


def _over(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    if not new:
        return {}
    deeper = {key: _over(old[key], value) for key, value in new.items() if isinstance(value, dict) and key in old}
    return old | new | deeper
