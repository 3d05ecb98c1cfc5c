"""`python -m mmkv_bench.datasets.freeze`: draw all test pages and write the digests that every later load is held to.

To be run when the pages were changed on purpose, before any method has seen them.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor

from mmkv_bench.datasets import page_data
from mmkv_bench.datasets.page_tasks import DEFAULT_COUNT, PAGE_TASKS, SIZES, lmms_eval_name


def chunk_digest(name: str, number: int) -> str:
    """Content digest (hex) of one chunk of the test split, drawn anew."""
    return page_data.content_digest([page_data.to_row(one) for one in page_data.chunk_samples(name, "test", number)])


def main() -> None:
    """Write frozen_pages.json beside this file."""
    from tqdm import tqdm

    names = [lmms_eval_name(task, size) for task in PAGE_TASKS for size in SIZES]
    numbers = range(-(-DEFAULT_COUNT // page_data.CHUNK))
    frozen: dict[str, list[str]] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name in tqdm(names, unit="task"):
            frozen[name] = list(pool.map(chunk_digest, [name] * len(numbers), numbers))
    page_data.FROZEN.write_text(json.dumps(frozen, indent=1) + "\n")


if __name__ == "__main__":
    main()
