"""`TaskSpec`, one dataset of a run, and its construction from the configuration. Imports neither lmms-eval nor any data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmkv_bench.datasets import fixtures
from mmkv_bench.datasets.drawn_page_tasks import PAGE_TASKS, SIZES, SPLITS, lmms_eval_name, page_task
from mmkv_bench.datasets.local_data import media_root
from mmkv_bench.errors import ConfigError, MissingDataError, nearest


@dataclass(frozen=True)
class TaskSpec:
    """One dataset of a run. `spec_from_config` makes it from `conf/dataset/<name>.yaml`.

    name          lmms-eval task, for example `pages_walk_small` or `docvqa_val`
    dataset       the dataset's name in rows and tables; for pages it includes size and split
    size          `small` or `large` for pages, None for any other task
    split         split of the data; None takes the split that the task's YAML names
    count         number of samples (pages); None: all samples of the data
    generation    generation settings of the configuration; they override the task's YAML (see `generation_settings`)
    metrics       per-sample metrics whose mean over samples is this dataset's headline; (): all metrics of the task
    offline       no connection to a hub is tried
    dataset_path  a local folder (parquet files or save_to_disk) that replaces the data source of the task's YAML
    include_path  a folder with the user's tasks in lmms-eval's YAML format; its names take precedence over lmms-eval's
    measures      measures besides the task's metrics: `ppl` of the reference answer, `self_rouge` against
                  answers of full sampled at temperature 0.2, `continuation`: fidelity and ppl at the reference's tokens
    placeholders  what happens to <image> in the task's text: `interleave` (an image takes its place), `remove` (it is
                  deleted; images stay before the text), None (it stays as text; `keep` in the configuration)
    media_root    local folder that replaces $HF_HOME, where a task expects its videos; None: $HF_HOME itself
    fixture       the data are small and made by this project, so scores mean nothing
    columns       columns of the data that the task reads; data without one of these columns are refused
    cluster_key   document field whose value groups samples for intervals; None: samples with equal media form a group
    context_key   document field; a prompt without visual tokens is cut after this field's text (`Protocol.cuts`); None:
                  protocols that cut refuse such prompts
    questions_key document field with the texts of all questions about a sample's document, or a field whose equal values mark
                  the samples of one document. Protocols that need other questions read it (`Protocol.needs_questions`);
                  None: such protocols refuse the dataset
    """

    name: str
    dataset: str
    size: str | None = None
    split: str | None = None
    count: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    offline: bool = True
    dataset_path: str | None = None
    include_path: str | None = None
    cluster_key: str | None = None
    context_key: str | None = None
    questions_key: str | None = None
    measures: tuple[str, ...] = ()
    placeholders: str | None = None
    media_root: str | None = None
    fixture: bool = False
    columns: tuple[str, ...] = ()

    @property
    def is_pages(self) -> bool:
        """Tell whether the data are this project's pages, which are rendered on this machine."""
        return self.size is not None

    @property
    def needs_reference(self) -> bool:
        """Tell whether one of the dataset's measures uses the tokens of the reference answer."""
        return not {"ppl", "continuation"}.isdisjoint(self.measures)

    @property
    def is_mix(self) -> bool:
        """Tell whether the samples are of several kinds. Then there is one metric over all samples, and one per kind."""
        return self.is_pages and len(PAGE_TASKS[page_task(self.name)[0]]) > 1

    def sample_id(self, doc_id: int) -> str:
        """Return the id of the sample at position `doc_id` (from 0); pages have other ids (`page_data.named`)."""
        return f"{self.dataset}-{doc_id:06d}"

    def key(self) -> str:
        """Return a text of the fields that determine the samples. Specs with equal keys share loaded data."""
        source = (self.name, self.dataset, self.size, self.split, self.dataset_path, self.include_path)
        questions = [self.questions_key] if self.questions_key else []
        return json.dumps([*source, self.cluster_key, self.media_root, self.placeholders, *questions])


KEYS = (
    *("task", "size", "split", "count", "generation", "metrics", "offline", "dataset_path", "folder", "include_path"),
    *("cluster_key", "context_key", "questions_key", "measures", "placeholders", "about"),
)
MEASURES = ("ppl", "self_rouge", "continuation")
PLACEHOLDERS = ("interleave", "remove", "keep")
ANY_TASK = "lmms_eval"  # conf/dataset/lmms_eval.yaml runs any task; its dataset has the task's name
FIXTURE_SUFFIX = "_fixture"  # fixtures never share a table with real data

# Defaults: greedy decoding. A task's YAML overrides them, and the configuration overrides both; the engine refuses
# settings that it does not support. lmms-eval's chat models also decode 128 tokens if a task names no length.
GENERATION_DEFAULTS: dict[str, Any] = {"max_new_tokens": 128, "until": [], "do_sample": False}


def spec_from_config(name: str, node: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> TaskSpec:
    """Make the `TaskSpec` of the dataset `name` of the configuration.

    Args:
        node: as in conf/dataset/<name>.yaml, with the keys of `KEYS`.
        data: `source` (upstream or fixture) and `root` (folder of local datasets) of the configuration; None: the source
            that each task names. Pages need no data source, and `dataset_path` in `node` overrides both.

    Raises:
        ConfigError: a setting is unknown, the task name is missing, a count is not positive, or the dataset has no
            fixture. MissingDataError: data.root has no folder of this dataset.
    """
    unknown = [key for key in node if key not in KEYS]
    if unknown:
        raise ConfigError(f"datasets.{name}.{unknown[0]} is not a setting of a dataset; {nearest(unknown[0], KEYS)}")
    task = node.get("task")
    if not task:
        example = f"datasets.{name}.task=docvqa_val"
        raise ConfigError(f"datasets.{name}.task is empty; name an lmms-eval task, for example {example}")
    placeholder_mode = _one_of(f"datasets.{name}.placeholders", str(node.get("placeholders") or "keep"), PLACEHOLDERS)
    copied_keys = ("dataset_path", "include_path", "cluster_key", "context_key", "questions_key")
    common: dict[str, Any] = {key: node.get(key) for key in copied_keys} | {
        "count": _positive(f"datasets.{name}.count", node.get("count")),
        "generation": dict(node.get("generation") or {}),
        "metrics": tuple(node.get("metrics") or ()),
        "offline": bool(node.get("offline", True) or node.get("dataset_path")),
        "measures": tuple(_one_of(f"datasets.{name}.measures", m, MEASURES) for m in node.get("measures") or ()),
        "placeholders": None
        if placeholder_mode == "keep"
        else placeholder_mode,  # `keep` equals leaving the setting out
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
        raise ConfigError(f"datasets.{name}.dataset_path is set, but {task} makes its data itself; remove dataset_path")
    lmms_eval = lmms_eval_name(task, size)
    dataset = lmms_eval if split == "test" else f"{lmms_eval}_{split}"  # sizes and splits never share a table
    return TaskSpec(name=lmms_eval, dataset=dataset, size=size, split=split, **common)


def _source(name: str, data: Mapping[str, Any], below: str) -> dict[str, Any]:
    """Return the fields of `TaskSpec` that locate a dataset's local data; {} if the task reads from the hub.

    below: the dataset's folder below `data.root`.
    """
    if data.get("source") == "fixture":
        folder = fixtures.folder(name)
    elif data.get("root"):
        folder = Path(data["root"]).expanduser() / below
        if not folder.is_dir():
            raise MissingDataError(
                f"data.root={data['root']} has no folder {below}; put the dataset's files into {folder}, or remove "
                f"data.root to use the upstream source (see python -m mmkv_bench data check {name})"
            )
    else:
        return {}
    local = {"dataset_path": str(folder), "media_root": media_root(folder), "offline": True}
    return local | {"fixture": data.get("source") == "fixture"}


def limited(spec: TaskSpec, limit: int | None) -> int | None:
    """Return how many samples a run reads from a dataset with the run's `limit`; None: all.

    Raises ConfigError: `limit` is neither None nor >= 1.
    """
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
        raise ConfigError(f"{name}={value!r} is unknown; {nearest(str(value), allowed)}")
    return value
