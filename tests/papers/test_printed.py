"""Promise: printed numbers are read as they stand, typed; what they are called here stands in one file and is never guessed."""

from __future__ import annotations

import pandas as pd
import pytest

from mmkv_bench.config.files import reference_dir
from mmkv_bench.errors import ConfigError
from mmkv_bench.papers.address import MethodSettings, address, canonical, members
from mmkv_bench.papers.printed import CLAIM, COLUMNS, STATUSES, half_digit, load, names, printed_address
from tests.each import each

TABLES = {"mmshift": 14, "prefixkv": 17, "flashcache": 9, "hybridkv": 7, "meda": 6}


def test_every_printed_value_is_there_with_a_status_and_a_reason():
    rows = load()
    assert len(rows) == 2495 and rows["number"].dtype == "float64" and rows["line"].dtype == "Int64"
    tables = rows[rows["status"] != CLAIM]
    assert len(tables) == 2430 and len(tables[tables["value"] != ""]) == 2418
    assert {paper: own["id"].nunique() for paper, own in tables.groupby("paper")} == TABLES
    assert {*rows["status"]} <= {*STATUSES}
    told = rows["reason"] != ""
    assert told[~rows["status"].isin(["comparable"])].all()
    assert tables["line"].notna().all(), "each stands on a line of the paper's text"


def test_rounding_is_half_of_the_last_printed_digit_also_where_the_point_was_lost():
    assert [half_digit(*pair) for pair in (("94.5", 94.5), ("5.50", 5.5), ("1700", 1700.0), ("+24.0", 24.0))] == [
        0.05, 0.005, 0.5, 0.05,
    ]  # fmt: skip
    assert half_digit("2735", 27.35) == 0.005 and half_digit("1283", 12.83) == 0.005 and half_digit("432", 43.2) == 0.05


def test_a_name_that_is_missing_is_an_error_and_every_name_is_used():
    rows = load()
    row = dict(rows[rows["id"] == "mmshift_table06"].iloc[0])
    with pytest.raises(ConfigError, match=r"names.yaml has no methods 'mmshift\|gamma=3'"):
        printed_address(row | {"variant": "gamma=3"})
    with pytest.raises(ConfigError, match="names.yaml has no models 'gpt'"):
        printed_address(row | {"model": "gpt"})
    used = {row["model"] for row in rows.to_dict("records")}
    assert used - {""} == {*names()["models"]}


def test_every_table_value_has_an_address():
    rows = load()
    tables = rows[rows["status"] != CLAIM]
    found = {printed_address(row).printed + (row["id"],) for row in tables.to_dict("records")}
    assert len(found) == len(tables), "no table prints two values for one address"


def test_every_file_has_the_same_columns_and_every_number_is_its_literal():
    for file in reference_dir().glob("*.csv"):
        assert file.read_text().splitlines()[0].split(",") == [*COLUMNS], file
    rows = load()
    literal = pd.to_numeric(rows["value"], errors="coerce").astype("float64")
    restored = pd.to_numeric(rows["note"].str.extract(r"ocr_likely=([0-9.]+)")[0]).astype("float64").fillna(literal)
    assert ((restored == rows["number"]) | (restored.isna() & rows["number"].isna())).all()


GIVEN = {"model": "qwen2_5_vl_7b", "dataset": "docvqa", "metric": "anls", "method": "mmshift", "budget": 64}


def test_an_address_is_what_a_method_does_and_not_what_it_is_called():
    default = address(GIVEN)
    assert address(GIVEN | {"with": {"gamma": 10.0}}) == default, "a parameter at its default changes nothing"
    assert address(GIVEN | {"with": {"gamma": 5}}).method == MethodSettings.of("mmshift", {"gamma": 5.0})
    assert default.method.parameters("paper") != default.method.parameters("released")
    row = '{"a": 1, "calibration": {"prefixkv": "ab"}, "gamma": 10.0, "reads_answer": true}'
    assert canonical("mmshift", row) == '{"a": 1}', "what rows do not have came later: it has its default"
    assert address(GIVEN | {"method": "full"}).budget_kind == "none", "full takes none"
    assert address(GIVEN | {"budget": 0.10}).budget == "0.1" and address(GIVEN | {"budget": 1.0}).budget == "1"
    assert len(members("MileBench T")) == 13 and ("milebench_iedit", "rouge_l") in members("MileBench S-3")


@each(
    ("change", "said"),
    [
        ({"metric": None}, "an address needs metric"),
        ({"budget": None}, "needs a budget"),
        ({"budget": 1.5}, "above 0 and at most 1"),
        ({"model": "qwen2_5_vl"}, "unknown model"),
        ({"dataset": "docvq"}, "did you mean 'docvqa'"),
        ({"with": {"gama": 1}}, "did you mean 'gamma'"),
        ({"methd": 1}, "no key of an address"),
        ({"dataset": "made_up_text"}, "need length and new_tokens"),
        ({"calibration": {"seed": 1}}, "auto, or a mapping with samples and data"),
    ],
)
def test_a_wrong_address_is_one_sentence(change: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        address(GIVEN | change)
