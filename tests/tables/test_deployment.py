"""The deployment table: measured passes beside forecasts, each with its source, and the score lost of rows that match."""

from __future__ import annotations

import pytest

from mmkv_bench.tables.build import build
from mmkv_bench.tables.deployment import (
    COUNTED,
    LEAST,
    MOST,
    Estimate,
    deployment_table,
    deployment_tables,
    measured_options,
    score_losses,
)
from mmkv_bench.tables.formats import write
from mmkv_bench.tables.stored_rows import load
from tests.tables.test_cost_figures import scored
from tests.tables.test_costs import STEPS, timed


@pytest.mark.slow
def test_measured_lines_have_their_repeats_and_the_score_lost_where_rows_match(tmp_path):
    score, speed = scored(tmp_path / "score"), timed(tmp_path / "speed", STEPS)
    (short, long) = deployment_tables(speed, score_losses(build(load(score)), score))
    assert [table.title for table in (short, long)] == ["text prompts of 32 tokens", "text prompts of 64 tokens"]
    (grid,) = long.grids
    assert grid.header[:6] == ["method", "budget", "batch", "ms/token", "tokens/s", "speed-up"] and grid.labels == 3
    full, few = (dict(zip(grid.header, row, strict=True)) for row in grid.cells)
    (lost,) = (head for head in grid.header if head.endswith(" lost"))
    assert (full["method"].text, full["budget"].text, full["batch"].text, full[lost].text) == (
        "full",
        "all",
        "2",
        "of 0.95",
    )
    assert few["ms/token"].value == pytest.approx(100) and full["ms/token"].value == pytest.approx(300)
    assert few["speed-up"].value == pytest.approx(3) and few["peak KiB"].value == pytest.approx(100 * 64 / 1024)
    assert few[lost].value == pytest.approx(0.95 - 0.6) and few[lost].interval.startswith("[")
    text = write([long], "md")
    assert "no sign: measured" in text and "forecast" not in text and "over the same 20 samples" in text


def test_forecasts_carry_a_sign_and_a_measured_number_stands_before_them(tmp_path):
    """And the loss of a method that no row has at this budget is not guessed."""
    ((setting, measured),) = list(measured_options(timed(tmp_path / "speed", STEPS)).items())[1:]
    bound = {"step_s": Estimate(0.001, LEAST), "tokens_s": Estimate(2000, MOST), "nbytes": Estimate(1e4, COUNTED)}
    full, few = measured.options
    other = type(few)((*few.key[:2], "keydiff", *few.key[3:]), "keydiff", "0.1", 2, **bound)
    options = [full, few.over(other), other]
    score = scored(tmp_path / "score")
    losses = score_losses(build(load(score)), score)
    rows = deployment_table(setting, options, losses, memory=2**30).grids[0].rows
    texts = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in rows]
    assert texts[1][3:5] == ["100", "15"] and texts[2][3:5] == ["≥ 1", "≤ 2000"] and texts[2][6] == "~9.77"
    assert texts[2][-1] == "0.50"
    unknown = [type(other)((*other.key[:-1], "entries 7"), "keydiff", "7", 2, **bound), few]
    assert deployment_table(setting, unknown, losses).grids[0].rows[0][-1].text == "-"
    sources = {(one["method"], one["name"]): one["source"] for one in deployment_table(setting, options).records()}
    assert sources["snapkv", "step_s"] == "measured" and sources["keydiff", "nbytes"] == COUNTED
