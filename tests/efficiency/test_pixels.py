"""Promise: `pixels` is timed as the full cache of a prompt of as many tokens as its budget, in the line of the prompt that was
asked for."""

from __future__ import annotations

import pytest

from mmkv_bench.cli.main import main
from mmkv_bench.store.store import Store
from mmkv_bench.tables.cost_rows import split_costs
from mmkv_bench.tables.costs import cost_tables
from tests.run.setting import done

ASKED = ("scenario=efficiency", "method=pixels", "lengths=[160]", "repeats=1", "new_tokens=3")
TOKEN = 2 * 4 * 2 * 32 * 4  # K and V, layers, KV heads, channels, float32


@pytest.mark.full
def test_pixels_holds_and_reads_its_budget_beside_full_of_the_same_shape(tmp_path):
    outcome = done(tmp_path, *ASKED, "prompts=image", "budget=60%")
    assert "pixels@60%" in outcome.out
    rows = [row for row in Store(tmp_path).timings().to_pylist() if row["phase"] == "decode"]
    assert {row["prompt_tokens"] for row in rows} == {160} and len({row["visual_tokens"] for row in rows}) == 1
    assert {row["bytes_useful_step"] for row in rows} == {161 * TOKEN, 97 * TOKEN}
    (table,) = cost_tables(tmp_path, split_costs(["bytes_useful_step", "tpot_s", "peak"])[1])
    entry = table.entries["pixels", "0.6"]["bytes_useful_step"]
    assert (entry.value, entry.ratio) == (97 * TOKEN, 97 / 161)


def test_budgets_without_a_place_for_a_picture_and_prompts_of_text_are_refused(tmp_path, capsys):
    for words, why in (
        (("prompts=text", "budget=60%"), "method pixels needs visual tokens"),
        (("prompts=image", "budget=8"), "which is too short for a picture"),
    ):
        assert main(["model.device=cpu", f"out={tmp_path}", *ASKED, *words]) == 2
        assert why in capsys.readouterr().err
