"""What the YAML files of this folder call: documents of the English tasks, their prompt and their score."""

from __future__ import annotations

COUNTS = {"test": 500, "dev": 200}


def read(folder, config):
    """Write the documents of `english_<task>[_4k]`, one question each; no folder is needed.

    `english_<task>_question` are the questions without documents: what the model answers from the question alone.
    """
    import datasets

    from mmkv_bench.datasets.tasks.english.documents import document

    task, _, kind = config["task"].removeprefix("english_").partition("_")
    alone = kind == "question"
    splits = {}
    for split, count in COUNTS.items():
        rows = []
        for number in range(count):
            text = document(task, split, number, "1k" if alone or not kind else kind)
            question, answer = text.questions[0]
            context = "" if alone else text.context
            rows.append(
                {"document": f"{split}-{number:06d}", "context": context, "question": question, "answer": answer}
            )
        splits[split] = datasets.Dataset.from_list(rows)
    return splits


def doc_to_text(doc):
    """The document, then its question."""
    from mmkv_bench.datasets.tasks.english.documents import prompt

    return prompt(doc["context"], doc["question"]).lstrip()


def doc_to_messages(doc):
    """The prompt as one user message."""
    return [{"role": "user", "content": [{"type": "text", "text": doc_to_text(doc)}]}]


def process_results(doc, results):
    """1 where the answer is the expected one; a full stop at its end is left out."""
    return {"exact_match": float(results[0].strip().removesuffix(".") == doc["answer"].removesuffix("."))}
