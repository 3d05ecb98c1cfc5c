"""`evaluate`: a configuration from Python, as the command runs it."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.shorthand import words

if TYPE_CHECKING:
    from mmkv_bench.api.stored import StoredRows


def evaluate(
    *,
    model: str | None = None,
    method: str | list[str] | None = None,
    budget: Any = None,
    dataset: str | list[str] | None = None,
    verbose: bool = False,
    **overrides: Any,
) -> StoredRows:
    """Run what `mmkv-bench run` runs with the same settings, and return the rows.

    Only what is missing in `out` is generated; a finished run just returns its rows.

    Args:
        model, method, budget, dataset: as on the command line, one or a list (`method=["snapkv", "mine.py"]`); None: the
            configuration's own (the embedded model, mmshift, 64 entries, pages).
        verbose: print what the command prints.
        overrides: any key of the configuration: `limit=20`, `out="runs/mine"`, `protocol=["paper", "strict"]`; keys with
            dots as mappings: `methods={"snapkv": {"window": 16}}`.

    Returns:
        The rows of this run's cells, `full` among them: see `load_rows`.

    Raises:
        MMKVError: what would stop the command, with its sentence. Answers that failed stop nothing: their rows have a
            status, and a warning counts them.

    Example:
        >>> rows = evaluate(method=["snapkv", "mmshift"], budget=[16, 64], limit=20)  # doctest: +SKIP
        >>> print(make_table(rows))  # doctest: +SKIP
    """
    from mmkv_bench.api.stored import of_cells
    from mmkv_bench.config.compose import compose
    from mmkv_bench.plan.planner import make_plan
    from mmkv_bench.plan.validate import validate
    from mmkv_bench.run.run import carry_out

    named = {"model": model, "method": method, "budget": budget, "dataset": dataset}
    config = compose(words({key: value for key, value in named.items() if value is not None} | overrides))
    validate(config)
    plan = make_plan(config)
    with contextlib.nullcontext() if verbose else contextlib.redirect_stdout(io.StringIO()):
        code = carry_out(plan)
    rows = of_cells(plan.out, plan.names)
    if code:
        failed = int((rows.responses["status"] != "ok").sum())
        warnings.warn(
            f"{failed} of {len(rows.responses)} answers failed or a dataset was stopped; rows.responses has each one's "
            "status and error",
            stacklevel=2,
        )
    return rows
