"""Made-up rows have no commit; here they count as made under the margins of today, unless a test says otherwise."""

from __future__ import annotations

import pytest

from mmkv_bench.papers import margins


@pytest.fixture(autouse=True)
def rows_without_a_commit_are_judged(monkeypatch):
    known = margins.why_unjudged
    monkeypatch.setattr(margins, "why_unjudged", lambda commit: "" if commit is None else known(commit))
