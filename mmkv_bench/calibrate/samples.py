"""Samples of calibrations: pages with the positions of their answers (never test pages), passages, or dataset questions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from mmkv_bench.errors import CalibrationError, nearest
from mmkv_bench.tiny.pages import FRAMES, make_page

if TYPE_CHECKING:
    from mmkv_bench.families.base import Box
    from mmkv_bench.generation.encode import EncodedPrompt
    from mmkv_bench.models.load import LoadedModel


SPLITS = ("train", "dev")
Cell = tuple[int, int, int]
"""Image, row and column of one glyph, from 0."""


@dataclass(frozen=True)
class PromptSample:
    """One prompt to measure in a calibration: a page, a passage of text or a question of a dataset.

    Attributes:
        messages: chat messages, as a run would ask them.
        answer: the reference answer; "" if there is none.
        sources: of a page, per character of its answer the grid cells that show the character (one per frame of a redundant
            page).
        grid: of a page, the number of rows and columns of grid cells in every image.
    """

    sample_id: str
    messages: list[dict[str, Any]]
    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()
    answer: str = ""
    sources: tuple[tuple[Cell, ...], ...] = ()
    grid: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class PromptSamples:
    """The samples that a calibration measures: pages, passages or questions of a dataset.

    Attributes:
        described: description for the artefact.
        each: function (loaded, take) that calls `take` with each sample, in order. That of a dataset's questions also takes
            `without`, ids of samples to leave out.
        settings: options that selected the samples of a dataset, and the data's checksum.
        ids: ids of the samples, if known before a model is loaded.
        prompt: settings that affect the prompts.
    """

    described: str
    each: Callable[..., None]
    settings: Mapping[str, Any] = field(default_factory=dict)
    ids: Sequence[str] = ()
    prompt: Mapping[str, Any] = field(default_factory=dict)


def chat(question: str, images: int = 0) -> list[dict[str, Any]]:
    """Return a list of one user message: the images, then the question."""
    content = [{"type": "image"} for _ in range(images)] + [{"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def encoded(loaded: LoadedModel, sample: PromptSample, replays: bool = False) -> EncodedPrompt:
    """Return the encoded prompt of a sample. For `replays` and the errors see `generation.encode.encode`."""
    from mmkv_bench.generation.encode import encode

    prompt_parts = sample.sample_id, sample.messages, sample.images, sample.videos
    return encode(loaded.processor, loaded.family, *prompt_parts, device=loaded.device, replays=replays)


def answer_ids(loaded: LoadedModel, sample: PromptSample) -> list[int]:
    """Return the token ids of the reference answer.

    Raises:
        CalibrationError: the sample has no reference answer.
    """
    ids: list[int] = loaded.tokenizer(sample.answer, add_special_tokens=False)["input_ids"]
    if not ids:
        raise CalibrationError(
            f"sample {sample.sample_id} has no reference answer to feed after the prompt; choose a dataset with answers, or "
            "pages"
        )
    return ids


def pages(kinds: Sequence[str], size: str, split: str, count: int) -> list[tuple[str, str, str, int]]:
    """Return the arguments of `page` (kind, size, split, index) for the first `count` samples. The kinds take turns.

    Raises:
        CalibrationError: the split is not allowed, or `count` is less than 1.
    """
    if split not in SPLITS:
        raise CalibrationError(f"split={split!r} cannot be calibrated on; {nearest(str(split), SPLITS)}")
    if count < 1:
        raise CalibrationError(f"samples={count} must be 1 or more; give --samples accordingly")
    return [(kinds[i % len(kinds)], size, split, i // len(kinds)) for i in range(count)]


def page(kind: str, size: str, split: str, index: int) -> PromptSample:
    """Draw one page with its question, as a sample. The page is the same on every machine.

    kind, size, split: of the embedded dataset of pages.
    """
    document, turn, images = make_page(kind, size, split, index)
    frames_per_page = FRAMES if kind.startswith("redundant_") else 1
    sources = []
    for key, offset in turn.sources:  # a document has each upper-case letter at most once as a key
        first_frame, row, column = (int(axis[0]) for axis in (document.grids == ord(key)).nonzero())
        sources.append(
            tuple((first_frame * frames_per_page + frame, row, column + offset) for frame in range(frames_per_page))
        )
    return PromptSample(
        f"{kind}-{size}-{split}-{index:06d}",
        chat(turn.question, len(images)),
        [Image.fromarray(image) for image in images],
        answer=turn.answer,
        sources=tuple(sources),
        grid=document.grids.shape[1:],
    )


def visual_tokens(cells: Sequence[Cell], grid: tuple[int, int], boxes: Sequence[Box | None]) -> list[int]:
    """Return the numbers (from 0, in prompt order) of the visual tokens that show any part of the given grid cells of a
    page.

    If a family encodes a page both whole and in tiles, the tokens of both count. The list is empty if the family crops
    the cells away (LLaVA-1.5 takes the middle of a page).

    Args:
        cells: grid cells of one or more answer characters.
        grid: number of rows and columns of grid cells in every image.
        boxes: the part of the picture that each visual token shows, see `token_boxes`.
    """

    def shows(box: Box, image: int, row: int, column: int) -> bool:
        overlaps_vertically = box.top < Fraction(row + 1, grid[0]) and box.bottom > Fraction(row, grid[0])
        horizontal = box.left < Fraction(column + 1, grid[1]) and box.right > Fraction(column, grid[1])
        return box.image == image and overlaps_vertically and horizontal

    return [number for number, box in enumerate(boxes) if box is not None and any(shows(box, *cell) for cell in cells)]


def passages(tokenizer: Any, path: Path, tokens: int, count: int) -> list[PromptSample]:
    """Cut a text into passages of `tokens` tokens, and return the first `count` as prompts without images and answers.

    path: see `read`.

    Raises:
        CalibrationError: the text is missing or too short, or `tokens` or `count` is less than 1.
    """
    if tokens < 1 or count < 1:
        raise CalibrationError(
            f"samples={count} and tokens={tokens} must both be 1 or more; give --samples and --tokens"
        )
    ids = tokenizer.encode(read(path), add_special_tokens=False)
    if len(ids) < tokens * count:
        raise CalibrationError(
            f"--text {path} has {len(ids)} tokens, but {count} passages of {tokens} need {tokens * count}; give more text, "
            "or lower --samples or --tokens"
        )
    passage_texts = [tokenizer.decode(ids[start : start + tokens]) for start in range(0, tokens * count, tokens)]
    return [PromptSample(f"text-{number:06d}", chat(piece)) for number, piece in enumerate(passage_texts)]


def read(path: Path) -> str:
    """Return the text of a file, or of all `*.txt` files of a folder in the order of their names.

    Raises:
        CalibrationError: there is no text.
    """
    text_files = [path] if path.is_file() else sorted(path.glob("*.txt"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in text_files)
    if not text.strip():
        raise CalibrationError(f"--text {path} has no text; give a text file, or a folder with *.txt files")
    return text


def described(path: Path, tokens: int) -> str:
    """Return the description of a text for an artefact: the passage length, and the text's checksum."""
    digest = hashlib.sha256(read(path).encode()).hexdigest()[:16]
    return f"passages of {tokens} tokens, one behind the other, of a text with sha256 {digest}"
