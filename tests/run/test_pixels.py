"""Promise: `pixels` stands in a run beside methods, with rows of its own prefills, whether cells share prefills or not."""

from __future__ import annotations

import pytest

from tests.run.setting import done, responses

COMMAND = ("method=[snapkv,pixels]", "budget=[60%,2]", "dataset=pages_lookup", "limit=1")


@pytest.mark.full
def test_pixels_is_a_method_like_others_in_rows_and_tables(tmp_path):
    outcome = done(tmp_path, *COMMAND)
    assert "| pixels" in outcome.out and "pixels_over_budget" in outcome.out
    rows = {(row["method"], row["budget"]): row for row in _told(tmp_path)}
    own, full = rows["pixels", "0.6"], rows["full", ""]
    assert own["context_tokens"] == full["context_tokens"] and own["bytes_full"] == full["bytes_full"]
    assert 0 < own["entries_resident"] <= own["entries_asked"] < full["entries_resident"]
    assert own["bytes_held"] < full["bytes_held"]
    assert own["fork_group"] != full["fork_group"] == rows["snapkv", "0.6"]["fork_group"]
    assert rows["pixels", "2"]["fallback"] == ["pixels_over_budget"]
    assert done(tmp_path, *COMMAND).generated == 0, "nothing is missing"
    alone = tmp_path / "alone"
    done(alone, *COMMAND, "sharing=off")
    names = ("token_ids", "kept", "entries_asked", "bytes_full", "bytes_device", "fallback", "context_tokens")
    for row, other in zip(_told(tmp_path), _told(alone), strict=True):
        if row["method"] == "pixels":
            assert {name: row[name] for name in names} == {name: other[name] for name in names}


def _told(root) -> list[dict]:
    """Rows with method and budget, in their order."""
    from mmkv_bench.store.store import Store

    cells = {row["cell"]: row for row in Store(root).cells().to_pylist()}
    found = []
    for row in responses(root).values():
        cell = cells[row["cell"]]
        budget = cell["budget_fraction"] or str(cell["budget_entries"] or "")
        found.append(row | {"method": cell["method"], "budget": budget})
    return sorted(found, key=lambda row: (row["method"], row["budget"]))
