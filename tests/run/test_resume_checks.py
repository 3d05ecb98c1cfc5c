"""Promise: one cell holds no rows of two kinds of device, of CPU in half precision, or of two versions of lmms-eval."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.errors import StoreError
from mmkv_bench.run.origin_checks import refuse_other_machine
from mmkv_bench.store.store import Store
from tests.run.setting import done


def here(device="cpu", cpu="AMD", lmms_eval="0.7.3"):
    return {"device": device, "cpu": cpu, "versions": json.dumps({"lmms_eval": lmms_eval})}


class Cells:
    """What a store says of its cells."""

    def __init__(self, **columns):
        import pyarrow as pa

        self.root, self.table = "rows", pa.table({name: [value] for name, value in columns.items()})

    def cells(self, cells, columns):
        return self.table.select(columns)


def test_rows_of_another_machine_are_not_added_to_a_cell():
    begun = Cells(**here(), dtype="float32")
    refuse_other_machine(begun, ["c"], here())
    refuse_other_machine(begun, ["c"], here(cpu="Intel"))  # float32 answers are the same
    refuse_other_machine(Cells(**here("A100"), dtype="bfloat16"), ["c"], here("A100", "Intel"))
    half = Cells(**here(), dtype="bfloat16")
    for rows, own, times, words in (
        (begun, here("A100"), False, r"device cpu \(now A100\)"),
        (begun, here(lmms_eval="0.8"), False, r"lmms-eval 0.7.3 \(now 0.8\)"),
        (half, here(cpu="Intel"), False, r"cpu AMD \(now Intel\)"),
        (begun, here(cpu="Intel"), True, r"cpu AMD \(now Intel\)"),
    ):
        with pytest.raises(
            StoreError, match=f"begun under rows with {words}, but a cell's rows must agree.*give another folder"
        ):
            refuse_other_machine(rows, ["c"], own, times)


@pytest.mark.full
def test_a_run_asks_before_it_adds_and_not_where_nothing_is_added(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("mmkv_bench.run.run.refuse_other_machine", lambda store, cells, own: asked.append(set(cells)))
    for methods in ("keydiff", "[keydiff,snapkv]"):
        done(tmp_path, "dataset=pages_lookup", f"method={methods}", "budget=16", "limit=1", "fidelity=off")
    named = {row["cell"]: row["method"] for row in Store(tmp_path).cells(columns=["cell", "method"]).to_pylist()}
    assert [{named[cell] for cell in cells} for cells in asked] == [{"full", "keydiff"}, {"snapkv"}]
