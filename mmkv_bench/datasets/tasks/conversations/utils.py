"""Functions that the YAML files of this folder call."""

from __future__ import annotations

from mmkv_bench.datasets.rouge import rouge_l
from mmkv_bench.datasets.tasks.conversations.reading import READERS
from mmkv_bench.datasets.tasks.files import picture

PLACEHOLDER = "<image>"


def read(folder, config):
    """Read the task's documents from the released file; see `reading`."""
    return READERS[config["task"]](folder)


def doc_to_messages(doc):
    """Return the conversation up to the last question, with the image in its placeholder's position.

    A conversation without a placeholder begins with its image, as in LLaVA's training code.
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
    """Return the conversation's image."""
    return [picture(doc["image"])]


def doc_to_text(doc):
    """Return the last question."""
    return doc["turns"][-1]


def process_results(doc, results):
    """Return ROUGE-L against the reference answer, 0 to 1. `measures` adds the papers' own measures."""
    return {"rouge_l_reference": rouge_l(results[0], doc["answer"])}


def _parts(text, image):
    """Split a text into text and image parts; line breaks beside an image are left to the chat template."""
    parts = []
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        if number:
            parts.append({"type": "image", "url": image})
        if piece.strip():
            parts.append({"type": "text", "text": piece.strip("\n")})
    return parts
