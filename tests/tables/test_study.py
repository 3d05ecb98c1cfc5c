"""Promise: a study's primary endpoint is named once, before it is looked at, and tables mark the rest as exploratory."""

from __future__ import annotations

import resource
import signal
from contextlib import contextmanager

import pytest

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.store.store import Store
from mmkv_bench.store.store_notes import PrimaryEndpoint, name_primary, primary_of
from mmkv_bench.tables.build import build
from mmkv_bench.tables.stored_rows import load
from tests.tables.examples import Example, markdown, zeros_and_ones

WORDS = "walk3 exact_match 64"


@contextmanager
def full_disk():
    """No file of this process may grow."""
    before, old = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


@pytest.mark.slow
def test_tables_say_where_the_primary_endpoint_is_and_that_the_rest_is_exploratory(tmp_path):
    made = Example()
    made.add("full", None, zeros_and_ones(19, 20))
    for budget, right in ((64, (2, 18)), (128, (4, 18))):
        for method, ones in zip(("random", "snapkv"), right, strict=True):
            made.add(method, budget, zeros_and_ones(ones, 20))
    root = made.write(tmp_path)
    assert primary_of(root) is None and "xploratory" not in markdown(build(load(root)))
    name_primary(root, WORDS)
    name_primary(root, f"{WORDS} paper")
    assert primary_of(root) == PrimaryEndpoint("walk3", "exact_match", "64") and primary_of(root).late
    wanted = "- Primary endpoint of this study (named after its answers were made): column 64. All else"
    assert wanted in markdown(build(load(root)))
    (tmp_path / "new").mkdir()
    Store(tmp_path / "new").prepare()
    name_primary(tmp_path / "new", WORDS)
    assert not primary_of(tmp_path / "new").late
    with pytest.raises(StoreError, match="another folder"):
        name_primary(root, "walk3 exact_match 128")
    with pytest.raises(ConfigError, match="2 words"):
        PrimaryEndpoint.parse("walk3 exact_match")
    full = made.write(tmp_path / "full")
    with full_disk(), pytest.raises(StoreError, match="naming the primary endpoint"):
        name_primary(full, WORDS)
    assert primary_of(full) is None
    other = made.write(tmp_path / "other")
    name_primary(other, "walk3 anls 64 strict")
    wanted = "- Exploratory: the primary endpoint of this study is anls of walk3 at 64 (protocol=strict)."
    assert wanted in markdown(build(load(other)))


def test_the_budget_of_an_endpoint_is_spelt_as_tables_spell_it():
    assert {PrimaryEndpoint.parse(f"walk3 exact_match {text}").budget for text in ("0.2", "0.20", "20%", ".2")} == {
        "0.2"
    }
    assert PrimaryEndpoint.parse("walk3 exact_match 064").budget == "64"
