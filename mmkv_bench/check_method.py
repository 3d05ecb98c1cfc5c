"""`python -m mmkv_bench.check_method my_method.py [name=<class>] [<argument>=<value> ...]`: what every built-in method
promises, tested on a file of yours.

First its parts on made-up layers (with and without grouped query heads, prompts of 1 to 130 tokens, every kind of
budget), then whole answers of the embedded model: shared forks against runs of their own through stock `generate()`.
Ends with exit code 1 when a promise is broken, and 2 when the file cannot be used at all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mmkv_bench.__main__ import guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Check the file that a command line names; the exit code."""
    return guarded(list(sys.argv[1:] if argv is None else argv), _main)


def _main(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if words else 2
    from mmkv_bench.methods import promises

    made = promises.method(words[0], words[1:])
    print(
        f"{words[0]}: {made.scorer}, {made.allocator}, {made.selector}, {made.reducer}, {made.decoding or 'no decode policy'}"
    )
    broken = 0
    for check in promises.CHECKS:
        try:
            said = check(made)
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises is the finding
            said = f"{type(error).__name__}: {error}"
        broken += said is not None
        print(
            f"{'ok    ' if said is None else 'BROKEN'}  {check.__doc__.splitlines()[0]}{'' if said is None else f': {said}'}"
        )
    print(f"{len(promises.CHECKS) - broken} of {len(promises.CHECKS)} promises are kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
