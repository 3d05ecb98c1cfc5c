"""What the YAML files of this folder call: English at three lengths, made of what the package has.

`lengths_documentation_<length>` is a stretch of release notes behind stretches of other projects. `lengths_needles_<length>` is
prose with two codes that are asked for and two that are not.
"""

from __future__ import annotations

STRETCHES = {"2k": 2, "8k": 8, "16k": 16}
"""Stretches of 1,024 tokens (SmolLM2's tokenizer) in a document, the one that goes on among them."""
PROSE = {"2k": 6, "8k": 24, "16k": 48}
"""Times 26 sentences of about 13 tokens."""
COUNT = 40


def read(folder, config):
    """Write the documents of one task; no folder is needed."""
    import datasets

    _, kind, length = config["task"].split("_")
    rows = continued(STRETCHES[length]) if kind == "documentation" else hidden(PROSE[length], length)
    return {"test": datasets.Dataset.from_list(rows)}


def continued(stretches: int) -> list[dict]:
    """Return the committed stretches, each behind the nearest ones of other projects, and what follows it."""
    from mmkv_bench.datasets.tasks.documentation import utils

    rows = [*utils.read(None, {})["test"]]
    made = []
    for place, row in enumerate(rows):
        after = [rows[(place + step) % len(rows)] for step in range(1, len(rows))]
        others = [one["context"] for one in after if one["project"] != row["project"]][: stretches - 1]
        context = "\n".join([*others, row["context"]])
        made.append({**{key: row[key] for key in ("document", "project", "continuation")}, "context": context})
    return made


def hidden(size: int, length: str) -> list[dict]:
    """Return documents with four codes, and a question for two of them."""
    from mmkv_bench.datasets.tasks.english.documents import Draw, needles

    made = []
    for number in range(COUNT):
        document = needles(Draw(f"long needles test {length} {number}", "test"), size)
        (first, code), (second, other) = document.questions[:2]
        made.append(
            {
                "document": f"{length}-{number:06d}",
                "context": document.context,
                "question": f"{first} {second}",
                "answer": f"{code} and {other}",
            }
        )
    return made


def doc_to_text(doc):
    """The document, then its question where it has one."""
    from mmkv_bench.datasets.tasks.english.documents import prompt

    return prompt(doc["context"], doc["question"]) if "question" in doc else doc["context"]


def doc_to_messages(doc):
    """The prompt as one user message."""
    return [{"role": "user", "content": [{"type": "text", "text": doc_to_text(doc)}]}]


def begins_alike(doc, results):
    """1 where the document goes on with what was decoded."""
    answer = results[0].strip()
    return {"begins_alike": float(bool(answer) and doc["continuation"].startswith(answer))}


def codes_given(doc, results):
    """Share of the two codes that the answer has."""
    codes = doc["answer"].split(" and ")
    return {"codes_given": sum(code in results[0] for code in codes) / len(codes)}
