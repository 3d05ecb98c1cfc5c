"""What a table's protocol lets its scores test, in words: how much of an answer the methods could change at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmkv_bench.tables.free import MOSTLY
from mmkv_bench.tables.rows import BASELINE

if TYPE_CHECKING:
    from mmkv_bench.tables.table import Table


def mostly_free(table: Table) -> bool:
    """Whether at least half of what the answers say comes from the full prefill, whatever a method keeps."""
    return table.free is not None and table.free >= MOSTLY and _compressed(table)


def tested(table: Table) -> list[str]:
    """At most one line: the share of the answers that is free, or what `strict` leaves free; none for `full` alone."""
    if not _compressed(table):
        return []
    protocol = table.context["protocol"]
    if protocol == "strict":
        return [
            "protocol=strict: every answer token is decoded from the compressed cache, whose entries were computed by the "
            "full prefill: what they took up from evicted entries stays."
        ]
    if table.free is None:
        return []
    mark = "mostly free: " if mostly_free(table) else ""
    return [
        f"{mark}{table.free:.0%} of the tokens of full's answers (mean over answers, without the ending that all of them "
        f"share) come from the full prefill under protocol={protocol}, whatever a method keeps; the scores test the rest."
    ]


def _compressed(table: Table) -> bool:
    return any(method.base != BASELINE for method in table.methods)
