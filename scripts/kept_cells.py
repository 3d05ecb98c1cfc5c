"""Count what methods keep of a page: shares of kept visual entries that are entry cells, distractors and blanks.

    python scripts/kept_cells.py --samples 100 --out results/tiny/kept_cells.md

Reads development pages only. An entry cell belongs to a fact (`K384q`), a distractor is any other glyph, the rest is
blank. `needed` is the kept share of the cells that the question needs, averaged over layers and KV heads.
"""

from __future__ import annotations

import argparse
from pathlib import Path

METHODS = ("random", "snapkv", "keydiff", "expected_attention", "mmshift")


def cell_kinds(document) -> tuple:
    """Return bool arrays over the page's cells in reading order: entry cells, blanks."""
    import numpy as np

    from mmkv_bench.tiny.layout import BLANK, ENTRY_LENGTH

    grid = document.grids[0]
    entry = np.zeros(grid.shape, bool)
    for row, column in np.argwhere((grid >= ord("A")) & (grid <= ord("Z"))):
        entry[row, column : column + ENTRY_LENGTH] = True
    return entry.reshape(-1), (grid == BLANK).reshape(-1)


def needed_cells(document, turn) -> list[int]:
    """Return the reading-order positions of the cells with the chain that the question needs."""
    import numpy as np

    from mmkv_bench.tiny.layout import ENTRY_LENGTH

    grid, keys = document.grids[0], {key for key, _ in turn.sources}
    return [
        row * grid.shape[1] + column + offset
        for row, column in np.argwhere(np.isin(grid, [ord(key) for key in keys]))
        for offset in range(ENTRY_LENGTH)
    ]


def measure(samples: int, budgets: list[int], size: str) -> list[dict]:
    """Return one row per method and budget: mean shares over samples, layers and KV heads."""
    import numpy as np
    import torch
    from PIL import Image

    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.session import Session
    from mmkv_bench.config.compose import method_defaults
    from mmkv_bench.config.schema import Model, resolve_path
    from mmkv_bench.generation.encode import encode
    from mmkv_bench.generation.forks import plan
    from mmkv_bench.generation.meter import Meter
    from mmkv_bench.generation.prefill import prefill
    from mmkv_bench.generation.result import CellSpec, ForkResult
    from mmkv_bench.methods.build import build_compressor
    from mmkv_bench.models.load import load_model
    from mmkv_bench.protocols import DEFAULT, protocol
    from mmkv_bench.tiny.pages import make_page

    loaded = load_model(
        Model(name="tiny", dtype="float32", device="cpu"), resolve_path("pkg://mmkv_bench/tiny/weights")
    )
    nodes = method_defaults(METHODS)
    cells = [
        CellSpec(f"{name}@{budget}", build_compressor(name, nodes[name], "paper"), Budget.parse(budget))
        for name in METHODS
        for budget in budgets
    ]
    found: dict[str, list[tuple]] = {cell.cell: [] for cell in cells}
    base = []
    with Session(loaded.model) as session:
        for index in range(samples):
            document, turn, images = make_page("walk3", size, "dev", index)
            entry, blank = cell_kinds(document)
            needed = needed_cells(document, turn)
            base.append((entry.mean(), (~entry & ~blank).mean(), blank.mean()))
            content = [{"type": "image"}, {"type": "text", "text": turn.question}]
            prompt = encode(
                loaded.processor,
                loaded.family,
                f"walk3-{size}-dev-{index}",
                [{"role": "user", "content": content}],
                [Image.fromarray(image) for image in images],
            )
            prefilled = prefill(
                session,
                prompt,
                cells,
                {DEFAULT: protocol(DEFAULT).lengths(prompt.length)},
                Meter(torch.device("cpu")),
                1,
            )
            first = int((prompt.types[0] > 0).nonzero()[0])
            for cell in cells:
                fork = plan(prefilled, cell, ForkResult(cell.cell))
                chosen = fork.chosen
                kept = np.zeros((len(chosen), chosen[0].shape[0], prompt.length), np.bool_)
                for layer, rows in enumerate(chosen):
                    for head, row in enumerate(rows):
                        kept[layer, head, row[row >= 0].numpy()] = True
                visual = kept[..., first : first + entry.size]
                total = max(visual.sum(), 1)
                found[cell.cell].append(
                    (
                        visual[..., entry].sum() / total,
                        visual[..., ~entry & ~blank].sum() / total,
                        visual[..., blank].sum() / total,
                        visual.sum() / kept.sum(),
                        visual[..., needed].mean(),
                    )
                )
    names = ("entry", "distractor", "blank", "visual", "needed")
    whole = {"cell": "all cells of the page", **dict(zip(names[:3], np.mean(base, 0), strict=True))}
    return [whole, *({"cell": name, **dict(zip(names, np.mean(v, 0), strict=True))} for name, v in found.items())]


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("--samples", type=int, default=100)
    command.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256])
    command.add_argument("--size", choices=("small", "large"), default="large")
    command.add_argument("--out", type=Path)
    arguments = command.parse_args()
    rows = measure(arguments.samples, arguments.budgets, arguments.size)
    lines = [
        f"{arguments.samples} {arguments.size} development pages (walk3), embedded model, protocol paper.",
        "",
        "| kept by | entry cells | distractors | blanks | visual share of kept | needed cells kept |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        values = [f"{row[k]:.2f}" if k in row else "" for k in ("entry", "distractor", "blank", "visual", "needed")]
        lines.append(f"| {row['cell']} | {' | '.join(values)} |")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
