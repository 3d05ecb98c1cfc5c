"""Promise: each number of the README's table leads to the cell that scored it, and both are what the rows say."""

from __future__ import annotations

import re

from mmkv_bench.store.store import Store
from tools.cells_page import PAGE, README, ROOT, ROWS


def test_each_linked_number_is_the_score_of_its_cell():
    linked = re.findall(r"\[(\d\.\d\d)\]\[([0-9a-f]{8})\]", (ROOT / README).read_text())
    table = Store(ROOT / ROWS).metrics().to_pylist()
    scores = {row["cell"][:8]: row["value"] for row in table if row["metric"] == "exact_match"}
    page = (ROOT / PAGE).read_text()
    assert len(linked) == 32 and len({cell for _, cell in linked}) == 29
    for number, cell in linked:
        assert number == f"{scores[cell]:.2f}" and f'<a id="{cell}">' in page
        assert f"[{cell}]: {PAGE.as_posix()}#{cell}" in (ROOT / README).read_text()
    assert set(re.findall(r'<a id="([0-9a-f]{8})">', page)) == set(scores)
