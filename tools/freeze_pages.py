"""Draw the test pages, and the dev pages of a fingerprint, and write their digests: `python -m tools.freeze_pages`.

Every later load compares pages with these digests. Run this tool only if pages were changed on purpose, before any method has
seen them.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product

from mmkv_bench.datasets import page_data
from mmkv_bench.datasets.drawn_page_tasks import DEFAULT_COUNT, PAGE_TASKS, SIZES, lmms_eval_name


def chunk_digest(name: str, split: str, number: int) -> str:
    """Draw one chunk and return the digest (hex) of its content."""
    return page_data.content_digest([page_data.to_row(one) for one in page_data.chunk_samples(name, split, number)])


def main() -> None:
    """Write mmkv_bench/datasets/frozen_pages.json."""
    from tqdm import tqdm

    names = [lmms_eval_name(task, size) for task in PAGE_TASKS for size in SIZES]
    numbers = {"test": range(-(-DEFAULT_COUNT // page_data.CHUNK)), "dev": range(1)}
    frozen: dict[str, list[str]] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for split, name in tqdm([*product(numbers, names)], unit="task"):
            draw = partial(chunk_digest, name, split)
            frozen[page_data.frozen_name(name, split)] = list(pool.map(draw, numbers[split]))
    page_data.FROZEN.write_text(json.dumps(frozen, indent=1) + "\n")


if __name__ == "__main__":
    main()
