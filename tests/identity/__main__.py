"""Run cases, or an outsider's changes, and say how they ended; see the package."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from mmkv_bench import file_state
from tests.identity.fuzz import fuzz
from tests.identity.hunt import Hunt, hunt

given = argparse.ArgumentParser(description=__doc__)
given.add_argument("--seed", type=int, default=0)
given.add_argument("--cases", type=int, default=300, help="changes of one input file, before a run or during it")
given.add_argument("--changes", type=int, default=500, help="of one byte, field or name, in inputs or rows")
asked = given.parse_args()
file_state.SETTLED_NS = -1  # files count as settled the moment they are written, as in another second
for what, run, count in (("cases", fuzz, asked.cases), ("changes", hunt, asked.changes)):
    with tempfile.TemporaryDirectory() as folder:
        ended = run(Hunt(Path(folder)), asked.seed, count, report=True)
    words = ", ".join(f"{n} {word}" for word, n in sorted(ended.items()))
    print(f"{count} {what}, seed {asked.seed}: {words}, 0 silent")
