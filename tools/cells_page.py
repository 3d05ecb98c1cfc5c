"""Write the page of cells for each table of the README, and links from the table's numbers to the page; part of `make docs`.

python -m tools.cells_page            writes cells.md beside the rows, and the links in README.md
python -m tools.cells_page --check    writes nothing; 1 if anything would change
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mmkv_bench.tables.build import build
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.stored_rows import load
from mmkv_bench.tables.text import interval_text, line_label, score

ROOT = Path(__file__).parents[1]
ROWS = {
    "results/tiny/large": "results",
    "results/reader": "results of the reader",
    "results/real": "results of pretrained weights",
}
"""Folder of rows -> text of the comments around its table in the README."""
README = Path("README.md")
SHORT = 8  # digits of a hash that name a cell on the page


def page(rows: str, tables: list[ScoreTable]) -> str:
    """Return a page with one line per cell: hash, score and interval, and commands that show the cell and make it again."""
    example = next(entry.cells[0] for table in tables for _, budget, entry in table.cells if budget)[:SHORT]
    lines = [
        f"# The cells of {rows}",
        "",
        "Written by `make docs` from the rows beside it. With the hash of a cell:",
        "",
        "```bash",
        f"python -m mmkv_bench show {rows} {example}                                           # configuration, audit, command",
        f"python -m mmkv_bench verify {rows} {example} --all --receipt receipt.json            # every answer, made again",
        "```",
    ]
    for table in tables:
        lines += [
            f"\n## {table.dataset}, {table.metric}\n",
            "| cell | method | budget | right | score | 95 % interval |",
            "|---|---|---|---|---|---|",
        ]
        for method, budget, entry in table.cells:
            for cell in entry.cells:
                right = f"{round(entry.scores.values.sum())} of {len(entry.scores.values)}"
                numbers = f"{right} | {score(entry.value)} | {interval_text(entry.low, entry.high)}"
                name = cell[:SHORT]
                lines.append(f'| <a id="{name}"></a>`{name}` | {line_label(method)} | {budget or "-"} | {numbers} |')
    return "\n".join(lines) + "\n"


def linked(text: str, rows: str, tables: list[ScoreTable]) -> str:
    """Return the README with a link on each number in the table of these rows."""
    begin, end = (f"<!-- {ROWS[rows]}: {place} -->" for place in ("begin", "end"))
    before, block, after = re.split(f"({begin}.*?{end})", text, maxsplit=1, flags=re.DOTALL)
    block = re.sub(r"\[(\d\.\d\d)\]\[[0-9a-f]+\]", r"\1", re.sub(r"(?m)^\[[0-9a-f]{8}\]: .*\n", "", block))
    caption = next(line for line in block.splitlines() if line.startswith("**"))
    keys = ("model", "protocol")
    table = next(
        t
        for t in tables
        if f"**{t.dataset}, {t.metric}**" in caption
        and all(f"{key}={t.context[key]};" in caption for key in keys)
        and ("dtype=" in caption) == (t.context["dtype"] != "float32")
    )
    named: dict[str, None] = {}
    lines = list(_linked_lines(block.splitlines(), table, named))
    references = [f"[{name}]: {rows}/cells.md#{name}" for name in named]
    while not lines[-2]:  # of references that were there
        del lines[-2]
    return before + "\n".join([*lines[:-1], "", *references, lines[-1]]) + after


def _linked_lines(lines: list[str], table: ScoreTable, named: dict[str, None]) -> Iterator[str]:
    """Yield the lines with links; add the cells that the links lead to as keys of `named`."""
    budgets: list[str] = []
    entries = {(line_label(method), budget): entry for method, budget, entry in table.cells}
    for line in lines:
        fields = [field.strip() for field in line.split("|")[1:-1]]
        if fields[:1] == ["method"] and not budgets:
            budgets = fields[1:]
        if not budgets or len(fields) != len(budgets) + 1 or fields[0] not in {label for label, _ in entries}:
            yield line
            continue
        parts = line.split("|")
        for place, budget in enumerate(budgets, 2):
            entry = entries.get((fields[0], budget)) or entries[fields[0], ""]  # `full` has no budget
            name = entry.cells[0][:SHORT]
            named[name] = None
            parts[place] = re.sub(r"\d\.\d\d", rf"[\g<0>][{name}]", parts[place], count=1)
        yield "|".join(parts)


def main() -> int:
    """Write or compare the files."""
    written = {README: (ROOT / README).read_text()}
    for rows in ROWS:
        tables = build(load(ROOT / rows, fidelity=()))
        written |= {Path(rows, "cells.md"): page(rows, tables), README: linked(written[README], rows, tables)}
    changed = [
        path for path, text in written.items() if not (ROOT / path).is_file() or (ROOT / path).read_text() != text
    ]
    if "--check" in sys.argv:
        print(f"{', '.join(map(str, changed))}: out of date; run `make docs`" if changed else "cells are up to date")
        return 1 if changed else 0
    for path in changed:
        (ROOT / path).write_text(written[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
