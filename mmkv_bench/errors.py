"""Exceptions that a user may meet, and the words for their messages.

Every message says what was got, what is allowed and what to do.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable


class MMKVError(Exception):
    """Base class. The command line prints the message without a traceback."""

    exit_code = 1


class ConfigError(MMKVError):
    """A request that is wrong or cannot be met. The request is refused before any work, with exit code 2."""

    exit_code = 2


class UnsupportedError(ConfigError):
    """A combination (model family, method, protocol, generation setting) that this project cannot run."""


class CompatibilityError(ConfigError):
    """A combination of a method's parts that makes no sense."""


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
_MEMORY_MAP_ERRORS = ("Memory mapping file failed", "annot allocate memory")
"""Texts of OSErrors without an errno: pyarrow's, and safetensors'."""


class GenerationTimeout(MMKVError):
    """An answer that took longer than its time limit. Its row gets status `timeout`."""


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that memory ran out.

    Python and numpy raise MemoryError, the operating system an OSError with an errno. PyTorch has an exception class
    for devices only. So errors of its CPU allocator, of its libraries, and of libraries that map files into memory are
    recognised by their text.
    """
    if isinstance(error, (MemoryError, OSError)):
        is_mapping_failure = any(words in str(error) for words in _MEMORY_MAP_ERRORS)
        return isinstance(error, MemoryError) or error.errno == errno.ENOMEM or is_mapping_failure
    return isinstance(error, (RuntimeError, ImportError)) and any(words in str(error) for words in _NO_MEMORY)


def check_output() -> None:
    """Raise ConfigError if standard output was closed when the process began. Every command calls this first.

    Otherwise the next opened file, perhaps with rows, would get the descriptor of standard output, and libraries would
    print into that file. A closed standard error is replaced by the null device.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        raise ConfigError(
            "standard output is closed; allowed: a terminal, a file or a pipe; give one, as in >/dev/null"
        )


SIMILAR = "did you mean"
MAX_LISTED_NAMES = 20
"""Most names that a message lists; longer lists are only counted."""
_NEAR, _ALIKE = 0.75, 0.05


def folded(name: str) -> str:
    """Return a name without case, separators and the `v` of a version, to compare spellings: `LLaVA-v1.5-7B` ->
    `llava157b`."""
    return re.sub(r"v(?=\d)", "", re.sub(r"[\W_]", "", name.lower()))


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: similar allowed names, else the allowed names or their
    number."""
    allowed = sorted(allowed)
    if not allowed:
        return "it takes none"
    if similar_names := near(name, allowed):
        return f"{SIMILAR} {' or '.join(map(repr, similar_names))}?"
    return (
        f"allowed: {', '.join(allowed)}"
        if len(allowed) <= MAX_LISTED_NAMES
        else f"it is none of the {len(allowed)} names"
    )


def near(name: str, allowed: Iterable[str]) -> list[str]:
    """Return the allowed names of which `name` may be a misspelling.

    First choice are names that begin with `name`; then the most similar names with the same digits, best first; then
    names that differ only in their number. The list is empty if no name is similar, or too many are, because a wrong
    suggestion misleads.
    """
    folded_name, folded_by_name = folded(name), {one: folded(one) for one in allowed}
    names_with_prefix = [
        one for one, text in folded_by_name.items() if len(folded_name) > 2 and text.startswith(folded_name)
    ]
    equal_names = [one for one in names_with_prefix if folded_by_name[one] == folded_name]
    if names_with_prefix:
        return equal_names or (names_with_prefix if len(names_with_prefix) <= 8 else [])
    near = {
        one: ratio
        for one, text in folded_by_name.items()
        if (ratio := difflib.SequenceMatcher(None, text, folded_name).ratio()) >= _NEAR
        and (text[:1] == folded_name[:1] or text in folded_name or folded_name in text)
        and sorted(re.findall(r"\d", text)) == sorted(re.findall(r"\d", folded_name))
    }
    if not near and re.search(r"\d", folded_name):  # the same name with another number
        names_without_numbers = [one for one in folded_by_name if _without_numbers(one) == _without_numbers(name)]
        return names_without_numbers if len(names_without_numbers) <= 6 else []
    best_ratio = max(near.values(), default=0.0)
    return sorted((one for one in near if near[one] >= best_ratio - _ALIKE), key=lambda one: -near[one])[:3]


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", re.sub(r"[\W_]+", "_", name.lower()))


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    message_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {message_line}" if message_line else type(error).__name__


def traceback_line(error: BaseException, file: str) -> int | None:
    """Return the line of `file` that an exception's traceback passes through last; None if it never does."""
    line_number, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            line_number = traceback.tb_lineno
        traceback = traceback.tb_next
    return line_number
