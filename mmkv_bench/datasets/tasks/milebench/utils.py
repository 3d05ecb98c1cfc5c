"""What the YAML files of this folder call."""

from __future__ import annotations

from mmkv_bench.datasets.tasks.milebench import metrics, prompt
from mmkv_bench.datasets.tasks.milebench.reading import read as read_folder
from mmkv_bench.datasets.tasks.milebench.subtasks import subtask


def read(folder, config):
    """The sub-task's data out of a local folder; see `reading`."""
    return read_folder(folder, config["task"])


def doc_to_messages(doc):
    """Text and images in turn."""
    return prompt.messages(doc)


def doc_to_visual(doc):
    """The images, in the order of the text."""
    return doc["images"]


def doc_to_text(doc):
    """The prompt of models that take images and text apart, with <image> where each stands."""
    return prompt.PLACEHOLDER.sub("<image>", prompt.text(doc))


def process_results(doc, results):
    """Metrics of an answer, each from 0 to 1, by the sub-task's scorer."""
    return metrics.scores(subtask(doc["task"]).scorer, results[0], doc)
