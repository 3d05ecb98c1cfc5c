"""Errors that a user can meet become one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence

from mmkv_bench.cli.output import harmless, harmless_output
from mmkv_bench.errors import MMKVError, check_output, out_of_memory
from mmkv_bench.run.stopping import Stopped

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_PLACE = (
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EROFS,
)  # a name that a user gave
_LESS_MEMORY = (
    "free some, or ask for less at a time: fewer processes, a lower fork_batch or fork_memory, shorter prompts "
    "(model.max_prompt_tokens), a smaller model; rows that are stored stay, and the same command continues"
)


def guarded(arguments: Sequence[str], work: Callable[[Sequence[str]], int]) -> int:
    """The exit code of `work(arguments)`: 0 done, 1 failed while working, 2 refused, 130 interrupted, 128 + n
    ended by signal n. An error is one
    sentence on stderr, and with --json one JSON document as well."""
    as_json = "--json" in arguments or "json=true" in arguments
    try:
        check_output()
        with harmless_output():
            return work(arguments)
    except MMKVError as error:
        cause = error.__cause__
        full = isinstance(cause, OSError) and cause.errno in _NO_ROOM
        return _refuse(str(error), 2 if full else error.exit_code, as_json)
    except BrokenPipeError:  # whoever read our output has seen enough, as `| head` does
        closed_output()
        return 0
    except Stopped as stop:
        return _refuse(
            f"ended by {stop} after the sample in flight, which is stored; run the same command again to continue",
            128 + stop.signal,
            as_json,
        )
    except KeyboardInterrupt:
        return _refuse("interrupted; run the same command again to continue at the first missing sample", 130, as_json)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            where = error.filename or "the results"
            return _refuse(
                f"no space left on the device that holds {where}; free some, or write out=<folder>", 2, as_json
            )
        if isinstance(error, OSError) and error.filename and error.errno in _NO_PLACE:
            return _refuse(
                f"{str(error.filename)[:200]} cannot be used ({error.strerror}); name another place", 2, as_json
            )
        if not out_of_memory(error):
            raise
        return _refuse(f"{_no_memory(error)}; {_LESS_MEMORY}", 1, as_json)


def closed_output() -> None:
    """Discard what is printed from here on; Python flushes it at its end."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends


def _no_memory(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"this machine's memory is too small for what was asked ({type(error).__name__}: {first[:200]})"


def _refuse(sentence: str, code: int, as_json: bool) -> int:
    print(f"mmkv_bench: {harmless(sentence)}", file=sys.stderr)
    if as_json:
        print(json.dumps({"status": "interrupted" if code >= 128 else "error", "exit_code": code, "error": sentence}))
    return code
