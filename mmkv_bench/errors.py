"""Exceptions that a user may meet. Every message says what was got, what is allowed and what to do."""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable


class MMKVError(Exception):
    """Base class; the command line prints its message without a traceback."""

    exit_code = 1


class ConfigError(MMKVError):
    """A request that is wrong or cannot be met. It is refused before any work, with exit code 2."""

    exit_code = 2


class UnsupportedError(ConfigError):
    """A combination (model family, method, protocol, generation setting) that this project cannot run."""


class CompatibilityError(ConfigError):
    """A combination of a method's parts that makes no sense; the message says which, why, and what is allowed instead."""


class CalibrationError(ConfigError):
    """A calibration artefact that is missing, was changed, or belongs to another model or method."""


class DataError(MMKVError):
    """A dataset that is missing or corrupt, or whose checksum differs."""


class MissingDataError(DataError):
    """Data of a run that are missing, unreadable or incomplete. The run is refused before any work."""

    exit_code = 2


class StoreError(MMKVError):
    """Result rows that cannot be written, read or resumed."""


class ScoringError(MMKVError):
    """A failure of lmms-eval's scoring code; the stored answers are untouched."""


_NO_MEMORY = (
    "DefaultCPUAllocator",
    "out of memory",
    "not enough memory",
    "annot allocate memory",
    "_ALLOC_FAILED",
    "failed to map segment",
)
_UNMAPPED = ("Memory mapping file failed", "annot allocate memory")
"""Texts of OSErrors without an errno: pyarrow's, and safetensors'."""


class GenerationTimeout(MMKVError):
    """An answer that took longer than its time limit. Its row gets status `timeout`."""


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that memory ran out.

    Python and numpy raise MemoryError, the operating system an OSError with an errno. PyTorch has an exception class for
    devices; its CPU allocator and its libraries raise a RuntimeError, recognised by its text.
    """
    if isinstance(error, (MemoryError, OSError)):
        unmapped = any(words in str(error) for words in _UNMAPPED)
        return isinstance(error, MemoryError) or error.errno == errno.ENOMEM or unmapped
    return isinstance(error, (RuntimeError, ImportError)) and any(words in str(error) for words in _NO_MEMORY)


def check_output() -> None:
    """Raise ConfigError if standard output was closed when the process began. Every command calls this first.

    Otherwise the next opened file, perhaps one with rows, would get the descriptor of standard output, and libraries would
    print into that file. A closed standard error is replaced by the null device.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        raise ConfigError(
            "standard output is closed; allowed: a terminal, a file or a pipe; give one, as in >/dev/null"
        )


SIMILAR = "did you mean"
LISTED = 20
"""Most names that a message lists; longer lists are only counted."""
_NEAR, _ALIKE = 0.75, 0.05


def folded(name: str) -> str:
    """Return a name without case, separators and the `v` of a version, to compare spellings: `LLaVA-v1.5-7B` -> `llava157b`."""
    return re.sub(r"v(?=\d)", "", re.sub(r"[\W_]", "", name.lower()))


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: a similar allowed name, or else the allowed names or their
    number."""
    allowed = sorted(allowed)
    if not allowed:
        return "it takes none"
    if close := near(name, allowed):
        return f"{SIMILAR} {' or '.join(map(repr, close))}?"
    return f"allowed: {', '.join(allowed)}" if len(allowed) <= LISTED else f"it is none of the {len(allowed)} names"


def near(name: str, allowed: Iterable[str]) -> list[str]:
    """Return the allowed names of which `name` may be a misspelling, best first; empty if none is similar.

    A similar name begins with `name`, or has its first letter and most of its other letters.
    """
    word, names = folded(name), {one: folded(one) for one in allowed}
    begun = [one for one, text in names.items() if len(word) > 2 and text.startswith(word)]
    same = [one for one in begun if names[one] == word]
    if begun:
        return same or (begun if len(begun) <= 8 else [])
    near = {
        one: ratio
        for one, text in names.items()
        if (ratio := difflib.SequenceMatcher(None, text, word).ratio()) >= _NEAR
        and (text[:1] == word[:1] or text in word or word in text)
        and sorted(re.findall(r"\d", text)) == sorted(re.findall(r"\d", word))
    }
    if not near and re.search(r"\d", word):  # the same name with another number
        alike = [one for one in names if _without_numbers(one) == _without_numbers(name)]
        return alike if len(alike) <= 6 else []
    best = max(near.values(), default=0.0)
    return sorted((one for one in near if near[one] >= best - _ALIKE), key=lambda one: -near[one])[:3]


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", re.sub(r"[\W_]+", "_", name.lower()))


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def own_line(error: BaseException, file: str) -> int | None:
    """Return the line of `file` that an exception's traceback last passes through; None if it passes through none."""
    number, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            number = trace.tb_lineno
        trace = trace.tb_next
    return number
