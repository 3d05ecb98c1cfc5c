"""A needle in a haystack: one sentence hidden at some depth of a long text, and asked for (gkamradt's
LLMTest_NeedleInAHaystack, in the form of PyramidKV's run_needle_in_haystack.py, which PrefixKV's table 14 follows).

The haystack is whatever text the folder has: `*.txt`, `haystack/*.txt` or `PaulGrahamEssays/*.txt`, which is what papers
take. `needle.json` beside it may set what `Settings` has; without it the papers' grid is made: 71 lengths x 10 depths.

Lengths are in tokens: of the tokenizer that `needle.json` names (a local folder, or one that the cache of the hub has), else
by `characters_per_token`, which differs from a model's own count by some percent. As in PyramidKV's script, `buffer` tokens of
each length are left for the question and the answer, the needle takes its part of what remains, and it is put after the last
full stop before its depth. The script looks for that full stop among tokens, here it is looked for in the text.
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
    """lengths: of haystack, needle and buffer [tokens]; depths: where the needle is put [percent of the haystack];
    answer: the words that the needle's answer has; tokenizer: folder or hub name, None counts characters."""

    lengths: tuple[int, ...] = tuple(range(1000, 8001, 100))
    depths: tuple[int, ...] = (0, 11, 22, 33, 44, 56, 67, 78, 89, 100)
    needle: str = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
    question: str = "The best thing to do in San Francisco is:"
    answer: str = "eat a sandwich and sit in Dolores Park on a sunny day."
    buffer: int = 200
    tokenizer: str | None = None
    characters_per_token: float = 4.4


def read_grid(folder: Path) -> dict[str, datasets.Dataset]:
    """One document for each length and depth, as the split `test`.

    Raises:
        DataError: no text, a needle.json with other settings than those, or a tokenizer that is not there.
    """
    settings = _settings(folder)
    text, prefix = _text(folder), _prefix(settings)
    rows = list(_rows(text, settings, prefix))
    return as_split(rows, COLUMNS, "test")


def hidden(text: str, needle: str, depth: int, prefix: Prefix, tokens: int) -> str:
    """`tokens` tokens of the text with the needle, on a line of its own, after the last full stop before `depth` percent of
    them; at the start where there is none, at the end at 100."""
    hay = prefix(text, tokens)
    place = len(hay) if depth == 100 else prefix(text, int(tokens * depth / 100)).rfind(".") + 1
    return f"{hay[:place]}\n{needle}\n{hay[place:]}"


def _rows(text: str, settings: Settings, prefix: Prefix) -> Iterator[dict[str, Any]]:
    taken = _count(f"\n{settings.needle}\n", settings)
    for length in settings.lengths:
        tokens = length - settings.buffer - taken
        if tokens < 1:
            least = length - tokens + 1
            raise DataError(f"length {length} of needle.json leaves no room beside the needle; give at least {least}")
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
    """The text, repeated until it has at least that many tokens."""
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
    unknown = [name for name in given if name not in names] if isinstance(given, dict) else ["what it holds"]
    if unknown:
        raise DataError(f"{unknown[0]} in {file} is no setting; {nearest(unknown[0], names)}")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = Settings(**given)
    if not settings.lengths or not settings.depths or any(not 0 <= depth <= 100 for depth in settings.depths):
        raise DataError(f"{file} needs lengths, and depths from 0 to 100")
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
            ids.clear()  # lengths come one after the other: one text is worked on at a time
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
