"""`samples=[id, ...]`: which samples a run has then, and how far its limit reaches."""

from __future__ import annotations

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.errors import ConfigError
from mmkv_bench.evaluation.documents import sample_refs
from mmkv_bench.plan.planner import select_samples, tasks_of, with_limit_for_ids
from mmkv_bench.plan.validate import validate
from tests.each import each

WALK, LOOKUP = "walk3-small-test-000", "lookup-small-test-000"


def asked(*overrides: str) -> list[list[str]]:
    """The samples of each dataset, and the limit."""
    config = compose(["dataset=[pages_walk,pages_lookup]", *overrides])
    specs = tasks_of(config.datasets, config.data)
    selection = with_limit_for_ids(config.selection, specs)
    parts = [
        [ref.sample_id for ref in select_samples(sample_refs(spec, selection.limit), selection)]
        for spec in specs.values()
    ]
    return [*parts, selection.limit]


def test_samples_are_answered_wherever_they_stand():
    names = f"samples=[{WALK}410,{LOOKUP}003,{WALK}002]"
    assert asked(names, "limit=1") == [[f"{WALK}002", f"{WALK}410"], [f"{LOOKUP}003"], 411]
    assert asked("limit=2") == [[f"{WALK}000", f"{WALK}001"], [f"{LOOKUP}000", f"{LOOKUP}001"], 2]


@each(
    ("samples", "words"),
    [
        (f"[{WALK}003]", f"pages_lookup_small has none of these, did you mean '{LOOKUP}003'"),
        (f"[{WALK}003,{LOOKUP}003,{WALK}999]", f"'{WALK}999' is in no dataset of this run; did you mean '{WALK}4"),
        ("[x]", f"its ids go from '{WALK}000' to '{WALK}499'"),
    ],
)
def test_unknown_samples_are_refused_with_the_nearest(samples, words):
    with pytest.raises(ConfigError) as refused:
        asked(f"samples={samples}")
    assert words in str(refused.value)


@each("samples", ["[]", "[3]", "[[a]]"])
def test_what_is_no_name_is_refused_before_any_work(samples):
    with pytest.raises(ConfigError, match="is not a list of sample ids"):
        validate(compose([f"samples={samples}"]))
