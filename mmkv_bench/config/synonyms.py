"""Translation of overrides with common words of the field: `torch_dtype=bf16` becomes `model.dtype=bfloat16`.

Synonyms of `field_words` are translated. For other words that it lists, the answer says what to type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv_bench.config.field_words import ANSWERS, KEYS, VALUES
from mmkv_bench.config.files import MODEL, groups
from mmkv_bench.config.names import chosen
from mmkv_bench.config.overrides import parse
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def understood(parsed: Sequence[Override], extra: tuple[str, ...]) -> list[Override]:
    """Return overrides with the keys and names of this package.

    Raises:
        ConfigError: words of the field whose meaning depends on more than the word. The message says what to type for each.
    """
    answered = [(ANSWERS[_word(one)], one.input_line) for one in parsed if _word(one) in ANSWERS]
    if answered:
        raise ConfigError("; ".join(f"{text}: {filled(answer, text.partition('=')[2])}" for answer, text in answered))
    return [_understood(one, extra) for one in parsed]


def _word(override: Override) -> str:
    return override.key_or_group.lower().replace("-", "_")


def _understood(override: Override, extra: tuple[str, ...]) -> Override:
    key, text = override.key_or_group, override.input_line
    word, value = _word(override), text.partition("=")[2]
    if word in KEYS and not (word in ("methods", "datasets") and isinstance(override.value(), Mapping)):
        mark = text[: len(text) - len(text.lstrip("+~"))]
        return _understood(parse(f"{mark}{KEYS[word]}={value}"), extra)
    same = VALUES.get(key, {})
    if (text := ",".join(same.get(one.lower(), one) for one in value.split(","))) != value and same:
        return parse(f"{key}={text}")
    return _renamed(override, extra) if key in groups() and not override.is_delete() else override


def _renamed(override: Override, extra: tuple[str, ...]) -> Override:
    """Return an override that chooses by name (`model=...`) with the spelling of `conf/`."""
    group, value = override.key_or_group, override.value()
    sweep = override.is_sweep_override()
    given = [*override.sweep_string_iterator()] if sweep else value if isinstance(value, list) else [value]
    names = [[str(one)] if _is_elsewhere(group, str(one)) else chosen(group, str(one), extra) for one in given]
    if value is None or [[str(one)] for one in given] == names:
        return override
    if sweep:
        text = ",".join(one[0] if len(one) == 1 else f"[{','.join(one)}]" for one in names)
    else:
        flat = [name for one in names for name in one]
        text = f"[{','.join(flat)}]" if isinstance(value, list) or len(flat) > 1 else flat[0]
    return parse(f"{override.input_line.partition('=')[0]}={text}")


def _is_elsewhere(group: str, name: str) -> bool:
    """Tell whether a choice is no name of `conf/` but a file, a folder, a hub id, or a list of a sweep."""
    return (
        name.endswith(".py") or name[:1] in ("[", ".", "~") or "/" in name or (group == MODEL and Path(name).is_dir())
    )


# ---------------------------------------------------------------------- answers
def filled(answer: str, value: str) -> str:
    """Insert the user's value into an answer of `field_words`, a text with placeholders.

    Args:
        value: the text after the `=`.
    """
    listed = value.strip("[]'\"")
    shares = [_share(text.strip()) for text in listed.split(",")]
    if ("{kept}" in answer or "{rest}" in answer) and None in shares:
        return "a budget counts kept entries: write the share as `budget=10%`, or entries per KV head as `budget=64`"
    digits = re.search(r"\d+", re.sub(r"(\d+)k\b", lambda match: f"{int(match[1]) * 1024}", value.lower()))
    return answer.format(
        value=value or "<value>",
        kept=_listed([f"{100 * share:.6g}%" for share in shares if share]),
        rest=_listed([f"{100 - 100 * share:.6g}%" for share in shares if share]),
        digits=digits[0] if digits else "<number>",
        minutes=_minutes(value.strip("'\"")),
    )


def _listed(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]"


def _share(text: str) -> float | None:
    """Return a share between 0 and 1, given as 0.1 or 10%; None for other text."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return share if 0 < share < 1 else None


def _minutes(text: str) -> str:
    """Return a time of Slurm (`90`, `90:00`, `1:30:00`, `1-12`, `1-12:00:00`) in minutes, rounded up."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return "<minutes>"
    days, first, second, third = (int(part or 0) for part in match.groups())
    hours = match[1] is not None or match[4] is not None
    seconds = days * 86400 + (first * 3600 + second * 60 + third if hours else first * 60 + second)
    return str(-(-seconds // 60))
