"""Promise: `samples=[...]` answers these samples and no others, and its rows say so; a later run of all goes on from there."""

from __future__ import annotations

import pytest

from tests.run.setting import done, responses

pytestmark = pytest.mark.full
ONE = "walk3-small-test-000004"


def test_single_samples_are_run_and_are_part_of_a_later_whole(tmp_path):
    run = ("dataset=pages_walk", "method=snapkv", "budget=24")
    done(tmp_path / "rows", *run, f"samples={ONE}")
    alone = responses(tmp_path / "rows")
    assert {sample for _, sample in alone} == {ONE} and all(row["chosen"] for row in alone.values())
    whole = done(tmp_path / "rows", *run, "limit=6")
    assert whole.generated == 5 and "their ids" not in whole.out
    done(tmp_path / "other", *run, "limit=6")
    every, other = responses(tmp_path / "rows"), responses(tmp_path / "other")
    assert {key: row["token_ids"] for key, row in every.items()} == {
        key: row["token_ids"] for key, row in other.items()
    }
    assert sum(row["chosen"] is not None for row in every.values()) == 2 == len(alone)
