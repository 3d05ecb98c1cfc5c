"""A needle in a haystack: a question asks for one sentence that is hidden at some depth of a long text.

The task is gkamradt's LLMTest_NeedleInAHaystack, in the form of PyramidKV's run_needle_in_haystack.py, which PrefixKV's
table 14 follows. The haystack is the text of the folder: `haystack/*.txt`, `PaulGrahamEssays/*.txt` (which papers take) or
`*.txt`. A file `needle.json` in the folder may set the fields of `Settings`; the default is the papers' grid, 71 lengths x
10 depths.

Lengths are in tokens of the tokenizer that `needle.json` names (a local folder, or one in the hub's cache). Without a
tokenizer `characters_per_token` converts, and the count differs from a model's by some percent. As in PyramidKV's script,
`buffer` tokens of each length are reserved for question and answer, and the needle's tokens are part of the rest. The needle
follows the last full stop before its depth. The script searches that full stop among tokens, this file in the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.datasets.tasks.files import as_split, load_json
from mmkv_bench.errors import DataError, nearest

if TYPE_CHECKING:
    import datasets

FOLDERS = ("haystack", "PaulGrahamEssays", ".")
COLUMNS = {
    "sample_id": "string",
    "length": "int32",
    "depth": "int32",
    "context": "string",
    "question": "string",
    "answer": "string",
    "needle": "string",
}
Prefix = Callable[[str, int], str]  # the first n tokens of a text, as text


@dataclass(frozen=True)
class Settings:
    """Settings of the grid.

    lengths    lengths of haystack, needle and buffer together [tokens]
    depths     positions of the needle [percent of the haystack]
    answer     the expected answer, whose words are counted
    tokenizer  folder or hub name; None counts characters
    """

    lengths: tuple[int, ...] = tuple(range(1000, 8001, 100))
    depths: tuple[int, ...] = (0, 11, 22, 33, 44, 56, 67, 78, 89, 100)
    needle: str = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
    question: str = "The best thing to do in San Francisco is:"
    answer: str = "eat a sandwich and sit in Dolores Park on a sunny day."
    buffer: int = 200
    tokenizer: str | None = None
    characters_per_token: float = 4.4


def read_grid(folder: Path) -> dict[str, datasets.Dataset]:
    """Make one document per length and depth, as the split `test`.

    Raises:
        DataError: no text, an unknown or invalid setting in needle.json, or a tokenizer that cannot be loaded.
    """
    settings = _settings(folder)
    text, prefix = _text(folder), _prefix(settings)
    rows = list(_rows(text, settings, prefix))
    return as_split(rows, COLUMNS, "test")


def hidden(text: str, needle: str, depth: int, prefix: Prefix, tokens: int) -> str:
    """Return the first `tokens` tokens of the text with the needle inserted on a line of its own.

    The needle follows the last full stop before `depth` percent of the tokens. Without such a full stop it is at the start; a
    depth of 100 puts it at the end.
    """
    hay = prefix(text, tokens)
    place = len(hay) if depth == 100 else prefix(text, int(tokens * depth / 100)).rfind(".") + 1
    return f"{hay[:place]}\n{needle}\n{hay[place:]}"


def _rows(text: str, settings: Settings, prefix: Prefix) -> Iterator[dict[str, Any]]:
    taken = _count(f"\n{settings.needle}\n", settings)
    for length in settings.lengths:
        tokens = length - settings.buffer - taken
        if tokens < 1:
            least = length - tokens + 1
            raise DataError(f"length {length} of needle.json is too short for needle and buffer; give at least {least}")
        whole = _repeated(text, tokens, prefix)
        for depth in settings.depths:
            yield {
                "sample_id": f"{length}-{depth}",
                "length": length,
                "depth": depth,
                "context": hidden(whole, settings.needle, depth, prefix, tokens),
                "question": settings.question,
                "answer": settings.answer,
                "needle": settings.needle,
            }


def _repeated(text: str, tokens: int, prefix: Prefix) -> str:
    """Repeat the text until it has at least `tokens` tokens."""
    times = 1
    while len(prefix(text * times, tokens + 1)) == len(text * times):
        times *= 2
    return text * times


def _settings(folder: Path) -> Settings:
    file = folder / "needle.json"
    if not file.is_file():
        return Settings()
    given = load_json(file)
    names = [field.name for field in dataclasses.fields(Settings)]
    unknown = [name for name in given if name not in names] if isinstance(given, dict) else ["the content"]
    if unknown:
        raise DataError(f"{unknown[0]} in {file} is not a setting; {nearest(unknown[0], names)}")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = Settings(**given)
    if not settings.lengths or not settings.depths or any(not 0 <= depth <= 100 for depth in settings.depths):
        raise DataError(f"{file} needs lengths, and depths from 0 to 100; correct the file")
    return settings


def _text(folder: Path) -> str:
    for place in FOLDERS:
        files = sorted((folder / place).glob("*.txt"))
        text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
        if text.strip():
            return text
    raise DataError(
        f"{folder} has no text; put *.txt files, for example Paul Graham's essays, into {folder / 'haystack'}"
    )


def _prefix(settings: Settings) -> Prefix:
    if settings.tokenizer is None:
        return lambda text, tokens: text[: int(tokens * settings.characters_per_token)]
    tokenizer = _tokenizer(settings.tokenizer)
    ids: dict[str, list[int]] = {}

    def prefix(text: str, tokens: int) -> str:
        if text not in ids:
            ids.clear()  # lengths are made one after the other, so only the current text is cached
            ids[text] = tokenizer.encode(text, add_special_tokens=False)
        return text if tokens >= len(ids[text]) else tokenizer.decode(ids[text][:tokens], skip_special_tokens=True)

    return prefix


def _count(text: str, settings: Settings) -> int:
    if settings.tokenizer is None:
        return round(len(text) / settings.characters_per_token)
    return len(_tokenizer(settings.tokenizer).encode(text, add_special_tokens=False))


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise DataError(
            f"the tokenizer {name} of needle.json cannot be loaded ({first}); give a local folder"
        ) from error
