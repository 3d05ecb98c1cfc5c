"""`python -m tests.fuzz`: N drawn configurations (`make fuzz`); exit code 1 if one of them misbehaves."""

from __future__ import annotations

import argparse
import collections
import shlex
import sys
import time

from tests.fuzz.drawing import draw
from tests.fuzz.running import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which cases are drawn")
    parser.add_argument("--runs", type=int, default=300, help="how many of them")
    parser.add_argument("--only", type=int, help="run the case of this number alone")
    options = parser.parse_args()
    numbers = range(options.runs) if options.only is None else [options.only]
    codes, bad, rows, failures, start = collections.Counter(), 0, 0, collections.Counter(), time.monotonic()
    for number in numbers:
        case = draw(options.seed, number)
        outcome = run(case)
        codes[f"{case.expect} -> {outcome.code}"] += 1
        rows += outcome.rows
        failures.update(outcome.failed)
        if outcome.found or options.only is not None:
            bad += bool(outcome.found)
            print(f"case {number} of seed {options.seed} ({case.expect}, {outcome.code}): {shlex.join(case.arguments)}")
            print("\n".join(f"    {text}" for text in outcome.found), flush=True)
    for text, count in failures.most_common():
        print(f"{count} failed rows: {text}")
    told = ", ".join(f"{count} {what}" for what, count in sorted(codes.items()))
    print(f"{len(numbers)} configurations in {time.monotonic() - start:.0f} s ({told}), {rows} rows, {bad} misbehave")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
