"""From a dataset node of the configuration to a `TaskSpec`. Imports neither lmms-eval nor any data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmkv_bench.datasets import fixtures
from mmkv_bench.datasets.local_data import media_root
from mmkv_bench.datasets.page_tasks import PAGE_TASKS, SIZES, SPLITS, lmms_eval_name
from mmkv_bench.datasets.task_spec import TaskSpec
from mmkv_bench.errors import ConfigError, MissingDataError, nearest

KEYS = (
    "task",
    "size",
    "split",
    "count",
    "generation",
    "metrics",
    "offline",
    "dataset_path",
    "folder",
    "include_path",
    "cluster_key",
    "measures",
    "placeholders",
    "about",
)
MEASURES = ("ppl", "self_rouge")
PLACEHOLDERS = ("interleave", "remove", "keep")
ANY_TASK = "lmms_eval"  # the dataset of conf/dataset/lmms_eval.yaml, which is named after its task
FIXTURE_SUFFIX = "_fixture"  # small data of our own making never share a table with the real ones

# Every answer is decoded greedily; a task's YAML and then the configuration may say otherwise, and what the engine
# cannot do it refuses. 128 is what lmms-eval's chat models take where a task names no length.
GENERATION_DEFAULTS: dict[str, Any] = {"max_new_tokens": 128, "until": [], "do_sample": False}


def spec_from_config(name: str, node: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> TaskSpec:
    """The dataset `name` of the configuration.

    Args:
        node: as in conf/dataset/<name>.yaml, with the keys of `KEYS`.
        data: `source` (upstream or fixture) and `root` (folder of local datasets) of the configuration; None = where
            each task says. Pages make their own data, and a dataset's own `dataset_path` goes before both.

    Raises:
        ConfigError: a setting that is not known, a missing task name, bad counts, a dataset
            without a fixture. MissingDataError: data.root without a folder of this dataset.
    """
    unknown = [key for key in node if key not in KEYS]
    if unknown:
        raise ConfigError(f"datasets.{name}.{unknown[0]} is not a setting of a dataset; {nearest(unknown[0], KEYS)}")
    task = node.get("task")
    if not task:
        example = f"datasets.{name}.task=docvqa_val"
        raise ConfigError(f"datasets.{name}.task is empty; name an lmms-eval task, for example {example}")
    common: dict[str, Any] = {
        "count": _positive(f"datasets.{name}.count", node.get("count")),
        "generation": dict(node.get("generation") or {}),
        "metrics": tuple(node.get("metrics") or ()),
        "offline": bool(node.get("offline", True) or node.get("dataset_path")),
        "dataset_path": node.get("dataset_path"),
        "include_path": node.get("include_path"),
        "cluster_key": node.get("cluster_key"),
        "measures": tuple(_one_of(f"datasets.{name}.measures", m, MEASURES) for m in node.get("measures") or ()),
        "placeholders": _placeholders(name, node.get("placeholders")),
        "columns": tuple((node.get("about") or {}).get("columns") or ()),
    }
    if task not in PAGE_TASKS:
        label = task if name == ANY_TASK else name
        if common["dataset_path"]:
            common["media_root"] = media_root(Path(common["dataset_path"]).expanduser())
        else:
            common |= _source(label, data or {}, node.get("folder") or label)
        dataset = label + FIXTURE_SUFFIX * common.get("fixture", False)
        return TaskSpec(name=task, dataset=dataset, split=node.get("split"), **common)
    size = _one_of(f"datasets.{name}.size", node.get("size") or "small", SIZES)
    split = _one_of(f"datasets.{name}.split", node.get("split") or "test", SPLITS)
    if common["dataset_path"]:
        raise ConfigError(f"datasets.{name}.dataset_path is set, but {task} makes its own data; remove dataset_path")
    lmms_eval = lmms_eval_name(task, size)
    dataset = lmms_eval if split == "test" else f"{lmms_eval}_{split}"  # sizes and splits never share a table
    return TaskSpec(name=lmms_eval, dataset=dataset, size=size, split=split, **common)


def _source(name: str, data: Mapping[str, Any], below: str) -> dict[str, Any]:
    """The fields of a spec that say where the data of dataset `name` lie; none for its own source, normally the hub.

    below: the dataset's folder under data.root.
    """
    if data.get("source") == "fixture":
        folder = fixtures.folder(name)
    elif data.get("root"):
        folder = Path(data["root"]).expanduser() / below
        if not folder.is_dir():
            raise MissingDataError(
                f"data.root={data['root']} has no folder {below}; put that dataset's files into {folder}, or remove "
                f"data.root for its own source (python -m mmkv_bench data check {name} names it)"
            )
    else:
        return {}
    local = {"dataset_path": str(folder), "media_root": media_root(folder), "offline": True}
    return local | {"fixture": data.get("source") == "fixture"}


def limited(spec: TaskSpec, limit: int | None) -> int | None:
    """Number of samples of a run of at most `limit`; None: all. Raises ConfigError unless limit is None or >= 1."""
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


def _placeholders(name: str, value: Any) -> str | None:
    """None for `keep`, so that a dataset without the setting and one that says it are the same."""
    meaning = _one_of(f"datasets.{name}.placeholders", str(value or "keep"), PLACEHOLDERS)
    return None if meaning == "keep" else meaning


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known; {nearest(str(value), allowed)}")
    return value
