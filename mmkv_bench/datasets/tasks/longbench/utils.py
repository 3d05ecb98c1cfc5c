"""Functions that the YAML files of this folder call."""

from __future__ import annotations

from mmkv_bench.datasets.tasks.longbench import metrics
from mmkv_bench.datasets.tasks.longbench.reading import read_task
from mmkv_bench.datasets.tasks.longbench.subtasks import subtask

GUARD = "\u2060"  # a character that str.strip keeps and that no answer has


class KeepSpace:
    """A filter that puts marks around answers, because lmms-eval strips white space, with which a line of code may begin."""

    def apply(self, resps, docs):
        return [[f"{GUARD}{text}{GUARD}" for text in row] for row in resps]


def read(folder, config):
    """Read the task's documents from the released file; see `reading`."""
    return read_task(folder, config["task"])


def doc_to_text(doc):
    """Return the prompt: the template with the document's context and input filled in."""
    return doc["template"].replace("{input}", doc["input"]).replace("{context}", doc["context"])


def doc_to_messages(doc):
    """Return the prompt as one user message."""
    return [{"role": "user", "content": [{"type": "text", "text": doc_to_text(doc)}]}]


def doc_to_target(doc):
    """Return the first reference answer."""
    return doc["answers"][0]


def process_results(doc, results):
    """Return the task's metric under the metric's name, the best over the reference answers."""
    task = subtask(doc["task"])
    return {f"longbench_{task.scorer}": metrics.score(task.scorer, results[0].strip(GUARD), doc, task.first_line)}
