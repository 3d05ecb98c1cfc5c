"""What the YAML files of this folder call."""

from __future__ import annotations

from mmkv_bench.datasets.rouge import rouge_l
from mmkv_bench.datasets.tasks.conversations.reading import READERS
from mmkv_bench.datasets.tasks.files import picture

PLACEHOLDER = "<image>"


def read(folder, config):
    """The task's documents out of the released file; see `reading`."""
    return READERS[config["task"]](folder)


def doc_to_messages(doc):
    """The conversation up to the question that is to be answered; the image where its placeholder stands.

    A conversation without a placeholder begins with its image, as LLaVA's training code has it.
    """
    turns = list(doc["turns"])
    if not any(PLACEHOLDER in text for text in turns):
        turns[0] = f"{PLACEHOLDER}\n{turns[0]}"
    image = picture(doc["image"])
    return [
        {"role": "assistant" if number % 2 else "user", "content": _parts(text, image)}
        for number, text in enumerate(turns)
    ]


def doc_to_visual(doc):
    """The conversation's image."""
    return [picture(doc["image"])]


def doc_to_text(doc):
    """The last question."""
    return doc["turns"][-1]


def process_results(doc, results):
    """ROUGE-L against the reference answer, 0 to 1. The papers' own measures are made beside it: see `measures`."""
    return {"rouge_l_reference": rouge_l(results[0], doc["answer"])}


def _parts(text, image):
    """Text and image in turn; line breaks beside an image are its template's to set."""
    parts = []
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        if number:
            parts.append({"type": "image", "url": image})
        if piece.strip():
            parts.append({"type": "text", "text": piece.strip("\n")})
    return parts
