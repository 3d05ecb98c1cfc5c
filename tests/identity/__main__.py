"""Run cases and say how they ended; see the package."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from mmkv_bench import file_state
from tests.identity.fuzz import fuzz

given = argparse.ArgumentParser(description=__doc__)
given.add_argument("--seed", type=int, default=0)
given.add_argument("--cases", type=int, default=300)
asked = given.parse_args()
file_state.SETTLED_NS = -1  # files count as settled the moment they are written, as in another second
with tempfile.TemporaryDirectory() as folder:
    ended = fuzz(Path(folder), asked.seed, asked.cases, report=True)
print(
    f"{asked.cases} cases, seed {asked.seed}: {', '.join(f'{n} {word}' for word, n in sorted(ended.items()))}, 0 silent"
)
