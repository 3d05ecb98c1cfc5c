"""Functions that the YAML file of this folder calls."""

from __future__ import annotations

from mmkv_bench.datasets.rouge import rouge_l


def doc_to_messages(doc):
    """Return one user turn: the question, a line break, then the image."""
    content = [{"type": "text", "text": f"{doc['question']}\n"}, {"type": "image", "url": doc["image"]}]
    return [{"role": "user", "content": content}]


def doc_to_visual(doc):
    """Return the question's image."""
    return [doc["image"]]


def process_results(doc, results):
    """Return ROUGE-L against the reference answer, 0 to 1. `measures` adds the paper's own measures."""
    return {"rouge_l_reference": rouge_l(results[0], doc["answer"])}
