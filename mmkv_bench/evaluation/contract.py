"""What evaluation hands to the rest of the project and takes back. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from mmkv_bench.evaluation.page_tasks import PAGE_TASKS, page_task

if TYPE_CHECKING:
    from PIL import Image


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
                  answers of full sampled at temperature 0.2
    placeholders  what the word <image> in the task's text is: `interleave` (an image stands there), `remove` (nothing:
                  images stay before the text), None (text like any other; `keep` in the configuration)
    media_root    local folder that stands for $HF_HOME where a task expects its videos; None = $HF_HOME itself
    fixture       the data are small ones of our own making, so that scores mean nothing
    columns       columns of the data that the task reads; data without one of them are refused
    cluster_key   document field whose value groups samples for intervals; None: samples with equal media
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
    measures: tuple[str, ...] = ()
    placeholders: str | None = None
    media_root: str | None = None
    fixture: bool = False
    columns: tuple[str, ...] = ()

    @property
    def is_pages(self) -> bool:
        """Whether the data are our own pages, made locally, and not another lmms-eval task's."""
        return self.size is not None

    @property
    def is_mix(self) -> bool:
        """Whether the samples are of several kinds, so that a score has one metric over all and one per kind."""
        return self.is_pages and len(PAGE_TASKS[page_task(self.name)[0]]) > 1

    def key(self) -> str:
        """Canonical text of what decides the samples; equal keys share loaded data."""
        source = (self.name, self.dataset, self.size, self.split, self.dataset_path, self.include_path)
        return json.dumps([*source, self.cluster_key, self.media_root, self.placeholders])


class SampleRef(NamedTuple):
    """A sample, named without loading its images. doc_id is its position in the dataset, from 0."""

    doc_id: int
    sample_id: str
    cluster: str
    kind: str | None  # pages: the question's task (lookup, walk3, ...); None for other datasets


@dataclass
class Request:
    """One question as lmms-eval asks it.

    messages     Hugging Face chat format: a list of {"role", "content": [{"type": "text", "text"} | {"type": "image"} |
                 {"type": "video"}]}; each placeholder stands for the next entry of `images` or `videos`
    images       RGB images in the order of their placeholders
    videos       in the order of their placeholders: a path, {"video": path, "start_time", "end_time"} in seconds with
                 either or both times, or frames; sampled where the prompt is encoded (generation/video_inputs.py)
    generation   max_new_tokens (int), until (list of stop strings), do_sample (False), and what the task adds
    prompt_hash  sha256 over the messages' text, the pixels of the images and the content of video files; "" when they
                 cannot be read
    error        why the sample's images or videos cannot be read; messages and media are empty then. None otherwise
    reference    the dataset's reference answer, which `ppl` is measured on; None where there is none
    """

    dataset: str
    sample_id: str
    doc_id: int
    cluster: str
    kind: str | None
    messages: list[dict[str, Any]]
    images: list[Image.Image]
    videos: list[Any]
    generation: dict[str, Any]
    prompt_hash: str
    error: str | None = None
    reference: str | None = None


@dataclass(frozen=True)
class Answer:
    """A stored answer: its text (None when there is none), the sample's status and the prompt it answers."""

    text: str | None
    status: str
    doc_id: int
    prompt_hash: str


class SampleScore(NamedTuple):
    """One metric of one sample. value is None when the sample's status is not `ok`.

    parts: what a metric that is no mean over samples is aggregated from (see tables/known.py), of an empty answer when
    the status is not `ok`; None for means.
    """

    sample_id: str
    cluster: str
    metric: str
    value: float | None
    status: str
    parts: tuple[float, ...] | None = None


class JudgedBy(NamedTuple):
    """Who judged a metric: the model's id, the hash of the prompts (None: unknown) and the temperature (None: several)."""

    model: str
    prompts: str | None
    temperature: float | None


@dataclass
class CellScores:
    """Scores of one cell on one dataset.

    samples    one entry per answered sample and metric, in the order of the dataset
    aggregate  lmms-eval's own aggregates by metric name, on its own scales and with its own guesses for unreadable
               answers; None unless every sample is ok
    reason     why `aggregate` is None; None when it is not
    unaggregated  metric -> why `aggregate` lacks it though it is there
    unscored   metrics that exist only as an aggregate (corpus metrics), so that `samples` has none of them
    judged     metric -> its judge, for metrics with an answer of one
    not_judged metric -> why it is not judged, in all samples or in some: their values and its aggregate are None
    """

    samples: list[SampleScore]
    aggregate: dict[str, float] | None
    reason: str | None
    unscored: tuple[str, ...] = ()
    unaggregated: dict[str, str] = field(default_factory=dict)
    judged: dict[str, JudgedBy] = field(default_factory=dict)
    not_judged: dict[str, str] = field(default_factory=dict)
