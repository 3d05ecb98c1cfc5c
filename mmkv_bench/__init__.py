"""mmkv_bench: a reproducible benchmark harness for KV-cache compression in multimodal LLMs.

The public API, whose names are imported at their first use:

- `attach(model, "snapkv", 64)`: compress the KV cache of a transformers model's prompts, inside a `with` block.
- `method("snapkv", window=16)`: build a method as the compressor that a run would use.
- `evaluate(method="snapkv", budget=64)`: run a configuration as the command does; return the rows of its answers and
  scores.
- `load_rows("runs/default")`: load the rows of a store.
- `make_table(rows)`: make the tables of rows; printed, they look as the command prints them.
- `plot(rows, "front")`: draw the figures of rows, as `mmkv-bench plot` does.
- `paper_tables("mmshift_table01")`: make the papers' tables, with measured numbers beside the printed ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmkv_bench.api.attached_model import attach
    from mmkv_bench.api.pictures import plot
    from mmkv_bench.api.rows import evaluate, load_rows, make_table, paper_tables
    from mmkv_bench.methods.build import method

__version__ = "0.2.0"
__all__ = ["attach", "evaluate", "load_rows", "make_table", "method", "paper_tables", "plot"]

_HOMES = {
    "attach": "mmkv_bench.api.attached_model",
    "evaluate": "mmkv_bench.api.rows",
    "load_rows": "mmkv_bench.api.rows",
    "make_table": "mmkv_bench.api.rows",
    "method": "mmkv_bench.methods.build",
    "paper_tables": "mmkv_bench.api.rows",
    "plot": "mmkv_bench.api.pictures",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
