"""All columns of the row schema as a page: `python -m tools.rows_page` writes docs/rows.md."""

from __future__ import annotations

from pathlib import Path

from mmkv_bench.store.schema import COLUMNS, FALLBACKS, PHASES, SCHEMA_VERSION, SLIM

PAGE = Path(__file__).parents[1] / "docs" / "rows.md"

LEFT_OUT = (
    "Batches: forks that decode together are padded to the longest of the batch and share one reserve. Bytes are those of the "
    "fork by itself, as `sharing=off` holds them.",
    "Scores: what the prefill's scores take while the prompt is reduced; they are gone when the answer begins, but for those "
    "that a decode policy goes on with (`h2o_decode`, MEDA's release), which are in `bytes_held`.",
    "Growth: what decoding adds. `bytes_held` has the slots for it, `entries_end` counts it; a policy's buffers that grow "
    "entry by entry (`h2o_decode`) are counted as they are when the answer begins.",
    "Copies of a step: keys and values that KIVI unpacks for the attention kernel.",
    "Positions: `bytes_read_step` is K and V; int32 positions, which make the mask, are in `bytes_metadata`.",
)
"""What no column of bytes or entries shows, in words; the columns for it come with a schema of their own."""

ABOUT = {
    "responses": "One row per cell and sample: the answer, how it ended, what was kept, what it cost.",
    "cells": "One row per cell: what was asked, and under which code, versions and device it first ran.",
    "samples": "One row per cell, sample and metric.",
    "metrics": "One row per cell and metric.",
    "timings": "`scenario=efficiency`: one row per cell, prompt length, batch, pass and phase; raw, nothing is averaged.",
    "diagnostics": "`mmkv-bench diagnose`: what an analysis found in each layer of each sample's prompt; of no cell.",
    "prompts": "One row per prompt and model, written with its first answer: what was asked, for people who look at answers. "
    "Older rows have none. Questions are their datasets': `pack` leaves the files as they are, `--publish` leaves them out.",
}


def markdown() -> str:
    """All columns as markdown tables, one section per table."""
    lines = [
        f"Row schema, version {SCHEMA_VERSION}. Every table is a folder of parquet files of the result store. Where a cell's "
        "scores stand in several, `together-…` (many cells scored at once; the newest first) counts before `<cell>`, and "
        "that before `packed-…`; answers are told apart by `committed_at`. `.index/` is a cache of `mmkv-bench status` that may "
        "be deleted."
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
    lines += ["", "## Phases", "", "Of the table `timings`:", "", "| phase | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {doc} |" for name, doc in PHASES.items()]
    lines += ["", "## Left out", "", "What the columns of bytes and entries do not show:", ""]
    lines += [f"- {what}" for what in LEFT_OUT]
    lines += [
        "",
        "## Slim rows",
        "",
        "Rows in git are slim (`python -m mmkv_bench pack <rows> --slim`): no table reads what they leave out, and "
        "running the cells again makes it again (`make results RESULTS=runs/full PACK=`).",
        "",
        "| column | in a slim row |",
        "|---|---|",
        *(f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {doc} |" for names, doc in SLIM.items()),
        "",
        "## Published rows",
        "",
        "Full rows are published as a release asset or a hub dataset: `mmkv-bench pack <rows> --publish <folder>` packs them and "
        "copies the files, flat, beside a `manifest.json` of their sizes and sha256; that folder is uploaded as it is. "
        "`mmkv-bench fetch <address> --out <folder>` takes them from a folder, a web server (the address under which a release "
        "has its assets) or `hf://datasets/<owner>/<name>@<revision>`, checks every file before it gets its name, fetches only "
        "what is missing when it is run again, and never mixes them with other rows. `--sha256`, the manifest's checksum that "
        "`--publish` printed, belongs beside the address wherever it is announced. No full rows are published yet.",
        "",
        "## Fallbacks",
        "",
        "What built-in methods write into `fallback`; a user's own parts may give other names.",
    ]
    lines += ["", "| name | meaning |", "|---|---|", *(f"| `{name}` | {doc} |" for name, doc in FALLBACKS.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(markdown() + "\n")
