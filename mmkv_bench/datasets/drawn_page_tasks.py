"""The pages tasks (drawn documents for the embedded model), with each task's question kinds in order. Imports nothing heavy."""

from __future__ import annotations

# task -> kinds of mmkv_bench.tiny.pages; sample i of a task is of kind i modulo the number of kinds, so that every
# prefix of a mix is balanced and a larger limit never changes earlier samples
PAGE_TASKS: dict[str, tuple[str, ...]] = {
    "pages": (
        *("lookup", "walk3", "chain3", "mi_lookup", "mi_walk3"),
        *("handwritten", "redundant_lookup", "redundant_walk3"),
    ),
    "pages_lookup": ("lookup",),
    "pages_walk": ("walk3",),
    "pages_chain": ("chain3",),
    "pages_multi_image": ("mi_lookup", "mi_walk3"),
    "pages_handwritten": ("handwritten",),
    "pages_redundant": ("redundant_lookup", "redundant_walk3"),
}
SIZES = ("small", "large")
SPLITS = ("test", "dev")
DEFAULT_COUNT = 500


def lmms_eval_name(task: str, size: str) -> str:
    """Return the name of the lmms-eval task (and of its YAML file) for a pages task at a size."""
    return f"{task}_{size}"


def page_task(name: str) -> tuple[str, str]:
    """Split an lmms-eval task name into pages task and size: `pages_walk_small` -> (`pages_walk`, `small`)."""
    task, _, size = name.rpartition("_")
    if task not in PAGE_TASKS or size not in SIZES:
        raise KeyError(name)
    return task, size


def place(task: str, position: int) -> tuple[str, int]:
    """Return kind and index of the sample at `position` (from 0) of a pages task; samples of one kind are indexed from 0."""
    kinds = PAGE_TASKS[task]
    return kinds[position % len(kinds)], position // len(kinds)
