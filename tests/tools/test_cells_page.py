"""Promise: each number of the README's tables leads to the cell that scored it, and both are what the rows say."""

from __future__ import annotations

import re

from mmkv_bench.store.store import Store
from tools.cells_page import README, ROOT, ROWS


def test_each_linked_number_is_the_score_of_its_cell():
    readme = (ROOT / README).read_text()
    leads = dict(re.findall(r"(?m)^\[([0-9a-f]{8})\]: (\S+)/cells\.md#\1$", readme))
    assert len(re.findall(r"(?m)^\[[0-9a-f]{8}\]:", readme)) == len(leads), (
        "each reference stands once, on a line of its own"
    )
    linked = re.findall(r"\[(\d\.\d\d)\]\[([0-9a-f]{8})\]", readme)
    assert {cell for _, cell in linked} == {*leads} and {*leads.values()} == {*ROWS}
    for rows in ROWS:
        table = Store(ROOT / rows).metrics().to_pylist()
        scores = {row["cell"][:8]: row["value"] for row in table if row["metric"] == "exact_match"}
        page = (ROOT / rows / "cells.md").read_text()
        of_rows = [(number, cell) for number, cell in linked if leads[cell] == rows]
        assert len(of_rows) >= 14
        for number, cell in of_rows:
            assert number == f"{scores[cell]:.2f}" and f'<a id="{cell}">' in page
        assert set(re.findall(r'<a id="([0-9a-f]{8})">', page)) == set(scores)
