"""Functions that the YAML file of this folder calls."""

from __future__ import annotations

from mmkv_bench.datasets.tasks.needle import metrics
from mmkv_bench.datasets.tasks.needle.haystack import read_grid


def read(folder, config):
    """Make one document per length and depth; see `haystack`."""
    return read_grid(folder)


def doc_to_text(doc):
    """Return the prompt: the book with the needle in it, then the question."""
    return f"Here is a long book: <book> {doc['context']} </book>\nGo by what the book says. {doc['question']}\nAnswer:"


def doc_to_messages(doc):
    """Return the prompt as one user message."""
    return [{"role": "user", "content": [{"type": "text", "text": doc_to_text(doc)}]}]


def process_results(doc, results):
    """Score how much of the needle the answer's first line contains."""
    answer = metrics.first_line(results[0])
    return {
        "needle_recall": metrics.recall(answer, doc["answer"]),
        "needle_rouge1": metrics.rouge1(answer, doc["needle"]),
    }
