"""Promise: records of Every Eval Ever hold what rows say, and are valid where the schema is (`make check-export` fetches it)."""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from mmkv_bench.store.store import Store
from tests.tables.examples import Example, zeros_and_ones
from tools.every_eval_ever import By, main, write

BY = By("Lab", "third_party", 1_800_000_000)
VALUES = {"value": 0.75, "value_failures_zero": 0.75, "low": 0.5, "high": 0.9, "interval": "wilson"}


def rows(root: Path) -> Path:
    made = Example()
    made.add("full", None, zeros_and_ones(4, 4))
    made.add("snapkv", 64, zeros_and_ones(3, 4), model="a/model")
    made.add("mmshift", "0.2", [1.0, None, 1.0, 0.0])
    common = {"dataset": "walk3", "metric": "exact_match", "n": 4}
    made.metrics += [
        common | VALUES | {"cell": "c000", "n_ok": 4, "value": 1.0, "high": 1.0},
        common
        | VALUES
        | {"cell": "c001", "n_ok": 4, "difference": -0.25, "difference_low": -0.5, "difference_high": 0.1},
        common | VALUES | {"cell": "c001", "n_ok": 4, "metric": "fidelity_kl", "value": 3.5, "high": 4.0},
        common | VALUES | {"cell": "c002", "n_ok": 3, "value": None},
    ]
    return made.write(root)


def test_records_are_what_rows_say(tmp_path):
    store = Store(rows(tmp_path / "rows"))
    files, left = write(store, BY, tmp_path / "out")
    assert left == ["c002"] and len(files) == 2
    assert {file.parent.relative_to(tmp_path / "out").as_posix() for file in files} == {
        "data/walk3/mmkv_bench/tiny",
        "data/walk3/mmkv_bench/a_model",
    }
    record = next(
        one for one in map(json.loads, (file.read_text() for file in files)) if "c001" in one["evaluation_id"]
    )
    match, kl = record["evaluation_results"]
    assert match["score_details"]["score"] == 0.75 and match["score_details"]["details"]["minus_full_low"] == "-0.5"
    assert match["score_details"]["uncertainty"]["confidence_interval"] == {
        "lower": 0.5,
        "upper": 0.9,
        "confidence_level": 0.95,
        "method": "wilson",
    }
    assert (match["metric_config"]["max_score"], kl["metric_config"]["max_score"]) == (1, "Infinity")
    assert kl["metric_config"]["lower_is_better"] and not match["metric_config"]["lower_is_better"]
    told = match["generation_config"]["additional_details"]
    assert (
        told["budget_entries"] == "64" and told["entries_resident_mean"] == "512" and told["answers_over_budget"] == "0"
    )
    answers = [[f"s{i:03d}", "ok", "384q592m107.", list(range(13))] for i in range(4)]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in answers)
    assert (
        record["source_metadata"]["additional_details"]["answers_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    )
    again, _ = write(store, By("Lab", "other", 1_900_000_000), tmp_path / "out")
    assert again == files, "a further export replaces the files of the same cells"


def test_a_folder_without_rows_is_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "no"), "--out", str(tmp_path / "o"), "--organization", "x"]) == 2
    assert "no is not a folder of result rows" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.skipif(
    not find_spec("every_eval_ever"), reason="every-eval-ever wants Python >= 3.12; see make check-export"
)
def test_records_are_valid(tmp_path):
    from every_eval_ever.schema import schema_json
    from jsonschema import Draft7Validator

    validator = Draft7Validator(schema_json())
    files, _ = write(Store(rows(tmp_path / "rows")), BY, tmp_path / "out")
    assert [error.message for file in files for error in validator.iter_errors(json.loads(file.read_text()))] == []
