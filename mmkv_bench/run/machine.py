"""Which machine began the cells of a run: a cell that two kinds of device fill tells nothing of either."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import StoreError
from mmkv_bench.store.cell_rows import processor

if TYPE_CHECKING:
    from mmkv_bench.store.store import Store


def refuse_other_machine(store: Store, cells: Collection[str], own: Mapping[str, Any], times: bool = False) -> None:
    """Compare who began these cells, of which rows are about to be added, with this process; no hash covers it.

    Args:
        own: device, cpu and versions of this process (`provenance.collect`).
        times: what is added are times, to which the kind of CPU matters in any precision.

    Raises:
        StoreError: a cell was begun on another device, in half precision on another kind of CPU, or under another lmms-eval.
    """
    columns = ("device", "cpu", "dtype", "versions")
    for row in store.cells(cells, columns).select(columns).group_by(list(columns)).aggregate([]).to_pylist():
        begun, here = ({"device": one["device"]} for one in (row, own))
        for side, one in ((begun, row), (here, own)):
            side["cpu"] = processor(one["device"], one["cpu"], row["dtype"], times)
            side["lmms-eval"] = json.loads(one["versions"]).get("lmms_eval")
        if begun != here:
            told = ", ".join(f"{name} {begun[name]} (here {here[name]})" for name in begun if begun[name] != here[name])
            raise StoreError(
                f"cells of this run were begun under {store.root} with {told}, and a cell that mixes them tells nothing of "
                "either: continue there, or give another folder (out=<folder>)"
            )
