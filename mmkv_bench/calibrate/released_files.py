"""Import calibrations that the papers' authors released: plain JSON, every number of which is checked.

PrefixKV (github.com/THU-MIG/PrefixKV, `confs/`) has one file per model and budget, a list of one evicted share per layer. The
file's name ends with the evicted share of all entries (`..._0.9.json` keeps 10 %). SparseMM (github.com/CR400AF-A/SparseMM,
`visual_head/head_score/`) has one file per model, `{"<layer>-<head>": [score of each sample, ...]}`. Neither kind of file
names the measured weights; the user who imports a file states that it belongs to the model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import CalibrationError

if TYPE_CHECKING:
    from mmkv_bench.families.facts import ModelFacts


LARGEST_FILE_BYTES = 256 << 20  # bytes of a file; a thousand samples of every head of a 72B model take a tenth
TOP_SHARE = 0.05  # share of the heads whose scores are summed for `oddities`
_UNNAMED_WEIGHTS_NOTE = "the files name no weights; the import assigned them to this model"
_EVICTED_SHARE = re.compile(r"_(0?\.\d+)\.json$")
_HEAD_KEY = re.compile(r"(0|[1-9]\d{0,3})-(0|[1-9]\d{0,3})")


def imported(method: str, files: Sequence[Path], family: ModelFacts) -> dict[str, Any]:
    """Convert files that a paper's authors released to an artefact's fields `dataset`, `settings` and `data`.

    Raises:
        CalibrationError: the method has no released files; a file is missing, not JSON, or not of this model's shape.
    """
    if method not in _READERS:
        raise CalibrationError(
            f"there are no released calibrations of {method} to import; allowed: {', '.join(_READERS)}"
        )
    contents: dict[str, Any] = {}
    digests: dict[str, str] = {}
    for file in files:
        if file.name in contents:
            raise CalibrationError(f"two files are named {file.name}; give each budget's file once")
        try:
            if file.stat().st_size > LARGEST_FILE_BYTES:
                raise CalibrationError(
                    f"{file.name} is larger than {LARGEST_FILE_BYTES >> 20} MiB; give a released file"
                )
            content = file.read_bytes()
            contents[file.name] = json.loads(content, object_pairs_hook=_different_keys)
        except OSError as error:
            raise CalibrationError(f"{file} cannot be read ({error.strerror}); give a released JSON file") from error
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"{file.name} cannot be read as JSON ({error}); give the released file") from error
        digests[file.name] = hashlib.sha256(content).hexdigest()
    artefact_data, oddities = _READERS[method](contents, family)
    return {
        "dataset": f"released file{'s' * (len(digests) > 1)} {', '.join(digests)}, imported",
        "settings": {"imported": digests, "oddities": [_UNNAMED_WEIGHTS_NOTE, *oddities], "samples": 0},
        "data": artefact_data,
    }


def _different_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(items)) != len(items):
        raise ValueError("a key occurs twice")
    return dict(items)


def _numbers(values: Any, name: str, what: str, high: float = math.inf) -> list[float]:
    """Check that `values` is a list of at least one finite number from 0 to `high`, and return it as floats.

    name, what: file and kind of the numbers, for the error message.
    """
    if not isinstance(values, list) or not values:
        raise CalibrationError(f"{name}: {what} is not a list of numbers; give the released file")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high or value == math.inf:
            raise CalibrationError(f"{name}: {what} has {str(value)[:40]!r}; allowed: finite numbers, 0 to {high:g}")
    return [float(value) for value in values]


def prefix_profile(contents: Mapping[str, Any], family: ModelFacts) -> tuple[dict[str, Any], list[str]]:
    """Convert PrefixKV's released files to the data of `measurements.prefix_profile`, without `std`, which they lack.

    Return the data, and sentences about oddities of the files. contents: file name to its JSON value.
    """
    rows: dict[Decimal, tuple[str, list[float]]] = {}
    for name, values in contents.items():
        share_match = _EVICTED_SHARE.search(name)
        if share_match is None or not 0 < Decimal(share_match[1]) < 1:
            raise CalibrationError(
                f"{name} does not end with the evicted share, such as _0.9.json, so its budget is unknown; keep the "
                "released names"
            )
        kept_share = 1 - Decimal(share_match[1])
        evicted_shares = _numbers(values, name, "the list of evicted shares", high=1)
        if len(evicted_shares) != family.num_layers:
            raise CalibrationError(f"{name} has {len(evicted_shares)} layers, but the model has {family.num_layers}")
        if kept_share in rows:
            raise CalibrationError(f"{name} and {rows[kept_share][0]} have the same budget; give one of the two")
        rows[kept_share] = name, [1 - one for one in evicted_shares]
    oddities = []
    for rho, (name, row) in sorted(rows.items()):
        if abs(fmean(row) - float(rho)) > 1e-6:
            oddities.append(f"{name} keeps {fmean(row):.6f} on average where its name says {rho}")
    kept_shares = sorted(rows)
    missing_budgets = [text for text in (Decimal(i) / 10 for i in range(1, 10)) if text not in rows]
    if missing_budgets:
        oddities.append(
            f"no file for the budgets {', '.join(map(str, missing_budgets))}: shares between others are interpolated"
        )
    artefact_data = {
        "layers": family.num_layers,
        "grid": [float(rho) for rho in kept_shares],
        "ratios": [rows[rho][1] for rho in kept_shares],
    }
    return artefact_data, oddities


def head_scores(contents: Mapping[str, Any], family: ModelFacts) -> tuple[dict[str, Any], list[str]]:
    """Convert SparseMM's released file to the data of `measurements.head_scores`: the mean of each head's samples.

    Return the data, and sentences about oddities of the file. contents: file name to its JSON value.
    """
    if len(contents) != 1:
        raise CalibrationError(f"expected one file of head scores, got {len(contents)}; give one")
    ((name, heads_of_file),) = contents.items()
    if not isinstance(heads_of_file, dict):
        raise CalibrationError(
            f'{name} is not a JSON object of heads, such as {{"0-0": [0.1]}}; give the released file'
        )
    layers, heads = family.num_layers, family.num_query_heads
    expected_heads = {f"{layer}-{head}" for layer in range(layers) for head in range(heads)}
    unknown_keys = [key for key in heads_of_file if not _HEAD_KEY.fullmatch(key) or key not in expected_heads]
    if unknown_keys or len(heads_of_file) != len(expected_heads):
        raise CalibrationError(
            f"{name} has scores of {len(heads_of_file)} heads"
            + (f", among them {unknown_keys[0][:20]!r}, which this model lacks" if unknown_keys else "")
            + f", but the model has {layers} layers of {heads} heads, 0-0 to {layers - 1}-{heads - 1}"
        )
    samples = {key: _numbers(values, name, f"head {key}") for key, values in heads_of_file.items()}
    scores = [[fmean(samples[f"{layer}-{head}"]) for head in range(heads)] for layer in range(layers)]
    sample_counts = {len(values) for values in samples.values()}
    sorted_scores = sorted((score for row in scores for score in row), reverse=True)
    sum_of_scores = math.fsum(sorted_scores)
    if not sum_of_scores:
        raise CalibrationError(f"no score in {name} is above 0, so heads cannot be ranked; give the released file")
    top_scores = sorted_scores[: max(1, round(TOP_SHARE * len(sorted_scores)))]
    oddities = [
        f"{min(sample_counts)} samples of each head"
        if len(sample_counts) == 1
        else f"{min(sample_counts)} to {max(sample_counts)} samples of a head",
        f"{sorted_scores.count(0.0)} of {len(sorted_scores)} heads have the score 0",
        f"the highest {len(top_scores)} heads have {math.fsum(top_scores) / sum_of_scores:.1%} of all scores",
    ]
    return {"scores": scores, "kv_heads": family.num_kv_heads}, oddities


_READERS: dict[str, Callable[[Mapping[str, Any], ModelFacts], tuple[dict[str, Any], list[str]]]] = {
    "prefixkv": prefix_profile,
    "sparsemm": head_scores,
}
