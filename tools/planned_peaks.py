"""Write `results/reference/planned/peaks.csv` from the counts of an efficiency setting's dry run:

    mmkv-bench plan experiment=<setting> --memory --json | python -m tools.planned_peaks <setting>

The setting's lines are replaced; lines of other settings stay.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from mmkv_bench.config.compose import compose
from mmkv_bench.papers import non_score_metrics
from mmkv_bench.papers.non_score_metrics import PLANNED_COLUMNS, planned_rows


def lines_of(setting: str, document: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the lines of a setting, from the last line that `plan --memory --json` prints.

    Raises ValueError for a cell that was not counted."""
    config = compose([f"experiment={setting}"])
    (prompts,) = config.prompts
    found = []
    for cell in document["memory"]["cells"]:
        if not cell["largest"]:
            raise ValueError(f"{setting}: {cell['cell']} was not counted: {cell['error']}")
        method, _, budget = cell["cell"].partition("@")
        if budget.endswith("%"):
            budget = f"{(Decimal(budget[:-1]) / 100).normalize():f}"
        told = (
            setting,
            document["model"],
            f"made_up_{prompts}",
            method,
            budget,
            cell["tokens"],
            config.new_tokens,
        )
        phase = max(cell["peaks"], key=cell["peaks"].get)
        found.append(dict(zip(PLANNED_COLUMNS, map(str, (*told, phase, cell["largest"])), strict=True)))
    return found


def main() -> None:
    """Read the plan from the standard input and write the file."""
    setting = sys.argv[1]
    document = json.loads(sys.stdin.read().strip().splitlines()[-1])
    others = [line for line in planned_rows() if line["setting"] != setting]
    non_score_metrics.PEAKS.parent.mkdir(parents=True, exist_ok=True)
    with non_score_metrics.PEAKS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, PLANNED_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*others, *lines_of(setting, document)], key=lambda line: line["setting"]))


if __name__ == "__main__":
    main()
