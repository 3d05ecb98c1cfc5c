"""A method whose numbers changed runs again, and no other does."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.config.compose import compose
from mmkv_bench.plan.cells import Cell, DatasetIdentity, expand, method_entries
from tests.each import each
from tests.plan.setting import cells, facts

PAGES = {"small": "73fea638b266e689", "large": "2a9c0b454bb39abf"}
GENERATION = {"do_sample": False, "max_new_tokens": 24, "until": []}

UNCHANGED = {
    ("readings", "large"): {
        ("full", None): "bf826f1915f2d0dd",
        ("local", "paper"): "58e834f6946dc2d7",
        ("snapkv", "released"): "c002808216f2c531",
        ("pyramidkv", "paper"): "648d65a9ea05c6e1",
        ("adakv", "paper"): "05d1d58855e6e09a",
        ("adakv", "released"): "f993c8f4b9939c36",
        ("sparsemm", "paper"): "58733b46a7ddc028",
        ("keydiff", "released"): "239e7456ae89c82e",
        ("h2o", "paper"): "9dc7c4651bf4fb6d",
        ("look_m", "released"): "5be5b65e62788ed8",
        ("meda", "released"): "1be4f3bd522eeb46",
        ("mmshift", "released"): "b2e3bedbc5fea1ff",
        ("prefixkv", "paper"): "3c1a19a836e39c72",
        ("kivi", "paper"): "0d0be1f174880932",
    },
    ("ablations", "small"): {
        ("look_m_no_merge", "paper"): "68fb0650235e1e68",
        ("meda_neither", "paper"): "508d2eb03d7da4ae",
        ("prefixkv_feature", "paper"): "70cfb914a1e1fb64",
        ("flashcache_uniform", "paper"): "a2beb7393d26c57f",
        ("madakv", "paper"): "fd2e07c69153ae7e",
        ("kivi4", "paper"): "84bfd68ca393a393",
    },
    ("mmshift_ablations", "large"): {
        ("last_query", "paper"): "cd793578500e2cc1",
        ("t12_lambda_0", "paper"): "60c8f07b8fed65e1",
    },
}
"""Hashes of committed cells (`results/tiny`): pages_walk, 64 entries, protocol paper, seed 0."""


def committed(experiment: str, size: str) -> list[Cell]:
    """The cells of an experiment's walk over pages, as the committed run made them."""
    config = compose(["model=tiny", f"experiment={experiment}", f"page_size={size}", "budget=64", "seed=0"])
    label = f"pages_walk_{size}"
    config = config.updated(datasets={label: config.datasets["pages_walk"]})
    known = DatasetIdentity(PAGES[size], {"task": label, "size": size, "split": "test"}, GENERATION)
    world = facts(label, model_fingerprint="6d8af26e5ffd7704", dataset_identity=known)
    return expand(config.grid, world, method_entries(config.method_config))[0]


@pytest.mark.full
@each("run", UNCHANGED)
def test_cells_of_methods_that_did_not_change_keep_their_committed_hashes(run):
    made = {(cell.method, cell.reading): cell for cell in committed(*run)}
    for name, wanted in UNCHANGED[run].items():
        assert (made[name].cell, made[name].method_version) == (wanted, None), name


def test_a_new_version_of_a_part_makes_new_cells_of_its_method_alone(monkeypatch):
    before = {cell.method: cell for cell in cells("method=[full,snapkv,keydiff]")}
    monkeypatch.setattr(WindowScorer, "method_version", lambda part, method: 2)
    after = {cell.method: cell for cell in cells("method=[full,snapkv,keydiff]")}
    assert [name for name in before if before[name].cell != after[name].cell] == ["snapkv"]
    assert {name: cell.row()["method_version"] for name, cell in after.items()} == {
        "full": None,
        "snapkv": 2,
        "keydiff": None,
    }


def test_a_released_profile_that_is_read_at_the_fraction_is_another_version_at_fractions_alone():
    asked = ("model=tiny", "method=prefixkv", "reading=[paper,released]", "budget=[64,10%]", "baseline=none")
    made = cells(
        *asked, facts_=facts("pages", model_fingerprint="6d8af26e5ffd7704")
    )  # the embedded model has a profile
    assert [cell.method_version for cell in made] == [None, None, 2, 3]


@pytest.mark.slow
def test_rounding_to_the_models_dtype_is_a_parameter_in_half_precision_alone():
    """Where there is nothing to round to it stands in no row and no hash: float32 cells stay what they are."""
    methods = "method=[snapkv,keydiff,adakv,adakv_official,pyramidkv,snapkv_kvpress]"
    for dtype, wanted in (("float32", None), ("bfloat16", "model"), ("float16", "model")):
        known = facts("pages", dtype=dtype)
        made = {(cell.method, cell.reading): cell for cell in cells(methods, "reading=[paper,released]", facts_=known)}
        for (name, reading), cell in made.items():
            said = json.loads(cell.parameters).get("score_rounding")
            assert (said, cell.tuned) == (wanted if reading == "released" else None, False), (dtype, name)
        plain = cells("method=snapkv", "methods.snapkv.score_rounding=model", facts_=known)[1]
        assert (plain.cell == made["snapkv", "paper"].cell, plain.tuned) == (wanted is None, wanted is not None)


@pytest.mark.slow
def test_formulas_over_the_budget_are_named_in_their_rows_and_no_other_is():
    runs = {
        "look_m": "methods.look_m.budget_rule=union",
        "meda": "methods.meda.budget_rule=union",
        "hybridkv": "methods.hybridkv.power=up",
    }
    for method, option in runs.items():
        plain, over = (cells(f"method={method}", "baseline=none", *more)[0] for more in ((), (option,)))
        assert [json.loads(cell.parameters).get("over_budget") for cell in (plain, over)] == [None, True], method


def test_every_later_change_of_any_part_is_another_version(monkeypatch):
    """The maximum of the parts' versions would not tell scorer 3, allocator 1 from scorer 3, allocator 2."""
    found = []
    for scorer, allocator in ((1, 1), (2, 1), (3, 1), (3, 2), (3, 3)):
        monkeypatch.setattr(WindowScorer, "method_version", lambda part, method, v=scorer: v)
        monkeypatch.setattr(Uniform, "method_version", lambda part, method, v=allocator: v)
        found.append(cells("method=snapkv", "baseline=none")[0])
    assert [cell.method_version for cell in found] == [None, 2, 3, 4, 5]
    assert len({cell.cell for cell in found}) == 5
