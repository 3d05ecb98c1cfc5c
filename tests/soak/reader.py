"""The reader: through the public API into the newest store of a folder, again and again."""

from __future__ import annotations

import collections
import json
import os
import re
import signal
import time
from pathlib import Path

from mmkv_bench.errors import ConfigError
from mmkv_bench.store.store import Store

_SHARE = 4  # one second in so many is spent reading: the run that is read needs the machine


def read(folder: Path) -> None:
    """Read until `stop` lies in the folder, or who started this is gone; prints what it met as one line of JSON."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for who started this
        signal.signal(number, signal.SIG_IGN)
    met: collections.Counter[str] = collections.Counter()
    most: dict[str, int] = {}
    parent = os.getppid()
    while not (folder / "stop").exists() and os.getppid() == parent:
        began = time.monotonic()
        stores = sorted(path for path in folder.glob("round*") if path.is_dir())
        for root in stores[-1:]:
            met["polls"] += 1
            try:
                _poll(root, most, met)
            except ConfigError as early:  # no rows yet, or none that is scored
                told = str(early).replace(f"'{root}'", "the store").split(":")[0]
                met["early: " + re.sub(r"\d+", "N", told)] += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                met[f"WRONG: {type(error).__name__}: {str(error).replace(str(root), root.name)}"] += 1
        time.sleep(max(0.2, (_SHARE - 1) * (time.monotonic() - began)))
    print(json.dumps(met))


def _poll(root: Path, most: dict[str, int], met: collections.Counter[str]) -> None:
    from mmkv_bench import load_rows, make_table
    from mmkv_bench.tables.status import status

    def told(count: int) -> None:
        assert count >= most.get(root.name, 0), f"{count} answers where there were {most[root.name]}"
        most[root.name] = count

    told(sum(each.rows for each in status(Store(root)).datasets))
    met["counts"] += 1
    rows = load_rows(root)
    told(len(rows.responses))
    assert len(rows.samples) >= 0 <= len(rows.metrics)
    met["rows"] += 1
    str(make_table(root))
    met["tables"] += 1
