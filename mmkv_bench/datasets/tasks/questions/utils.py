"""What the YAML files of this folder call: the rows of English documents with several questions, their prompt and score."""

from __future__ import annotations


def read(folder, config):
    """Write the documents of `questions_<task>`; no folder is needed."""
    import datasets

    from mmkv_bench.datasets.tasks.questions.rows import COUNTS, rows

    task = config["task"].removeprefix("questions_")
    return {split: datasets.Dataset.from_list(list(rows(task, split))) for split in COUNTS}


def doc_to_text(doc):
    """The document, then its question."""
    return doc["context"] + doc["questions"][doc["question_number"]]


def doc_to_messages(doc):
    """The prompt as one user message."""
    return [{"role": "user", "content": [{"type": "text", "text": doc_to_text(doc)}]}]


def process_results(doc, results):
    """1 where the answer is the expected one; a full stop at its end is left out."""
    return {"exact_match": float(results[0].strip().removesuffix(".") == doc["answer"].removesuffix("."))}


def read_pages(folder, config):
    """List the pages of `pages_questions` and their questions; no folder is needed, and none is drawn yet."""
    import datasets

    from mmkv_bench.datasets.tasks.questions import pages

    return {split: datasets.Dataset.from_list(pages.rows(split)) for split in pages.COUNTS}


def page(doc):
    """The page, drawn."""
    from mmkv_bench.datasets.tasks.questions import pages

    return [pages.image(doc["split"], doc["number"])]


def page_question(doc):
    """The question alone: the embedded model was trained on images followed by the question."""
    return doc["questions"][doc["question_number"]]


def page_results(doc, results):
    """1 where the answer is the expected one, character for character."""
    return {"exact_match": float(results[0] == doc["answer"])}
