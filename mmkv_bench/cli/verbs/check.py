"""`mmkv-bench check my_method.py`: what every built-in method promises, tested on a file of yours.

First its parts on made-up layers (with and without grouped query heads, prompts of 1 to 130 tokens, every kind of
budget), then whole answers of the embedded model: shared forks against runs of their own through stock `generate()`.
"""

from __future__ import annotations

import argparse

from mmkv_bench.cli.grammar import Parser

SUMMARY = "test a method file of yours: what every built-in method promises, on made-up layers and whole answers"


def options(parser: Parser) -> None:
    """The file, and what its class is built with."""
    parser.add_argument("file", help="Python file with the method")
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="name=<class> and arguments of its constructor"
    )
    parser.examples("mmkv-bench check examples/value_norm.py", "mmkv-bench check my_method.py name=Mine window=16")


def answer(given: argparse.Namespace) -> int:
    """0 when all promises are kept, 1 when one is broken; a file that cannot be used at all is refused."""
    from mmkv_bench.methods import method_file_checks

    method_file_checks.check(given.file)  # before the seconds that torch takes
    from mmkv_bench.methods import broken_promises, promises

    made = promises.method(given.file, given.settings)
    parts = (made.scorer, made.allocator, made.selector, made.reducer, made.decoding or "no decode policy")
    print(f"{given.file}: {', '.join(map(str, parts))}")
    broken: dict[broken_promises.Check, broken_promises.Finding] = {}
    waiting = 0
    for number, check in enumerate(promises.CHECKS):
        if broken_promises.hidden(check, broken):
            waiting += 1
            continue
        found = broken_promises.tried(check, made, given.file)
        if found is not None and any(one.again(found) for one in broken.values()):
            waiting += len(promises.CHECKS) - number
            break
        broken |= {} if found is None else {check: found}
        promise = (check.__doc__ or check.__name__).splitlines()[0]
        print(f"ok      {promise}" if found is None else f"BROKEN  {promise}: {found}", flush=True)
    kept = len(promises.CHECKS) - len(broken) - waiting
    print(
        f"{kept} of {len(promises.CHECKS)} promises are kept" + f"; {waiting} wait for the line above" * bool(waiting)
    )
    return 1 if broken else 0
