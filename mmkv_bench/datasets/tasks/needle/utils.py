"""What the YAML file of this folder calls."""

from __future__ import annotations

from mmkv_bench.datasets.tasks.needle import metrics
from mmkv_bench.datasets.tasks.needle.haystack import read_grid


def read(folder, config):
    """One document for each length and depth; see `haystack`."""
    return read_grid(folder)


def doc_to_text(doc):
    """The book with the needle in it, then the question."""
    return f"Here is a long book: <book> {doc['context']} </book>\nGo by what the book says. {doc['question']}\nAnswer:"


def doc_to_messages(doc):
    """The prompt as one user message."""
    return [{"role": "user", "content": [{"type": "text", "text": doc_to_text(doc)}]}]


def process_results(doc, results):
    """How much of the needle the answer's first line has."""
    answer = metrics.first_line(results[0])
    return {
        "needle_recall": metrics.recall(answer, doc["answer"]),
        "needle_rouge1": metrics.rouge1(answer, doc["needle"]),
    }
