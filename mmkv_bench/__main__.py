"""`python -m mmkv_bench` and the console script `mmkv-bench`.

Nothing heavy is imported before the request has been checked: a mistake costs a second and one sentence on stderr, exit
code 2, and leaves nothing behind.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mmkv_bench.errors import ConfigError, MMKVError, check_output, nearest, out_of_memory

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LESS_MEMORY = (
    "free some, or ask for less at a time: fewer processes, a lower fork_batch or fork_memory, shorter prompts "
    "(model.max_prompt_tokens), a smaller model; rows that are stored stay, and the same command continues"
)
_PASSED_ON = {"--cfg": 1, "-c": 1, "--info": 1, "-i": 1, "--package": 1, "-p": 1, "--resolve": 0, "--hydra-help": 0}
"""Hydra's own flags that print and stop, with the number of words that follow."""


@dataclass
class Request:
    """A command line, read: overrides and what the flags ask for."""

    overrides: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    help: bool = False
    version: bool = False
    json: bool = False
    multirun: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 done, 1 failed while working, 2 refused, 130 interrupted."""
    return guarded(list(sys.argv[1:] if argv is None else argv), lambda arguments: _answer(read(arguments)))


def guarded(arguments: Sequence[str], work: Callable[[Sequence[str]], int]) -> int:
    """The exit code of `work(arguments)`; what a user can meet becomes one sentence on stderr instead of a traceback,
    and with --json one JSON document as well."""
    as_json = "--json" in arguments or "json=true" in arguments
    try:
        check_output()
        return work(arguments)
    except MMKVError as error:
        cause = error.__cause__
        full = isinstance(cause, OSError) and cause.errno in _NO_ROOM
        return _refuse(str(error), 2 if full else error.exit_code, as_json)
    except BrokenPipeError:  # whoever read our output has seen enough, as `| head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends, which flushes it
        return 0
    except KeyboardInterrupt:
        return _refuse("interrupted; run the same command again to continue at the first missing sample", 130, as_json)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            where = error.filename or "the results"
            return _refuse(
                f"no space left on the device that holds {where}; free some, or write out=<folder>", 2, as_json
            )
        if not out_of_memory(error):
            raise
        return _refuse(f"{_no_memory(error)}; {_LESS_MEMORY}", 1, as_json)


def read(arguments: Sequence[str]) -> Request:
    """Split a command line into overrides and flags.

    Raises:
        ConfigError: a flag that does not exist, or one whose value is missing.
    """
    request, rest = Request(), iter(arguments)
    for word in rest:
        if word in ("-h", "--help"):
            request.help = True
        elif word == "--version":
            request.version = True
        elif word == "--json":
            request.json = True
            request.overrides.append("json=true")
        elif word in ("-m", "--multirun"):
            request.multirun = True
        elif word in ("-cd", "--config-dir"):
            request.overrides.append(f"hydra.searchpath=['file://{_folder(next(rest, None))}']")
        elif word in _PASSED_ON:
            values = [next(rest, None) for _ in range(_PASSED_ON[word])]
            if None in values:
                raise ConfigError(f"{word} needs a value after it; see `python -m mmkv_bench --help`")
            request.flags += [word, *values]
        elif word.startswith("-"):
            known = ("--help", "--version", "--json", "--multirun", "--config-dir", *_PASSED_ON)
            raise ConfigError(f"unknown flag {word!r}; {nearest(word, known)}; settings are written key=value")
        else:
            request.overrides.append(word)
    return request


def _folder(text: str | None) -> str:
    from pathlib import Path

    if not text or not Path(text).is_dir():
        raise ConfigError(
            f"--config-dir {text or ''} is not a folder; give one that holds config groups (experiment/, ...)"
        )
    return str(Path(text).resolve())


def _answer(request: Request) -> int:
    if request.help:
        from mmkv_bench.usage import usage

        print(usage())
        return 0
    if request.version:
        from mmkv_bench import __version__

        print(f"mmkv_bench {__version__}")
        return 0
    if request.flags:
        from mmkv_bench.run.multirun import show

        return show(request.overrides, request.flags)
    if request.multirun:
        from mmkv_bench.run.multirun import multirun

        return multirun(request.overrides)
    from mmkv_bench.config.compose import compose
    from mmkv_bench.plan.validate import validate

    hydra_only = [
        text for text in request.overrides if text.lstrip("+~").startswith("hydra.") and "searchpath" not in text
    ]
    if hydra_only:
        raise ConfigError(f"{hydra_only[0]} only matters to the jobs of a multirun; add -m, or leave it out")
    config = compose(request.overrides)
    validate(config)
    from mmkv_bench.run.run import run

    try:
        return run(config)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends, which flushes it
        raise MMKVError(
            "the output was closed before the run's end; run the same command again to continue, with its output to a "
            "file or a terminal"
        ) from None


def _no_memory(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"this machine's memory is too small for what was asked ({type(error).__name__}: {first[:200]})"


def _refuse(sentence: str, code: int, as_json: bool) -> int:
    print(f"mmkv_bench: {sentence}", file=sys.stderr)
    if as_json:
        print(json.dumps({"status": "interrupted" if code == 130 else "error", "exit_code": code, "error": sentence}))
    return code


if __name__ == "__main__":
    sys.exit(main())
