"""What calibrations read: pages drawn like those of the training split, never test pages, and where answers stand on them;
or questions of any dataset, which somebody above asks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmkv_bench.errors import CalibrationError, nearest

if TYPE_CHECKING:
    from PIL import Image

    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.models.token_boxes import Box
    from mmkv_bench.tiny.layout import Document


SPLITS = ("train", "dev")
Cell = tuple[int, int, int]
"""Image, row and column of one glyph cell, from 0."""


class Sample(Protocol):
    """What every method can be measured on: a prompt and its true answer ("" where a prompt is all there is)."""

    @property
    def sample_id(self) -> str: ...
    @property
    def images(self) -> Sequence[Any]: ...
    @property
    def videos(self) -> Sequence[Any]: ...
    @property
    def answer(self) -> str: ...
    def messages(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Asked:
    """One question of a dataset, as a run asks it. chat: its messages; answer: the dataset's reference, "" for none."""

    sample_id: str
    chat: list[dict[str, Any]]
    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()
    answer: str = ""

    def messages(self) -> list[dict[str, Any]]:
        return self.chat


@dataclass(frozen=True)
class Questions:
    """Samples of a dataset, asked one after the other by whoever has it.

    Attributes:
        described: which samples of what, in words, for the artefact; settings: what chose them, and the data's checksum.
        each: calls a function with each of them, in the order of the dataset; those of a third argument are left out.
        ids: of the samples, where they are known before a model is loaded; prompt: what shapes their prompts.
    """

    described: str
    each: Callable[..., None]
    settings: Mapping[str, Any] = field(default_factory=dict)
    ids: Sequence[str] = ()
    prompt: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Page:
    """One sample and, per character of its answer, the cells that show it (one per frame of a redundant page).

    grid: rows and columns of cells of every image.
    """

    sample_id: str
    images: list[Image.Image]
    question: str
    answer: str
    sources: tuple[tuple[Cell, ...], ...]
    grid: tuple[int, int]
    videos: tuple[()] = ()

    def messages(self) -> list[dict[str, Any]]:
        """The chat message: the images, then the question."""
        content = [{"type": "image"} for _ in self.images] + [{"type": "text", "text": self.question}]
        return [{"role": "user", "content": content}]


def encoded(loaded: LoadedModel, sample: Sample) -> EncodedPrompt:
    """A sample's prompt as the model reads it. Raises what `generation.encode.encode` raises."""
    from mmkv_bench.generation.encode import encode

    return encode(
        loaded.processor,
        loaded.family,
        sample.sample_id,
        sample.messages(),
        sample.images,
        sample.videos,
        device=loaded.device,
    )


def answer_ids(loaded: LoadedModel, sample: Sample) -> list[int]:
    """Token ids of the true answer.

    Raises:
        CalibrationError: the sample has none.
    """
    ids: list[int] = loaded.tokenizer(sample.answer, add_special_tokens=False)["input_ids"]
    if not ids:
        raise CalibrationError(
            f"sample {sample.sample_id} has no reference answer, which is fed behind its prompt; choose a dataset with "
            "answers, or pages"
        )
    return ids


def pages(kinds: Sequence[str], size: str, split: str, count: int) -> list[tuple[str, str, str, int]]:
    """The first `count` samples of the kinds in turn: arguments of `page`, so that each is drawn when it is read.

    Raises:
        CalibrationError: a test split, no sample.
    """
    if split not in SPLITS:
        raise CalibrationError(f"split={split!r} cannot be calibrated on; {nearest(str(split), SPLITS)}")
    if count < 1:
        raise CalibrationError(f"samples={count} measures nothing; allowed: 1 or more")
    return [(kinds[i % len(kinds)], size, split, i // len(kinds)) for i in range(count)]


def page(kind: str, size: str, split: str, index: int) -> Page:
    """One sample, drawn anew; the same on every machine."""
    from PIL import Image

    from mmkv_bench.tiny.pages import FRAMES, make_page

    document, turn, images = make_page(kind, size, split, index)
    repeats = FRAMES if kind.startswith("redundant_") else 1
    keys = _key_cells(document)
    sources = tuple(
        tuple((keys[key][0] * repeats + frame, keys[key][1], keys[key][2] + offset) for frame in range(repeats))
        for key, offset in turn.sources
    )
    name = f"{kind}-{size}-{split}-{index:06d}"
    shown = [Image.fromarray(image) for image in images]
    return Page(name, shown, turn.question, turn.answer, sources, document.grids.shape[1:])


def _key_cells(document: Document) -> dict[str, Cell]:
    """Where every key stands; a key is the only upper-case letter of its kind in a document."""
    found = {}
    for key in document.entries:
        page, row, column = (int(axis[0]) for axis in (document.grids == ord(key)).nonzero())
        found[key] = (page, row, column)
    return found


def visual_tokens(cells: Sequence[Cell], grid: tuple[int, int], boxes: Sequence[Box | None]) -> list[int]:
    """Numbers (from 0, in prompt order) of the visual tokens that show any part of the given cells.

    A family that gives a page whole and in tiles shows a cell in both, and the tokens of both count. The list is empty
    where the family cuts the cells away (LLaVA-1.5 takes the middle of a page).

    Args:
        cells: of one answer character or several; grid: rows and columns of cells of every image.
        boxes: of every visual token, see `token_boxes`.
    """
    found = set()
    for image, row, column in cells:
        top, bottom = Fraction(row, grid[0]), Fraction(row + 1, grid[0])
        left, right = Fraction(column, grid[1]), Fraction(column + 1, grid[1])
        found |= {
            number
            for number, box in enumerate(boxes)
            if box is not None
            and box.image == image
            and box.top < bottom
            and box.bottom > top
            and box.left < right
            and box.right > left
        }
    return sorted(found)


def passages(tokenizer: Any, path: Path, tokens: int, count: int) -> list[Page]:
    """The first `count` passages of so many tokens, one behind the other, as prompts without images or answers.

    Args:
        path: a file, or a folder whose `*.txt` are read in the order of their names.

    Raises:
        CalibrationError: no text, less of it than asked for, or nothing asked for.
    """
    if tokens < 1 or count < 1:
        raise CalibrationError(f"samples={count} of tokens={tokens} measure nothing; allowed: 1 or more of each")
    ids = tokenizer.encode(read(path), add_special_tokens=False)
    if len(ids) < tokens * count:
        raise CalibrationError(
            f"--text {path} has {len(ids)} tokens and {count} passages of {tokens} need {tokens * count}; give more text, "
            "--samples or --tokens"
        )
    pieces = [tokenizer.decode(ids[start : start + tokens]) for start in range(0, tokens * count, tokens)]
    return [Page(f"text-{number:06d}", [], piece, "", (), (0, 0)) for number, piece in enumerate(pieces)]


def read(path: Path) -> str:
    """All of the text. Raises CalibrationError where there is none."""
    files = [path] if path.is_file() else sorted(path.glob("*.txt"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    if not text.strip():
        raise CalibrationError(f"--text {path} has no text; give a text file, or a folder with *.txt files")
    return text


def described(path: Path, tokens: int) -> str:
    """What an artefact says of the text: its checksum, no path."""
    digest = hashlib.sha256(read(path).encode()).hexdigest()[:16]
    return f"passages of {tokens} tokens, one behind the other, of a text with sha256 {digest}"
