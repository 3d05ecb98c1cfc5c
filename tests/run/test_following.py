"""A tracker is told of every cell's answers and failures, and of times that are the cell's own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from mmkv_bench.run import following
from mmkv_bench.run.following import Following

PART = SimpleNamespace(
    dataset="pages",
    cells=[SimpleNamespace(cell="c0", label="full"), SimpleNamespace(cell="c1", label="snapkv@16")],
)
# Three samples: one is answered by both cells, of which one failed.
STATUSES = np.array([[0, -1, -1], [1, -1, -1]], np.int8)
STANDING = SimpleNamespace(answered=lambda part: STATUSES >= 0, statuses=lambda part: STATUSES)


def row(cell: str, **more) -> dict:
    return {"cell": cell, "status": "ok", "measured": "own", "ttft_s": None, "tpot_s": None, "n_tokens": 4, **more}


def test_cells_are_counted_from_what_is_stored_and_own_times_stand_under_them(monkeypatch):
    monkeypatch.setattr(following, "EVERY", 1e9)
    for measured in ("own", "group"):
        told = []
        follow = Following(PART, STANDING, 2, SimpleNamespace(log=told.append))
        follow._told = 0.0  # told a moment ago
        more = {"measured": measured}
        follow.add([row("c0", ttft_s=1.0, peak_resident_bytes=7, **more), row("c1", ttft_s=2.0, **more)])
        failed = row("c1", status="oom", n_tokens=None, **more)
        follow.add([row("c0", ttft_s=3.0, tpot_s=0.5, peak_resident_bytes=5, **more), failed])
        assert [{name for name in one if name.count("/") > 1} == set() for one in told] == [True, False]
        cells = {name: value for name, value in told[-1].items() if name.count("/") > 1}
        assert cells == {
            "pages/full/answers": 3,
            "pages/full/failures": 0,
            "pages/snapkv@16/answers": 3,
            "pages/snapkv@16/failures": 2,
        } | (
            {
                "pages/full/ttft_s": 2.0,
                "pages/full/tpot_s": 0.5,
                "pages/full/peak_resident_bytes": 7,
                "pages/snapkv@16/ttft_s": 2.0,
            }
            if measured == "own"
            else {}
        )
        assert told[-1]["pages/n_tokens"] == 4 and told[-1]["pages/failed"] == 0.5
