"""`mmkv-bench` and `python -m mmkv_bench`: the verb, then its words. Without a verb it is `run`.

Heavy packages are imported only after the command has been checked. A user's mistake costs a second and gives one
sentence on stderr and exit code 2, never a traceback or a file. Control characters in output are escaped, because names
in rows may come from anybody.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from mmkv_bench import __version__
from mmkv_bench.cli.grammar import PROGRAM, VERBS, reader, split
from mmkv_bench.errors import MMKVError, check_output, first_line, out_of_memory
from mmkv_bench.signals import Stopped

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_BAD_PATH_ERRORS = (errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EROFS)
"""Error numbers for a path that a user gave."""
_LESS_MEMORY = (
    "free some memory, or ask for less at a time: fewer processes, a lower fork_batch or fork_memory, shorter "
    "prompts (model.max_prompt_tokens), a smaller model; stored rows are kept, and the same command continues"
)
# Control characters except tab and line break. They include those of colours, which can hide text, and those that change the
# direction of writing.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def run_guarded(arguments: Sequence[str], work: Callable[[Sequence[str]], int]) -> int:
    """Call `work(arguments)` and return the exit code. An error becomes one sentence on stderr, with --json also JSON.

    Exit codes: 0 done, 1 failed while working, 2 refused, 130 interrupted, 128 + n ended by signal n.
    """
    as_json = "--json" in arguments or "json=true" in arguments
    try:
        check_output()
        with _sanitized_stdout():
            return work(arguments)
    except BrokenPipeError:  # the reader of the output has closed it, as `| head` does
        discard_output()
        return 0
    except (Exception, KeyboardInterrupt, Stopped) as error:
        sentence_and_code = refusal(error)
        if sentence_and_code is None:
            raise
    sentence, exit_code = sentence_and_code
    print(f"mmkv_bench: {_escape_controls(sentence)}", file=sys.stderr)
    if as_json:
        status = "interrupted" if exit_code >= 128 else "error"
        print(json.dumps({"status": status, "exit_code": exit_code, "error": sentence}))
    return exit_code


def refusal(error: BaseException) -> tuple[str, int] | None:
    """Return the message and the exit code of an error that a user can cause; None for other errors."""
    if isinstance(error, MMKVError):
        is_disk_full = isinstance(error.__cause__, OSError) and error.__cause__.errno in _DISK_FULL_ERRORS
        return str(error), 2 if is_disk_full else error.exit_code
    if isinstance(error, Stopped):
        interruption_clause = "after the current sample, which is stored; run the same command again to continue"
        return f"ended by {error} {interruption_clause}", 128 + error.signal
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; run the same command again to continue at the first missing sample", 130
    if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRORS:
        file_name = error.filename or "the results"
        return f"no space left on the device of {file_name}; free some space, or write out=<folder>", 2
    if isinstance(error, OSError) and error.filename and error.errno in _BAD_PATH_ERRORS:
        return f"{str(error.filename)[:200]} cannot be used ({error.strerror}); give another path", 2
    if out_of_memory(error):
        return f"this machine's memory is too small for this request ({first_line(error)[:250]}); {_LESS_MEMORY}", 1
    return None


def discard_output() -> None:
    """Discard further output after its reader has closed the pipe, so that the flush at exit does not fail."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends


def _escape_controls(text: str) -> str:
    return _CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class SanitizingStream:
    """A text stream that escapes control characters. All other attributes are the wrapped stream's."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(_escape_controls(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def _sanitized_stdout() -> Iterator[None]:
    """Make standard output a `SanitizingStream` during the block."""
    original_stdout = sys.stdout
    keeps_stdout = original_stdout is None or isinstance(original_stdout, SanitizingStream)
    sanitized: Any = original_stdout if keeps_stdout else SanitizingStream(original_stdout)
    sys.stdout = sanitized
    try:
        yield
    finally:
        if sys.stdout is sanitized:
            sys.stdout = original_stdout


def clear_screen() -> None:
    """Clear the terminal, past the `SanitizingStream`."""
    stream = sys.stdout.stream if isinstance(sys.stdout, SanitizingStream) else sys.stdout
    stream.write("\x1b[H\x1b[2J")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code of `run_guarded`."""
    return run_guarded(list(sys.argv[1:] if argv is None else argv), _main)


def _main(arguments: Sequence[str]) -> int:
    first_word, *other_words = arguments or [""]
    if first_word in ("-h", "--help"):
        print(overview())
    elif first_word == "--version":
        print(f"mmkv_bench {__version__}")
    elif first_word in ("--completion", "--complete"):
        from mmkv_bench.cli.completion import candidates, script

        print(script(*other_words) if first_word == "--completion" else "\n".join(candidates(other_words)))
    else:
        verb_name, words = split(arguments)
        verb_function, parser = reader(verb_name)
        if not {"-h", "--help"} & {*words}:
            return verb_function(parser.read(words))
        print(parser.format_help().rstrip())
    return 0


def overview() -> str:
    """Return the text of `mmkv-bench --help`."""
    width = max(map(len, VERBS)) + 3
    verb_lines = "\n".join(f"  {name:<{width}}{verb['summary']}" for name, verb in VERBS.items())
    return f"""\
mmkv_bench {__version__}: what KV-cache compression costs multimodal models, in counted budgets.

usage: {PROGRAM} <verb> [names] [key=value ...] [--flag value]     (or: python -m mmkv_bench <verb> ...)

verbs
{verb_lines}

{PROGRAM} <verb> --help says all of one verb; without a verb it is a run:
  {PROGRAM} method=mmshift budget=64

further flags
  --version                   version of mmkv_bench
  --completion SHELL          a script that completes commands in bash, zsh or fish:
                              eval "$({PROGRAM} --completion bash)"
"""[:-1]
