"""What the YAML file of this folder calls."""

from __future__ import annotations

from mmkv_bench.datasets.rouge import rouge_l


def doc_to_messages(doc):
    """The question, a line break, and the image behind it."""
    content = [{"type": "text", "text": f"{doc['question']}\n"}, {"type": "image", "url": doc["image"]}]
    return [{"role": "user", "content": content}]


def doc_to_visual(doc):
    """The question's image."""
    return [doc["image"]]


def process_results(doc, results):
    """ROUGE-L against the reference answer, 0 to 1. The paper's own measures are made beside it: see `measures`."""
    return {"rouge_l_reference": rouge_l(results[0], doc["answer"])}
