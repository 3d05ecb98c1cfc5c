"""What the YAML files of this folder call."""

from __future__ import annotations

from mmkv_bench.datasets.tasks.longbench import metrics
from mmkv_bench.datasets.tasks.longbench.reading import read_task
from mmkv_bench.datasets.tasks.longbench.subtasks import subtask

GUARD = "\u2060"  # no white space to str.strip, and in no answer


class KeepSpace:
    """A filter that puts a mark around answers: lmms-eval strips white space off them, and a line of code begins with it."""

    def apply(self, resps, docs):
        return [[f"{GUARD}{text}{GUARD}" for text in row] for row in resps]


def read(folder, config):
    """The task's documents out of its released file; see `reading`."""
    return read_task(folder, config["task"])


def doc_to_text(doc):
    """The prompt: the template with the document's context and input in it."""
    return doc["template"].replace("{input}", doc["input"]).replace("{context}", doc["context"])


def doc_to_messages(doc):
    """The prompt as one user message."""
    return [{"role": "user", "content": [{"type": "text", "text": doc_to_text(doc)}]}]


def doc_to_target(doc):
    """The first reference answer."""
    return doc["answers"][0]


def process_results(doc, results):
    """The task's metric under its own name, the best over the reference answers."""
    task = subtask(doc["task"])
    return {f"longbench_{task.scorer}": metrics.score(task.scorer, results[0].strip(GUARD), doc, task.first_line)}
