"""Passages of a text that the user gives, for models that read no images."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from mmkv_bench.calibrate.samples import Page
from mmkv_bench.errors import CalibrationError


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
