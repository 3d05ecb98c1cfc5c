"""Promise: samples that were asked for by id are counted, said, and compared with nothing, unless a limit has them anyway."""

from __future__ import annotations

from mmkv_bench.store.store import Store
from mmkv_bench.tables.build import build
from mmkv_bench.tables.stored_rows import load
from tests.tables.examples import Example, markdown, zeros_and_ones


def test_cells_with_chosen_samples_say_so_and_do_not_compete(tmp_path):
    made = Example()
    made.add("full", None, zeros_and_ones(20, 20))
    made.add("mmshift", 64, zeros_and_ones(18, 20))
    made.add("snapkv", 64, zeros_and_ones(20, 20), answer={"chosen": True})
    made.add("keydiff", 64, zeros_and_ones(2, 20))
    for row in made.responses[-20:]:
        row["chosen"] = True if row["doc_id"] in (3, 19) else None
    (table,) = build(load(made.write(tmp_path / "rows")))
    text = markdown([table])
    assert "are not compared: keydiff at 64 (1 of 20); snapkv at 64 (20 of 20)." in text, (
        "s003 is inside of keydiff's limit"
    )
    assert table.columns["64"].names == ("mmshift",)

    with Store(tmp_path / "rows").writer("later") as writer:
        last = made.responses[-1] | {"sample_id": "s020", "doc_id": 20, "chosen": None}
        writer.commit([last])
    (table,) = build(load(tmp_path / "rows"))
    assert "keydiff at 64" not in "".join(line for line in markdown([table]).splitlines() if "chosen by id" in line)


def test_rows_that_nobody_chose_are_read_as_before(tmp_path):
    made = Example()
    made.add("full", None, zeros_and_ones(3, 4))
    assert "chosen" not in load(made.write(tmp_path / "rows")).responses
