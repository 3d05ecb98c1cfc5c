"""From a dataset node of the configuration to a `TaskSpec`. Imports neither lmms-eval nor any data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.evaluation.contract import TaskSpec
from mmkv_bench.evaluation.page_tasks import PAGE_TASKS, SIZES, SPLITS, lmms_eval_name

KEYS = (
    "task",
    "size",
    "split",
    "count",
    "generation",
    "metrics",
    "offline",
    "dataset_path",
    "include_path",
    "cluster_key",
)

# Every answer is decoded greedily; a task's YAML and then the configuration may say otherwise, and what the engine
# cannot do it refuses. 128 is what lmms-eval's chat models take where a task names no length.
GENERATION_DEFAULTS: dict[str, Any] = {"max_new_tokens": 128, "until": [], "do_sample": False}


def spec_from_config(name: str, node: Mapping[str, Any]) -> TaskSpec:
    """The dataset `name` of the configuration, whose node (see conf/dataset/) is a mapping with the keys of `KEYS`.

    Raises ConfigError for an unknown key, pages task, size or split, for a missing task name and for bad counts.
    """
    unknown = [key for key in node if key not in KEYS]
    if unknown:
        raise ConfigError(f"datasets.{name}.{unknown[0]} is not a setting of a dataset; {nearest(unknown[0], KEYS)}")
    task = node.get("task")
    if not task:
        example = f"datasets.{name}.task=docvqa_val"
        raise ConfigError(f"datasets.{name}.task is empty; name an lmms-eval task, for example {example}")
    common = {
        "count": _positive(f"datasets.{name}.count", node.get("count")),
        "generation": dict(node.get("generation") or {}),
        "metrics": tuple(node.get("metrics") or ()),
        "offline": bool(node.get("offline", True)),
        "dataset_path": node.get("dataset_path"),
        "include_path": node.get("include_path"),
        "cluster_key": node.get("cluster_key"),
    }
    if task not in PAGE_TASKS:
        return TaskSpec(name=task, dataset=task if name == "lmms_eval" else name, split=node.get("split"), **common)
    size = _one_of(f"datasets.{name}.size", node.get("size") or "small", SIZES)
    split = _one_of(f"datasets.{name}.split", node.get("split") or "test", SPLITS)
    if common["dataset_path"]:
        raise ConfigError(f"datasets.{name}.dataset_path is set, but {task} makes its own data; remove dataset_path")
    lmms_eval = lmms_eval_name(task, size)
    dataset = lmms_eval if split == "test" else f"{lmms_eval}_{split}"  # sizes and splits never share a table
    return TaskSpec(name=lmms_eval, dataset=dataset, size=size, split=split, **common)


def limited(spec: TaskSpec, limit: int | None) -> int | None:
    """How many samples a run of at most `limit` takes; None = all. Raises ConfigError unless limit is None or >= 1."""
    limit = _positive("limit", limit)
    counts = [number for number in (limit, spec.count) if number is not None]
    return min(counts) if counts else None


def _positive(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{name}={value!r} is not a number of samples; give an integer of at least 1, or null for all"
        )
    return value


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known; {nearest(str(value), allowed)}")
    return value
