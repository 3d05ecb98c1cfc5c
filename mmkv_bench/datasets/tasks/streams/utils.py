"""What the YAML files of this folder call: facts of streams of boards, their prompt and score."""

from __future__ import annotations


def read(folder, config):
    """List the streams of a task and their questions; no folder is needed, and none is drawn yet."""
    import datasets

    from mmkv_bench.datasets.tasks.streams import boards

    return {split: datasets.Dataset.from_list(boards.rows(config["task"], split)) for split in boards.COUNTS}


def doc_to_visual(doc):
    """The boards, drawn."""
    from mmkv_bench.datasets.tasks.streams import boards

    return boards.images(doc["task"], doc["split"], doc["number"])


def doc_to_text(doc):
    """The question alone: the embedded model was trained on images followed by the question."""
    return doc["questions"][doc["question_number"]]


def process_results(doc, results):
    """1 where the answer is the expected one, over all facts and under the fact's kind: `now` or its age."""
    right = float(results[0] == doc["answer"])
    return {"exact_match": right, f"exact_match_{doc['kind']}": right}
