"""A process that writes what is missing: `writer_child.py ROOT WORKER SAMPLES PUBLISH_EVERY CELL...`.

Resumes as a run does, and says `ack <sample>` only after commit has returned.
"""

from __future__ import annotations

import os
import sys

from store_examples import response

from mmkv_bench.store.store import Store

CELLS = ("c0", "c1")


def write_missing(
    root: str, worker: str, samples: int, every: int, cells: tuple[str, ...] = CELLS, ack: int = 1
) -> None:
    """`ack` is the file descriptor that hears of commits."""
    store = Store(root)
    store.recover()
    done = store.done(cells)
    with store.writer(worker, publish_every=every) as writer:
        for sample in range(samples):
            missing = [cell for cell in cells if f"s{sample:04d}" not in done[cell]]
            if missing:
                writer.commit([response(sample, cell=cell) for cell in missing])
                os.write(ack, f"ack s{sample:04d}\n".encode())


if __name__ == "__main__":
    write_missing(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), tuple(sys.argv[5:]))
