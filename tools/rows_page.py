"""Write docs/rows.md, the page of all columns of the row schema: `python -m tools.rows_page`."""

from __future__ import annotations

from pathlib import Path

from mmkv_bench.store.schema import COLUMNS, FALLBACKS, PHASES, SCHEMA_VERSION, SLIM

PAGE = Path(__file__).parents[1] / "docs" / "rows.md"

LEFT_OUT = (
    "Batches: forks that decode together are padded to the longest one and share one reserve. The columns count the bytes of "
    "one fork by itself, as with `sharing=off`.",
    "Scores: memory for the prefill's scores while the prompt is reduced. It is freed before the answer begins, except for "
    "scores that a decode policy keeps using (`h2o_decode`, MEDA's release); those are in `bytes_held`.",
    "Growth: memory that decoding adds. `bytes_held` has the slots for it and `entries_end` counts it. Buffers of a policy that "
    "grow entry by entry (`h2o_decode`) are counted as they are when the answer begins.",
    "Copies in a step: keys and values that KIVI unpacks for the attention kernel.",
    "Positions: `bytes_read_step` is K and V; int32 positions, which make the mask, are in `bytes_metadata`.",
)
"""Memory that no column shows."""

ABOUT = {
    "responses": "One row per cell and sample: the answer, its status, the entries that were kept, and the cost.",
    "cells": "One row per cell: its configuration, and the code, versions and device of its first run.",
    "samples": "One row per cell, sample and metric.",
    "metrics": "One row per cell and metric.",
    "timings": "`scenario=efficiency`: one row per cell, prompt length, batch, pass and phase; raw values, no averages.",
    "diagnostics": "`mmkv-bench diagnose`: results of an analysis in each layer of each sample's prompt; they belong to no cell.",
    "prompts": "One row per prompt and model, written with its first answer: the question, for people who look at answers. Older "
    "answers have none. Questions are under their datasets' licences: `pack` does not touch these files, `--publish` omits them.",
}


def markdown() -> str:
    """Return all columns as Markdown tables, one section per table."""
    lines = [
        f"Row schema, version {SCHEMA_VERSION}. Every table is a folder of parquet files in the result store. If several files "
        "hold scores of a cell, `together-…` (cells scored at once; the newest first) counts before `<cell>` (written by earlier "
        "versions), and `<cell>` before `packed-…`. Of several answers to a sample, the one with the latest `committed_at` "
        "counts. `.index/` is a cache of `mmkv-bench status`; you may delete it."
    ]
    words = {"always": "no", "ok": "only when not ok", "no": "yes"}
    for table, columns in COLUMNS.items():
        lines += [
            "",
            f"## {table}",
            "",
            ABOUT[table],
            "",
            "| column | type | unit | null | meaning |",
            "|---|---|---|---|---|",
        ]
        for column in columns:
            allowed = f" (one of: {', '.join(column.allowed)})" if column.allowed else ""
            kind = "JSON string" if column.json else str(column.type).replace("item: ", "")
            lines.append(
                f"| `{column.name}` | {kind} | {column.unit} | {words[column.required]} | "
                f"{column.doc.replace('|', chr(92) + '|')}{allowed} |"
            )
    lines += ["", "## Phases", "", "Phases of the table `timings`:", "", "| phase | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {doc} |" for name, doc in PHASES.items()]
    lines += ["", "## Left out", "", "The columns of bytes and entries do not show:", ""]
    lines += [f"- {what}" for what in LEFT_OUT]
    lines += [
        "",
        "## Slim rows",
        "",
        "Rows in git are slim (`mmkv-bench pack <rows> --slim`). No table needs the values that they lack. `make results "
        "RESULTS=runs/full PACK=` runs the cells again and makes full rows.",
        "",
        "| column | in a slim row |",
        "|---|---|",
        *(f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {doc} |" for names, doc in SLIM.items()),
        "",
        "## Published rows",
        "",
        "Full rows are published as a release asset or a hub dataset. `mmkv-bench pack <rows> --publish <folder>` packs them and "
        "copies the files into one flat folder, with their sizes and sha256 in a `manifest.json`. Upload that folder as it is.",
        "",
        "`mmkv-bench fetch <address> --out <folder>` reads a folder, a web server (the address of a release's assets) or "
        "`hf://datasets/<owner>/<name>@<revision>`. It checks every file before it keeps it, fetches only missing files when it "
        "is run again, and never mixes them with other rows. Announce the address together with the manifest's checksum, which "
        "`--publish` prints and `fetch --sha256` checks. No full rows are published yet.",
        "",
        "## Fallbacks",
        "",
        "Names that built-in methods write into `fallback`; your own parts may write others.",
    ]
    lines += ["", "| name | meaning |", "|---|---|", *(f"| `{name}` | {doc} |" for name, doc in FALLBACKS.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(markdown() + "\n")
