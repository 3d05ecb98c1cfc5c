"""`mmkv-bench new mine.py` writes a method file to start from; `mmkv-bench check mine.py` tests a method file.

A check tests what every built-in method promises: first the method's parts on random layers (with and without grouped
query heads, prompts of 1 to 130 tokens, every kind of budget), then whole answers of the embedded model, which are
compared with single runs through stock `generate()`.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from mmkv_bench.errors import ConfigError


def new(given: argparse.Namespace) -> int:
    """Write a method file to start from, and print what to do next. An existing file is not changed."""
    from mmkv_bench.methods import method_file

    method_file.write(given.file, given.part)
    name = shlex.quote(given.file)
    print(f"{given.file}: {'an' if given.part == 'allocator' else 'a'} {given.part} to start from; change it, and then")
    print(f"  mmkv-bench check {name}")
    print(f"  mmkv-bench 'method=[snapkv,{given.file}]' budget=64 out=runs/{Path(given.file).stem}")
    return 0


def check(given: argparse.Namespace) -> int:
    """Test a method file. Return 0 if all promises of a method hold, else 1. An unusable file is refused."""
    if given.file.startswith("model="):
        command = f"python -m tools.check_model {given.file.removeprefix('model=')}"
        raise ConfigError(f"check takes a method file; models are checked by `{command}` in a checkout")

    from mmkv_bench.methods import method_file_checks

    method_file_checks.check(given.file)  # before the seconds that torch takes
    from mmkv_bench.methods import diagnosis, invariants

    compressor = invariants.method(given.file, given.settings)
    method_parts = (
        compressor.scorer,
        compressor.allocator,
        compressor.selector,
        compressor.reducer,
        compressor.decoding or "no decode policy",
    )
    print(f"{given.file}: {', '.join(map(str, method_parts))}")
    broken_promises: dict[diagnosis.Check, diagnosis.Finding] = {}
    unchecked_promises = 0
    for number, check in enumerate(invariants.CHECKS):
        if diagnosis.depends_on_broken(check, broken_promises):
            unchecked_promises += 1
            continue
        finding = diagnosis.run_check(check, compressor, given.file)
        if finding is not None and any(other.has_same_cause(finding) for other in broken_promises.values()):
            unchecked_promises += len(invariants.CHECKS) - number
            break
        broken_promises |= {} if finding is None else {check: finding}
        promise = (check.__doc__ or check.__name__).splitlines()[0]
        print(f"ok      {promise}" if finding is None else f"BROKEN  {promise}: {finding}", flush=True)
    kept_promises = len(invariants.CHECKS) - len(broken_promises) - unchecked_promises
    unchecked_clause = f"; {unchecked_promises} wait for the line above" * bool(unchecked_promises)
    print(f"{kept_promises} of {len(invariants.CHECKS)} promises are kept{unchecked_clause}")
    return 1 if broken_promises else 0
