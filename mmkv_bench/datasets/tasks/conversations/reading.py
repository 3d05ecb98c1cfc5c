"""Conversations in LLaVA's format, and the parts of them that papers measure perplexity on.

The released files are JSON lists of

    {"id": str | int, "image": "coco/train2017/000000000009.jpg",
     "conversations": [{"from": "human", "value": "<image>\\nquestion"}, {"from": "gpt", "value": "answer"}, ...]}

A document is one answer: its question, the rounds before it and the image of the conversation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.datasets.tasks.files import as_split, find, load_records, media_name
from mmkv_bench.errors import DataError

if TYPE_CHECKING:
    import datasets

COLUMNS = {
    "sample_id": "string",
    "conversation": "string",
    "image": "string",
    "turns": "string[]",  # question, answer, ..., question: what stands before the answer
    "answer": "string",
}
SPEAKERS = ("human", "gpt")
SAMPLE, SEED = 1000, 0

Rounds = list[tuple[str, str]]


def description(folder: Path) -> dict[str, datasets.Dataset]:
    """LLaVA-Description: the 1,000 detailed descriptions of Elastic-Cache (detail_1k.json), or as many drawn with seed 0
    from LLaVA-Instruct's detail_23k.json, which are not the same ones."""
    file = find(folder, ("detail_1k.json", "detail_23k.json"), "the file of LLaVA-Description")
    chosen = [(name, _of_coco(image), rounds) for name, image, rounds in _conversations(file) if len(rounds) == 1]
    return _documents(file, chosen if file.name == "detail_1k.json" else _draw(chosen), "one question and answer")


def multi_round(folder: Path) -> dict[str, datasets.Dataset]:
    """Conversations of more than seven rounds whose answers have more than 300 words together: 1,000, drawn with seed 0.

    Every round is a document, with the rounds before it as they stand in the data.
    """
    file = find(folder, ("lvis_instruct4v_220k.json",), "the file of LVIS-Instruct4V")
    chosen = [entry for entry in _conversations(file) if len(entry[2]) > 7 and _answer_words(entry[2]) > 300]
    return _documents(file, _draw(chosen), "more than seven rounds and 300 words")


def long_text(folder: Path) -> dict[str, datasets.Dataset]:
    """All captions of ShareGPT4V with at least 300 words."""
    file = find(folder, ("sharegpt4v_instruct_gpt4-vision_cap100k.json",), "the file of ShareGPT4V")
    chosen = [entry for entry in _conversations(file) if len(entry[2]) == 1 and _answer_words(entry[2]) >= 300]
    return _documents(file, chosen, "an answer of at least 300 words")


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "llava_description": description,
    "multi_round": multi_round,
    "long_text_vqa": long_text,
}


def _conversations(file: Path) -> Iterator[tuple[str, str, Rounds]]:
    """(id, image, rounds) of each conversation about an image."""
    for position, record in enumerate(load_records(file, ("id", "conversations"))):
        if record.get("image"):
            rounds = _rounds(record["conversations"], file, position)
            yield str(record["id"]), media_name(record["image"], file, position), rounds


def _of_coco(image: str) -> str:
    """LLaVA-Instruct names pictures of COCO's train2017 without their folder."""
    return image if "/" in image else f"coco/train2017/{image}"


def _rounds(turns: Sequence[Mapping[str, Any]], file: Path, position: int) -> Rounds:
    try:
        speakers, texts = [turn["from"] for turn in turns], [str(turn["value"]) for turn in turns]
    except (KeyError, TypeError) as error:
        raise DataError(f"sample {position} of {file} has a turn without {error}; give the released file") from error
    if not turns or len(turns) % 2 or speakers != [*SPEAKERS] * (len(turns) // 2):
        raise DataError(f"sample {position} of {file} is no alternation of human and gpt; give the released file")
    return list(zip(texts[::2], texts[1::2], strict=True))


def _answer_words(rounds: Rounds) -> int:
    return sum(len(answer.split()) for _, answer in rounds)


def _draw(chosen: list) -> list:
    """At most 1,000, in the file's order, the same in every process."""
    if len(chosen) <= SAMPLE:
        return chosen
    return [chosen[i] for i in sorted(random.Random(SEED).sample(range(len(chosen)), SAMPLE))]


def _documents(file: Path, chosen: Sequence[tuple[str, str, Rounds]], wanted: str) -> dict[str, datasets.Dataset]:
    if not chosen:
        raise DataError(f"{file} has no conversation about an image with {wanted}; give the released file")
    rows = [
        {
            "sample_id": f"{name}/{number}" if len(rounds) > 1 else name,
            "conversation": name,
            "image": image,
            "turns": [text for pair in rounds[:number] for text in pair] + [question],
            "answer": answer,
        }
        for name, image, rounds in chosen
        for number, (question, answer) in enumerate(rounds)
    ]
    return as_split(rows, COLUMNS, "test")
