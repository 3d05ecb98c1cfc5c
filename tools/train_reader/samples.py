"""Batches of the training and of its evaluation, rendered by worker processes; a batch depends on its number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mmkv_bench.reader.document_kinds import document
from mmkv_bench.reader.documents import FORMS, Document, Question
from mmkv_bench.reader.draw import split_of
from mmkv_bench.reader.render import draw_document
from mmkv_bench.reader.tokenizer_and_processor import tokenizer_from
from mmkv_bench.reader.trials import trial
from mmkv_bench.reader.typefaces import typefaces
from tools.train_reader.chats import Chat, chat

LENGTH = {"page": 1270, "pages": 2330, "receipt": 800, "video": 2330, "text": 420}
"""About how many tokens a sample has, to choose how many of them make a batch."""
MIX = {"page": 0.46, "receipt": 0.17, "pages": 0.13, "video": 0.16, "text": 0.08}
"""Share of the batches by form; a batch of `text` has more samples than the others."""
TURNS = {"page": 6, "pages": 6, "receipt": 5, "video": 3}
TASKS = {
    "value": ("page", "receipt", "page", "pages"),
    "row": ("page", "pages"),
    "second": ("page", "receipt", "page", "pages"),
    "change": ("video",),
    "text": ("page",),
}
"""Tasks of the evaluation with the forms that they take in turn; `text` is value on the spelled-out page."""


@dataclass(frozen=True)
class Source:
    """What all batches are made from. tokens: of a batch, about; seed: of the documents' numbers; kinds: those of `MIX` used."""

    pack: Path
    fonts: str
    seed: int
    tokens: int
    kinds: tuple[str, ...] = tuple(MIX)

    def words(self) -> Any:
        if self not in _TOKENIZERS:
            _TOKENIZERS[self] = tokenizer_from((self.pack / "tokenizer.json").read_text())
        return _TOKENIZERS[self]


_TOKENIZERS: dict[Source, Any] = {}


def extra_words(words: Any) -> tuple[str, ...]:
    """Return capitalised words of the tokenizer's vocabulary that belong to train, to spell more than the lists have."""
    names = {token.removeprefix("Ġ") for token in words.get_vocab()}
    return tuple(
        sorted(
            n
            for n in names
            if n.isascii() and n.isalpha() and n.istitle() and 3 <= len(n) <= 9 and split_of(n) == "train"
        )
    )


class Pages(Dataset):
    """Batches of the first phase: pictures with their labels, no text. Item i is a batch, whoever asks for it."""

    def __init__(self, source: Source, pages: int):
        self.source, self.pages = source, pages

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        form = ("page", "page", "receipt", "video")[number % 4]
        side, frames = FORMS[form]
        count = max(1, round(self.pages * (448 / side) ** 2 / frames / (2 if form == "video" else 1)))
        pictures, labels = [], []
        faces = typefaces("train", self.source.fonts)
        for place in range(count):
            name = self.source.seed * 10**9 + 5 * 10**8 + number * 1000 + place
            one, marks = draw_document(document("train", name, form), f"train {name}", faces)
            pictures.append(one)
            labels.append(marks)
        return {
            "pixels": torch.from_numpy(np.concatenate(pictures)),
            "labels": torch.from_numpy(np.concatenate(labels)),
        }


class Chats(Dataset):
    """Batches of the second phase: documents with chats of several questions."""

    def __init__(self, source: Source):
        self.source = source

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, number: int) -> dict[str, Any]:
        draw = random.Random(f"batch {self.source.seed} {number}")
        kind = draw.choices(self.source.kinds, [MIX[kind] for kind in self.source.kinds])[0]
        words, text = self.source.words(), kind == "text"
        if not hasattr(self, "_extra"):
            self._extra = extra_words(words)
        samples = []
        for place in range(max(1, self.source.tokens // LENGTH[kind])):
            name = self.source.seed * 10**9 + number * 1000 + place
            form = draw.choice(("page", "page", "receipt")) if text else kind
            paper = document("train", name, form, self._extra)
            turns = training_turns(paper, draw)
            if turns:
                drawn = None if text else draw_document(paper, f"train {name}", typefaces("train", self.source.fonts))
                samples.append((chat(words, paper, turns, text), drawn))
        return collate(samples, kind, words.pad_token_id)


def training_turns(paper: Document, draw: random.Random) -> list[tuple[str, str]]:
    """Choose questions about different entries, in random order; of a video the entry that changes mostly first."""
    if paper.form == "video":
        change = draw.choices(paper.questions[:3], (4, 4, 3))[0]
        rest = [question for question in paper.questions if question.task == "value"]
        chosen = [change, *draw.sample(rest, len(rest))]
        if draw.random() < 0.25:
            chosen = chosen[1:] + chosen[:1]
    else:
        entries: dict[int, list[Question]] = {}
        for question in paper.questions:
            entries.setdefault(question.entry, []).append(question)
        chosen = []
        for questions in entries.values():
            rows = [question for question in questions if question.task == "row"]
            values = [question for question in questions if question.task == "value"]
            chosen.append(rows[0] if rows and draw.random() < 0.4 else draw.choice(values))
        draw.shuffle(chosen)
    return [(question.text, question.answer) for question in chosen[: TURNS[paper.form]]]


class Trials(Dataset):
    """Batches of an evaluation: one counted question a document, `count` a task of a split, tasks in turn."""

    def __init__(self, source: Source, split: str, count: int, tasks: tuple[str, ...] = tuple(TASKS)):
        self.source, self.split = source, split
        self.plan: list[tuple[str, str, list[int]]] = []
        for task in tasks:
            forms = TASKS[task]
            for form in dict.fromkeys(forms):
                numbers = [n for n in range(count) if forms[n % len(forms)] == form]
                size = max(1, source.tokens // LENGTH["text" if task == "text" else form])
                self.plan += [(task, form, numbers[start : start + size]) for start in range(0, len(numbers), size)]
        self.plan.sort(key=lambda part: part[2][0] / count)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, item: int) -> dict[str, Any]:
        task, form, numbers = self.plan[item]
        words, samples = self.source.words(), []
        for number in numbers:
            asked = trial(task, self.split, number, form)
            drawn = None if task == "text" else draw_document(asked.paper, asked.look, typefaces(self.split))
            made = chat(words, asked.paper, asked.turns, task == "text")
            samples.append((Chat(made.ids, made.places[-1:], made.targets[-1:]), drawn))
        return collate(samples, form, words.pad_token_id) | {"task": task, "form": form}


def collate(samples: list[tuple[Chat, Any]], kind: str, pad: int) -> dict[str, Any]:
    """Pad chats on the right and flatten their answers.

    Returns:
        ids (n, length), places and targets (answer tokens of all, places into the flattened ids), answers (number of the answer
        that each of these belongs to), and pixels (pictures, side, side, 3) uint8 with labels (pictures, rows, columns) int16.
    """
    length = -(-max(len(made.ids) for made, _ in samples) // 16) * 16
    ids = torch.full((len(samples), length), pad)
    places, targets, answers, count = [], [], [], 0
    for row, (made, _) in enumerate(samples):
        ids[row, : len(made.ids)] = torch.tensor(made.ids)
        for where, what in zip(made.places, made.targets, strict=True):
            places += [row * length + place for place in where]
            targets += what
            answers += [count] * len(what)
            count += 1
    batch = {
        "kind": kind,
        "ids": ids,
        "places": torch.tensor(places),
        "targets": torch.tensor(targets),
        "answers": torch.tensor(answers),
    }
    if samples[0][1] is not None:
        batch["pixels"] = torch.from_numpy(np.concatenate([drawn[0] for _, drawn in samples]))
        batch["labels"] = torch.from_numpy(np.concatenate([drawn[1] for _, drawn in samples]))
    return batch


def loader(dataset: Dataset, workers: int, start: int = 0) -> DataLoader:
    """Return a loader of whole batches from number `start` on, in order."""
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=range(start, len(dataset)),  # type: ignore[arg-type]
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        worker_init_fn=_one_thread if workers else None,
    )


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)
