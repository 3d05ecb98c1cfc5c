"""What the YAML files of this folder call: documents for the reader, drawn when their prompt is made, and their score."""

from __future__ import annotations

COUNTS = {"test": 500, "dev": 200}
FPS = 2
"""Frames per second that ready frames have here (generation/video_inputs.py); the reader's videos have one."""


def read(folder, config):
    """List the samples of `reader_<task>`; no folder is needed, and no picture is drawn yet."""
    import datasets

    from mmkv_bench.reader.documents import as_text
    from mmkv_bench.reader.trials import trial

    task = config["task"].removeprefix("reader_")
    splits = {}
    for split, count in COUNTS.items():
        rows = []
        for number in range(count):
            made = trial(task, split, number)
            rows.append(
                {
                    "document": f"{split}-{made.paper.form}-{number:06d}",
                    "task": task,
                    "split": split,
                    "number": number,
                    "form": made.paper.form,
                    "context": as_text(made.paper) + "\n\n" if task == "text" else "",
                    "turns": [text for turn in made.turns for text in turn][:-1],
                    "answer": made.turns[-1][1],
                }
            )
        splits[split] = datasets.Dataset.from_list(rows)
    return splits


def doc_to_visual(doc):
    """The pages as images, or the frames of one video."""
    from PIL import Image

    from mmkv_bench.reader.trials import pictures

    if doc["task"] == "text":
        return []
    images = [Image.fromarray(one) for one in pictures(doc["task"], doc["split"], doc["number"])]
    return [[image for image in images for _ in range(FPS)]] if doc["form"] == "video" else images


def doc_to_messages(doc):
    """The document with its first question, and for a second one the first's answer before it."""
    kind = "video" if doc["form"] == "video" else "image"
    shown = [{"type": kind, "url": medium} for medium in doc_to_visual(doc)]
    messages = []
    for place, text in enumerate(doc["turns"]):
        parts = [{"type": "text", "text": text if place else doc["context"] + text}]
        messages.append({"role": "assistant" if place % 2 else "user", "content": [*(() if place else shown), *parts]})
    return messages


def doc_to_text(doc):
    """The last question, behind the document where it is spelled out."""
    return doc["context"] + doc["turns"][-1]


def process_results(doc, results):
    """1 where the answer is the expected one."""
    return {"exact_match": float(results[0].strip() == doc["answer"])}
