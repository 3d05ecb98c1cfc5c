"""What the YAML files of this folder call: data of the pages tasks, their prompt and their score."""

from __future__ import annotations

from functools import partial


def __getattr__(name: str):
    """`!function utils.pages_walk_small` in a YAML file is the loader of that task's test pages."""
    from mmkv_bench.datasets.drawn_page_tasks import page_task

    try:
        page_task(name)
    except KeyError:
        raise AttributeError(name) from None
    return partial(load_pages, name)


def load_pages(name: str, positions):
    """The test pages at the given positions, with images and questions.

    positions: a `datasets.Dataset` with the column `position`, rows of positions.jsonl (0, 1, 2, ...).
    lmms-eval calls this as a task's `process_docs`; the harness gives the task its documents itself.
    """
    from mmkv_bench.datasets.page_data import load

    return load(name, "test", len(positions))


def doc_to_visual(doc):
    """The page's images, in reading order."""
    return doc["images"]


def doc_to_text(doc):
    """The question alone: the embedded model was trained on images followed by the question."""
    return doc["question"]


def doc_to_target(doc):
    """The expected answer."""
    return doc["answer"]


def exact_match(doc, results):
    """1 when the answer is the expected text, character for character; lmms-eval strips white space around it."""
    return {"exact_match": float(results[0] == doc["answer"])}


def exact_match_by_kind(doc, results):
    """The same for a mix of kinds: once over all samples and once under the name of the sample's kind."""
    score = float(results[0] == doc["answer"])
    return {"exact_match": score, f"exact_match_{doc['kind']}": score}
