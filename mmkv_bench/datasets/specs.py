"""One dataset of a run: `TaskSpec`, made of a dataset node of the configuration. Imports neither lmms-eval nor any data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmkv_bench.datasets import fixtures
from mmkv_bench.datasets.local_data import media_root
from mmkv_bench.datasets.page_tasks import PAGE_TASKS, SIZES, SPLITS, lmms_eval_name, page_task
from mmkv_bench.errors import ConfigError, MissingDataError, nearest


@dataclass(frozen=True)
class TaskSpec:
    """One dataset of a run. Made by `specs.spec_from_config` from `conf/dataset/<name>.yaml`.

    name          lmms-eval task, for example `pages_walk_small` or `docvqa_val`
    dataset       our name of it, as rows and tables show it; for pages it tells size and split
    size          `small` or `large` for pages, None for any other task
    split         split of the data; None takes the one the task's YAML names
    count         samples the dataset has (pages), None = as many as it holds
    generation    generation settings of the config; they win over the task's YAML (see `generation_settings`)
    metrics       per-sample metrics whose mean over samples is this dataset's headline, () = whatever the task gives
    offline       no connection to a hub is tried
    dataset_path  a local folder (parquet files or save_to_disk) that replaces the data source of the task's YAML
    include_path  a folder with tasks of one's own in lmms-eval's YAML format; its names go before lmms-eval's
    measures      what is measured besides the task's metrics: `ppl` of the reference answer, `self_rouge` against
                  answers of full sampled at temperature 0.2, `continuation`: fidelity and ppl at the reference's tokens
    placeholders  what the word <image> in the task's text is: `interleave` (an image stands there), `remove` (nothing:
                  images stay before the text), None (text like any other; `keep` in the configuration)
    media_root    local folder that stands for $HF_HOME where a task expects its videos; None = $HF_HOME itself
    fixture       the data are small ones of our own making, so that scores mean nothing
    columns       columns of the data that the task reads; data without one of them are refused
    cluster_key   document field whose value groups samples for intervals; None: samples with equal media
    context_key   document field whose text a prompt without visual tokens is cut behind (`Protocol.cuts`); None: such
                  protocols refuse these prompts
    questions_key document field with the texts of all questions about a sample's document, or whose equal values make samples
                  ask about one document; for protocols that know other
                  questions (`Protocol.needs_questions`); None: they refuse the dataset
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
        """The data are our own pages, made locally, and not another lmms-eval task's."""
        return self.size is not None

    @property
    def needs_reference(self) -> bool:
        """Something is measured at the tokens of the reference answer."""
        return not {"ppl", "continuation"}.isdisjoint(self.measures)

    @property
    def is_mix(self) -> bool:
        """Its samples are of several kinds, so a score has one metric over all and one per kind."""
        return self.is_pages and len(PAGE_TASKS[page_task(self.name)[0]]) > 1

    def sample_id(self, doc_id: int) -> str:
        """The name of the sample at a position of the dataset, from 0; pages have names of their own (`page_data.named`)."""
        return f"{self.dataset}-{doc_id:06d}"

    def key(self) -> str:
        """Canonical text of what decides the samples; equal keys share loaded data."""
        source = (self.name, self.dataset, self.size, self.split, self.dataset_path, self.include_path)
        questions = [self.questions_key] if self.questions_key else []
        return json.dumps([*source, self.cluster_key, self.media_root, self.placeholders, *questions])


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
    "context_key",
    "questions_key",
    "measures",
    "placeholders",
    "about",
)
MEASURES = ("ppl", "self_rouge", "continuation")
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
    use = _one_of(f"datasets.{name}.placeholders", str(node.get("placeholders") or "keep"), PLACEHOLDERS)
    common: dict[str, Any] = {
        "count": _positive(f"datasets.{name}.count", node.get("count")),
        "generation": dict(node.get("generation") or {}),
        "metrics": tuple(node.get("metrics") or ()),
        "offline": bool(node.get("offline", True) or node.get("dataset_path")),
        "dataset_path": node.get("dataset_path"),
        "include_path": node.get("include_path"),
        "cluster_key": node.get("cluster_key"),
        "context_key": node.get("context_key"),
        "questions_key": node.get("questions_key"),
        "measures": tuple(_one_of(f"datasets.{name}.measures", m, MEASURES) for m in node.get("measures") or ()),
        "placeholders": None
        if use == "keep"
        else use,  # a dataset without the setting and one that says `keep` are the same
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


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known; {nearest(str(value), allowed)}")
    return value
