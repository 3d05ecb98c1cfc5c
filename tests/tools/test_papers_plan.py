"""Promise: a table's plan has exactly its cells, at the lengths that papers print and the shares that were measured."""

from __future__ import annotations

import re

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.config.files import conf_dir
from mmkv_bench.papers.layout import load
from mmkv_bench.plan.planner import outline
from tools.papers_plan import SHARES, PlanDevice, loads, plan_text, total

H100 = PlanDevice()


@pytest.mark.slow
def test_a_plan_has_exactly_the_cells_of_its_table(tmp_path):
    """FlashCache Table 4 has an experiment of its own; of the 29 cells that plan MM-ShiftKV Table 12's numbers, 9 are its own:
    three settings of three seeds."""
    (one,) = loads([load("flashcache_table04")], H100)
    (part,) = outline(compose(["experiment=papers/flashcache_favor", f"out={tmp_path}"])).parts
    assert (one.dataset, one.cells, one.samples) == (part.dataset, len(part.cells), 8184)
    (own,) = loads([load("mmshift_table12")], H100)
    assert (own.cells, own.samples) == (9, 1000)
    both = loads([load("mmshift_table12"), load("mmshift_table11")], H100)
    apart = sum(one.cells for name in ("mmshift_table12", "mmshift_table11") for one in loads([load(name)], H100))
    assert sum(one.cells for one in both) < apart, "the default stands in both tables and runs once"
    assert plan_text([load("mmshift_table12")], H100).splitlines()[5].startswith("| all ")
    assert "cells are of diagnostics" in plan_text([load("mmshift_fig04")], H100)


@pytest.mark.slow
def test_hours_are_at_printed_lengths_and_add_up():
    found = {one.dataset: one for one in loads([load("mmshift_table01")], H100)}
    assert {name: (one.tokens, one.source) for name, one in found.items() if name in ("docvqa", "ocrbench", "mmmu")} == {
        "docvqa": (4830, "printed"), "ocrbench": (1245, "printed"), "mmmu": (2048, "assumed"),
    }  # fmt: skip
    videos = loads([load("hybridkv_table02")], H100)
    assert {one.tokens for one in videos if one.model == "qwen2_5_vl_7b"} == {30168}
    (timed,) = loads([load("meda_table06")], H100)
    assert (timed.tokens, timed.new_tokens, timed.cells) == (4430, 535, 5)
    least, expected = total(list(found.values()))
    assert least == pytest.approx(sum(one.prefill + one.decode for one in found.values()))
    assert expected == pytest.approx(sum(one.prefill / SHARES[0] + one.decode / SHARES[1] for one in found.values()))
    slow = total(loads([load("mmshift_table01")], PlanDevice(H100.bandwidth / 2, H100.rate / 2)))[0]
    assert slow == pytest.approx(2 * least)


def test_the_shares_are_those_of_the_committed_measurements():
    pages = {
        name: (conf_dir().parent / "results" / "bench" / f"{name}.md").read_text(encoding="utf-8")
        for name in ("fork", "decode")
    }
    names = ("encode (template, images)", "vision tower", "prefill of the text model")
    before = [float(re.search(rf"{re.escape(name)} \| ([\d.]+)", pages["fork"])[1]) for name in names]
    step = float(re.search(r"819, by heads, step, ours \| [\d.]+ \| [\d.]+ \| ([\d.]+)", pages["decode"])[1])
    assert (round(before[2] / sum(before), 2), step) == SHARES
