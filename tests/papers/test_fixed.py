"""Promise: a row is judged by margins that its own commit holds, and by none that came later or that nobody knows of."""

from __future__ import annotations

import pytest

from mmkv_bench.config.files import reference_dir
from mmkv_bench.papers import margins
from mmkv_bench.papers.margins import versions, why_unjudged
from tests.papers.test_filled_table import MODEL, add, cell, page
from tests.papers.words import text
from tests.tables.examples import Example, zeros_and_ones


@pytest.mark.slow
def test_a_row_is_judged_by_the_version_that_its_commit_holds(tmp_path, monkeypatch):
    """93 of 320 is what is printed; only the commit changes."""
    now = (reference_dir() / "margins.yaml").read_text(encoding="utf-8")
    assert "version: 2\n" in now and [one.version for one in versions()] == [1, 2] and not versions()[-1].measured
    texts = {
        "a" * 40: now,
        "b" * 40: now.replace("version: 2\n", ""),
        "c" * 40: "",
        "d" * 40: now.replace("margin: 1.0", "margin: 9.0"),
    }
    monkeypatch.setattr(margins, "file_in_commit", lambda file, commit: texts.get(commit))
    monkeypatch.setattr(margins, "why_unjudged", why_unjudged)
    why_unjudged.cache_clear()
    said = {str(commit)[0]: why_unjudged(commit) for commit in (*texts, "e" * 40, None)}
    shown = {}
    for commit in ("a" * 40, "e" * 40):
        example = Example()
        add(example, "flashcache", "0.2", zeros_and_ones(93, 320), given={"gamma": 0.1}, model=MODEL)
        example.cells[0]["git_commit"] = commit
        one = cell(page(example.write(tmp_path / commit)), "cutoff_gamma=0.1")
        shown[commit[0]] = text(one).partition("] ")[2]
    why_unjudged.cache_clear()
    old = "is older than version 2 of the margins"
    assert said["a"] == "" and old in said["b"] and old in said["c"]
    assert "has other margins of version 2" in said["d"]
    assert said["N"] == "it is unknown which margins its commit (none) had"
    assert shown["a"].startswith("agrees")
    assert shown["e"].startswith("not comparable: it is unknown which margins its commit (eeeeeeeeeeee) had *")
