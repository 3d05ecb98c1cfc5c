"""Promise: a report links the receipts of its cells, and is made again over one that has some."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.config.files import conf_dir
from mmkv_bench.diagnostics.receipt import receipt, receipts_of
from mmkv_bench.diagnostics.remade_answers import EQUAL, draw
from mmkv_bench.report.build import build_report
from mmkv_bench.tables.deployment import deployment_tables

ROWS = conf_dir().parent / "results" / "tiny" / "large"


@pytest.mark.slow
def test_the_page_of_a_verified_cell_links_its_receipt_and_others_say_how_to_get_one(tmp_path):
    drawn = draw([ROWS], 1, 0)
    for one in drawn:
        one.compared, one.outcome, one.scores_again = ["status", "answer", "scores"], EQUAL, one.scores
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(receipt(drawn, 0)))
    receipts = receipts_of([file], [ROWS])
    for _ in range(2):
        build_report([ROWS], tmp_path / "report", 1, receipts)
    cell = drawn[0].row["cell"]
    pages = {page.stem: page.read_text() for page in (tmp_path / "report" / "cells").glob("*.html")}
    assert "1 of 1 answers" in pages[f"0-{cell}"] and (tmp_path / "report/receipts/0-receipt.json").is_file()
    assert [name for name, text in pages.items() if "../receipts/" in text] == [f"0-{cell}"]
    assert all(f"{name[2:]} --all --receipt" in text for name, text in pages.items() if name != f"0-{cell}")


def test_timed_passes_have_a_page_with_what_the_command_prints(tmp_path):
    passes = ROWS.with_name("efficiency")
    build_report([passes], tmp_path / "report", 1)
    page = (tmp_path / "report" / "passes.html").read_text()
    for table in deployment_tables(passes):
        cells = [cell.text for grid in table.grids for row in grid.cells for cell in row]
        assert table.title in page and all(f">{text}" in page for text in cells)
    figures = {file.stem for file in (tmp_path / "report" / "figures").glob("passes-*.js")}
    assert figures == {"passes-tpot_s", "passes-ttft_s", "passes-peak_total"}
    assert 'href="passes.html"' in (tmp_path / "report" / "index.html").read_text()
