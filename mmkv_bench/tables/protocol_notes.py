"""What a table's protocol lets its scores test, in words: how much of an answer the methods could change at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmkv_bench.protocols import protocol
from mmkv_bench.tables.free_tokens import MOSTLY
from mmkv_bench.tables.rows import BASELINE

if TYPE_CHECKING:
    from mmkv_bench.tables.score_table import ScoreTable


def mostly_free(table: ScoreTable) -> bool:
    """Whether at least half of what the answers say comes from the full prefill, whatever a method keeps."""
    return table.free is not None and table.free >= MOSTLY and _compressed(table)


def tested(table: ScoreTable) -> list[str]:
    """At most one line: the protocol's own caveat, or the share of the answers that is free; none for `full` alone."""
    if not _compressed(table):
        return []
    name = table.context["protocol"]
    caveat = protocol(name).caveat
    if caveat is not None:
        return [f"protocol={name}: {caveat}"]
    if table.free is None:
        return []
    mark = "mostly free: " if mostly_free(table) else ""
    return [
        f"{mark}{table.free:.0%} of the tokens of full's answers (mean over answers, without the ending that all of them "
        f"share) come from the full prefill under protocol={name}, whatever a method keeps; the scores test the rest."
    ]


def _compressed(table: ScoreTable) -> bool:
    return any(method.base != BASELINE for method in table.methods)
