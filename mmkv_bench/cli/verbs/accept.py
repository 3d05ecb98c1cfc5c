"""`mmkv-bench accept`: a check of a bundle (an experiment's published rows, tables, remade answers and environment) against the
experiment.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
from dataclasses import asdict
from pathlib import Path

from mmkv_bench.cli.grammar import overrides_of

FIRST_REAL = ("experiment=first_real", "model=smolvlm_256m,qwen2_5_vl_3b")
"""Settings of the bundles that `make first-real` makes."""


def accept(given: argparse.Namespace) -> int:
    """Print a line per check. Return 0 if nothing is refused, otherwise 1."""
    from mmkv_bench.diagnostics.acceptance import NOT_CHECKED, REFUSED, findings
    from mmkv_bench.plan.validate import validated_jobs
    from mmkv_bench.store.publish import place

    source, settings = place(given.bundle), given.overrides or list(FIRST_REAL)
    given.overrides, as_json, given.json = settings, given.json, False
    configs = [config for _, config in validated_jobs(overrides_of(given))]
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    results = []
    if not as_json:
        print(f"{source.shown} as a bundle of {' '.join(settings)}")
    with tempfile.TemporaryDirectory() as folder:
        for finding in findings(source, configs, Path(folder) / "rows", given.samples, seed):
            results.append(finding)
            if not as_json:
                print(finding, flush=True)
    accepted = all(finding.outcome != REFUSED for finding in results)
    if as_json:
        checks = [asdict(finding) for finding in results]
        print(json.dumps({"accepted": accepted, "settings": settings, "seed": seed, "checks": checks}))
    elif accepted:
        unchecked = ", ".join(finding.check for finding in results if finding.outcome == NOT_CHECKED)
        print("accepted: nothing is refused" + f"; not checked: {unchecked}" * bool(unchecked))
    else:
        print(f"refused: {', '.join(finding.check for finding in results if finding.outcome == REFUSED)}")
    return int(not accepted)
