"""Functions that the YAML files of this folder call."""

from __future__ import annotations

from mmkv_bench.datasets.tasks.milebench import metrics, prompt
from mmkv_bench.datasets.tasks.milebench.reading import read as read_folder
from mmkv_bench.datasets.tasks.milebench.subtasks import subtask


def read(folder, config):
    """Read the sub-task's data from a local folder; see `reading`."""
    return read_folder(folder, config["task"])


def doc_to_messages(doc):
    """Return one user turn that alternates text and images."""
    return prompt.messages(doc)


def doc_to_visual(doc):
    """Return the images, in the order of the text."""
    return doc["images"]


def doc_to_text(doc):
    """Return the prompt with <image> at each image's position, for models that take images and text separately."""
    return prompt.PLACEHOLDER.sub("<image>", prompt.text(doc))


def process_results(doc, results):
    """Return the metrics of an answer, each from 0 to 1, by the sub-task's scorer."""
    return metrics.scores(subtask(doc["task"]).scorer, results[0], doc)
