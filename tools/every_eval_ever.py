"""Export cells as records of Every Eval Ever (schema 0.3.0): scores with intervals, requested and counted budget, checksums.

    python -m tools.every_eval_ever results/tiny/large --out records --organization 'My lab'

One record is one cell: a model under one method at one budget on one dataset. The schema has no fields for a compressor, so its
settings are in the model's and the generation's `additional_details`, whose values are strings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv_bench import __version__
from mmkv_bench.cli.grammar import rows_folder
from mmkv_bench.errors import MMKVError
from mmkv_bench.report.cells import COUNTED, AnswerTable, Commands, counted, parsed
from mmkv_bench.statistics.metric_kinds import is_share, lower_is_better
from mmkv_bench.store.files import canonical_json
from mmkv_bench.store.store import Store
from mmkv_bench.tables.status import label
from mmkv_bench.tables.stored_rows import missing

SCHEMA = "0.3.0"
RELATIONSHIPS = ("first_party", "third_party", "collaborative", "other")
CONFIDENCE = 0.95
_DESCRIBED = ("method", "base", "reading", "protocol", "budget_entries", "budget_fraction", "seed", "parameters")
_PROVEN = (
    *("model_fingerprint", "model_revision", "dataset_fingerprint", "dtype", "attention", "numerics_version"),
    *("git_commit", "torch", "transformers", "device", "cpu", "versions"),
)
_ANSWERS = ("sample_id", "status", "answer", "token_ids")


@dataclass(frozen=True)
class By:
    """Publisher of the records, and time of publication (seconds of Unix time).

    relationship: the publisher's relationship to the model, one of `RELATIONSHIPS`.
    """

    organization: str
    relationship: str
    time: int


def records(store: Store, by: By) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield (cell, record), in the order of datasets, methods and budgets; the record is None if no metric has a value."""
    commands = Commands()
    answers = AnswerTable(
        store.responses(None, dict.fromkeys(["cell", "doc_id", "kept", "chosen", *_ANSWERS, *COUNTED]), coded=True)
    )
    metrics: dict[str, list[Mapping[str, Any]]] = {}
    for row in store.metrics().to_pylist():
        metrics.setdefault(row["cell"], []).append(row)
    cells = store.cells().to_pylist()
    for cell in sorted(cells, key=lambda row: (row["dataset"], label(row), row["cell"])):
        scored = [row for row in metrics.get(cell["cell"], ()) if not missing(row["value"])]
        if not scored:
            yield cell["cell"], None
            continue
        config = parsed(cell["config"])
        command = commands.of({key: value for key, value in cell.items() if value is not None}, cell["config"])
        yield cell["cell"], _record(answers, cell, config, scored, command["line"], by)


def write(store: Store, by: By, out: Path) -> tuple[list[Path], list[str]]:
    """Write one file per record below `out`, in the layout of the project's data repository.

    The path is data/<dataset>/<developer>/<model>/<uuid>.json. A cell always has the same file name, so a new export replaces it.

    Returns:
        The files, and the cells without a record.
    """
    files, left = [], []
    for cell, record in records(store, by):
        if record is None:
            left.append(cell)
            continue
        developer, _, model = record["model_info"]["id"].rpartition("/")
        name = uuid.UUID(bytes=hashlib.sha256(cell.encode()).digest()[:16], version=4)
        dataset = record["evaluation_results"][0]["source_data"]["dataset_name"]
        folder = out.joinpath("data", *(_file_name(part) for part in (dataset, developer or "unknown", model)))
        folder.mkdir(parents=True, exist_ok=True)
        files.append(folder / f"{name}.json")
        files[-1].write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return files, left


def _record(
    answers: AnswerTable,
    cell: Mapping[str, Any],
    config: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    command: str,
    by: By,
) -> dict[str, Any]:
    table = answers.rows(cell["cell"])
    account = counted(table) or {}
    path = (config.get("model") or {}).get("path") or ""
    model = (
        path
        if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).exists()
        else f"mmkv_bench/{cell['model'].replace('/', '_')}"
    )
    name = f"{cell['dataset']} {label(cell)}"
    generation = _generation(cell, command, account)
    source = _source(cell, config, metrics)
    made = cell["created_at"].isoformat(timespec="seconds")
    return {
        "schema_version": SCHEMA,
        "evaluation_id": f"{cell['dataset']}.{cell['cell']}/{model}/{by.time}",
        "evaluation_timestamp": made,
        "retrieved_timestamp": str(by.time),
        "source_metadata": {
            "source_name": f"mmkv_bench rows, cell {cell['cell']}",
            "source_type": "evaluation_run",
            "source_organization_name": by.organization,
            "evaluator_relationship": by.relationship,
            "additional_details": {
                "cell": cell["cell"],
                "answers_sha256": answers_sha256(table),
                "samples_chosen_by_id": str(len(table) - table["chosen"].null_count),
            },
        },
        "eval_library": {
            "name": "mmkv_bench",
            "version": __version__,
            "additional_details": {"lmms_eval": json.loads(cell["versions"]).get("lmms_eval", "unknown")},
        },
        "model_info": {
            "name": cell["model"],
            "id": model,
            "inference_engine": {"name": "transformers", "version": cell["transformers"]},
            "additional_details": {
                "deployment_type": "self_deployed",
                "model_availability": "unknown" if cell["weights"] == "random" else "open_weights",
                "kv_cache_compression": label(cell),
                **_strings(cell, _PROVEN),
            },
        },
        "evaluation_results": [
            {
                "evaluation_result_id": f"{cell['cell']}.{row['metric']}",
                "evaluation_name": name,
                "source_data": source,
                "evaluation_timestamp": made,
                "metric_config": _metric(row),
                "score_details": _score(row),
                "generation_config": generation,
            }
            for row in sorted(metrics, key=lambda row: row["metric"])
        ],
    }


def answers_sha256(table: Any) -> str:
    """Return the sha256 (hex) of a cell's answers.

    Each row, ordered by sample, gives the JSON list [sample id, status, answer, token ids] without spaces, and a line break."""
    digest = hashlib.sha256()
    columns = [table[name].to_pylist() for name in _ANSWERS]
    for row in sorted(zip(*columns, strict=True), key=lambda row: row[0]):
        digest.update(canonical_json(list(row)).encode() + b"\n")
    return digest.hexdigest()


def _generation(cell: Mapping[str, Any], command: str, account: Mapping[str, Any]) -> dict[str, Any]:
    settings = json.loads(cell["generation"])
    arguments: dict[str, Any] = {"temperature": 0}  # greedy
    if isinstance(settings.get("max_new_tokens"), int):
        arguments["max_tokens"] = settings["max_new_tokens"]
    if command:
        arguments["execution_command"] = command
    details = _strings(cell, _DESCRIBED)
    for name in COUNTED:  # least, mean, most over answers
        if account.get(name) is not None:
            details |= {
                f"{name}_{what}": str(value)
                for what, value in zip(("least", "mean", "most"), account[name], strict=True)
            }
    details |= {f"answers_{status}": str(n) for status, n in account.get("ended", {}).items()}
    if "over" in account:
        details["answers_over_budget"] = str(account["over"])
    return {"generation_args": arguments, "additional_details": details}


def _source(cell: Mapping[str, Any], config: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    node = (config.get("datasets") or {}).get(cell["dataset"]) or {}
    hub = re.match(r"([\w.-]+/[\w.-]+)(?:,|$|\s)", str((node.get("about") or {}).get("hub") or ""))
    details = {"dataset_fingerprint": cell["dataset_fingerprint"], "task": str(node.get("task") or cell["dataset"])}
    if hub is None or (config.get("data") or {}).get("source") == "fixture":
        return {"dataset_name": cell["dataset"], "source_type": "other", "additional_details": details}
    source = {"dataset_name": cell["dataset"], "source_type": "hf_dataset", "hf_repo": hub[1]}
    return source | {"samples_number": max(row["n"] for row in metrics), "additional_details": details}


def _metric(row: Mapping[str, Any]) -> dict[str, Any]:
    share = is_share(row["metric"]) and 0 <= row["value"] <= 1
    judged = _strings(row, ("judge", "judge_prompts", "judge_temperature", "lmms_eval"))
    return {
        "metric_id": row["metric"],
        "metric_name": row["metric"],
        "metric_unit": "proportion" if share else "metric's own",
        "lower_is_better": lower_is_better(row["metric"]),
        "score_type": "continuous",
        "min_score": 0 if share or not is_share(row["metric"]) else "-Infinity",  # amounts have no upper end
        "max_score": 1 if share else "Infinity",
    } | ({"additional_details": judged} if judged else {})


def _score(row: Mapping[str, Any]) -> dict[str, Any]:
    uncertainty: dict[str, Any] = {"num_samples": row["n"]}
    if not missing(row["low"]) and not missing(row["high"]):
        ends = {"lower": row["low"], "upper": row["high"]}
        uncertainty["confidence_interval"] = ends | {"confidence_level": CONFIDENCE, "method": row["interval"]}
    details = {"samples": str(row["n"]), "samples_ok": str(row["n_ok"])}
    details |= {
        f"minus_full{end}": repr(row[f"difference{end}"])
        for end in ("", "_low", "_high")
        if not missing(row[f"difference{end}"])
    }
    return {"score": row["value"], "details": details, "uncertainty": uncertainty}


def _strings(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    return {name: str(row[name]) for name in names if not missing(row[name])}


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text).strip(".") or "unknown"


def main(words: Sequence[str] | None = None) -> int:
    """Write the records of rows folders, and list the cells that have none."""
    parser = argparse.ArgumentParser(prog="python -m tools.every_eval_ever")
    parser.add_argument("rows", nargs="+", help="rows folders that runs printed")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the folder data/ is made")
    parser.add_argument("--organization", required=True, metavar="NAME", help="who ran the evaluation")
    relationship = "of who ran it to who made the model (default: third_party)"
    parser.add_argument("--relationship", choices=RELATIONSHIPS, default="third_party", help=relationship)
    given = parser.parse_args(words)
    by = By(given.organization, given.relationship, int(time.time()))
    try:
        for folder in map(rows_folder, dict.fromkeys(given.rows)):
            files, without = write(Store(folder), by, given.out)
            print(f"{folder}: {len(files)} records in {given.out / 'data'}")
            if without:
                named = ", ".join(without[:3]) + (", ..." if len(without) > 3 else "")
                print(f"{len(without)} cells have no record, because none of their metrics has a value: {named}")
    except MMKVError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
