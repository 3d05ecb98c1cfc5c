"""What a run consists of, and what a cell's hash covers."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.compression.budget import StateCost
from mmkv_bench.errors import CalibrationError, ConfigError
from mmkv_bench.plan import cells as cells_module
from mmkv_bench.plan.cells import DatasetIdentity
from mmkv_bench.store.schema import CELL_COLUMNS
from tests.each import each
from tests.plan.setting import cells, facts, hashes, plan


def one(*overrides: str, **kwargs):
    """The only cell of a run without baseline."""
    (cell,) = cells("baseline=none", *overrides, **kwargs)
    return cell


def test_full_is_added_first_to_every_run_and_only_once():
    assert [cell.method for cell in cells("method=snapkv")] == ["full", "snapkv"]
    assert [cell.method for cell in cells("method=[snapkv,full]")] == ["full", "snapkv"]
    assert [cell.method for cell in cells("method=snapkv", "baseline=none")] == ["snapkv"]
    assert [cell.method for cell in cells("method=full", "baseline=none")] == ["full"]


def test_full_is_added_for_each_protocol_and_dataset():
    made = cells("method=snapkv", "protocol=[paper,strict]", "dataset=[pages_walk,pages_lookup]")
    full = [(cell.dataset, cell.protocol) for cell in made if cell.method == "full"]
    assert full == [
        ("pages_walk", "paper"),
        ("pages_walk", "strict"),
        ("pages_lookup", "paper"),
        ("pages_lookup", "strict"),
    ]


def test_full_has_no_budget_seed_or_reading():
    (cell,) = cells("method=full", "budget=[16,32,0.5]", "seed=[0,1,2]", "reading=[paper,released]")
    assert (cell.budget, cell.budget_kind, cell.seed, cell.reading) == (None, "none", None, None)
    assert cell.compressor.is_full


def test_only_stochastic_methods_have_seeds():
    made = cells("method=[random,snapkv,mmshift]", "seed=[0,1,2]", "budget=[16,32]", "baseline=none")
    count = {name: sum(cell.method == name for cell in made) for name in ("random", "snapkv", "mmshift")}
    assert count == {"random": 6, "snapkv": 2, "mmshift": 2} or (
        made[-1].compressor.scorer.stochastic and count == {"random": 6, "snapkv": 2, "mmshift": 6}
    )
    for cell in made:
        assert (cell.seed is not None) == cell.compressor.scorer.stochastic


def test_a_reading_that_changes_nothing_of_a_method_is_said():
    both = "reading=[paper,released]"
    notes = plan("method=[full,blind,snapkv]", both)[1]
    assert notes == [
        "reading=released changes no parameter of blind, whose file has no released values (see docs/methods.md)"
    ]
    assert plan("method=[full,blind,snapkv]", "reading=paper")[1] == []


@pytest.mark.full
@each(
    ("first", "second"),
    [
        ("budget=64", "budget='64'"),
        ("budget=0.2", "budget=20%"),
        ("budget=0.2", "budget='0.20'"),
        ("budget=1.0", "budget=100%"),
        ("methods.mmshift.gamma=3", "methods.mmshift.gamma=3.0"),
        ("methods.mmshift.gamma=10.0", "budget=64"),
        ("methods.mmshift.reading=released", "reading=released"),
        ("seed=0", "seed=[0]"),
    ],
)
def test_two_spellings_of_one_cell_are_one_cell(first, second):
    assert hashes("method=mmshift", first) == hashes("method=mmshift", second)


def test_repeated_budgets_seeds_and_protocols_make_no_further_cells():
    made = cells("method=random", "budget=[64,'64',64]", "seed=[1,1]", "protocol=[paper,paper]")
    assert [cell.method for cell in made] == ["full", "random"]


def test_one_entry_and_everything_are_different_budgets():
    assert one("method=snapkv", "budget=1").cell != one("method=snapkv", "budget=1.0").cell


@each(
    "change",
    [
        "limit=7",
        "shard=1/4",
        "fork_batch=3",
        "fork_memory=1GiB",
        "out=runs/elsewhere",
        "logger=wandb",
        "sharing=off",
        "stage=generate",
        "timeout_s=5",
        "retry=oom",
        "json=true",
        "model.device=cpu",
        "model.threads=2",
        "model.name=other",
        "decode=eager",
    ],
)
def test_the_hash_does_not_cover_how_a_run_is_carried_out(change):
    assert hashes("method=snapkv") == hashes("method=snapkv", change)


@each(
    "change",
    [
        "budget=63",
        "budget=0.5",
        "protocol=strict",
        "reading=released",
        "methods.snapkv.window=16",
        "methods.snapkv.scorer.pool=3",
        "model.attention=eager",
        "decode=compiled",
        "model.max_pixels=1000000",
    ],
)
def test_the_hash_covers_what_changes_answers(change):
    assert one("method=snapkv").cell != one("method=snapkv", change).cell


@pytest.mark.slow
@each(
    "change",
    [
        {"model_fingerprint": "m1"},
        {"dtype": "bfloat16"},
        {"torch": "2.16.0"},
        {"transformers": "5.24.0"},
        {"dataset_identity": DatasetIdentity("d1", {"task": "pages_small"}, {"max_new_tokens": 16})},
        {"dataset_identity": DatasetIdentity("d0", {"task": "pages_large"}, {"max_new_tokens": 16})},
        {"dataset_identity": DatasetIdentity("d0", {"task": "pages_small"}, {"max_new_tokens": 17})},
    ],
)
def test_the_hash_covers_model_data_generation_and_versions(change):
    assert one("method=snapkv").cell != one("method=snapkv", facts_=facts("pages", **change)).cell


def test_the_hash_covers_the_seed_of_stochastic_methods():
    assert one("method=random", "seed=0").cell != one("method=random", "seed=1").cell
    assert one("method=snapkv", "seed=0").cell == one("method=snapkv", "seed=1").cell


def test_the_hash_covers_the_numerics_version(monkeypatch):
    before = one("method=snapkv").cell
    monkeypatch.setattr(cells_module, "NUMERICS_VERSION", cells_module.NUMERICS_VERSION + 1)
    assert one("method=snapkv").cell != before


def test_datasets_with_equal_content_are_still_different_cells():
    made = cells("method=full", "dataset=[pages_walk,pages_lookup]")
    assert len({cell.cell for cell in made}) == 2


def test_adding_a_method_or_a_budget_keeps_all_earlier_cells():
    small = hashes("method=snapkv", "budget=32")
    large = hashes("method=[snapkv,mmshift,random]", "budget=[16,32,20%]", "protocol=[strict,paper]")
    assert small < large


def test_a_variant_is_its_base_under_a_name_of_its_own():
    made = cells("method=mmshift", "variants.g3={base: mmshift, gamma: 3}", "baseline=none")
    assert [(cell.method, cell.base, cell.tuned) for cell in made] == [
        ("mmshift", "mmshift", False),
        ("g3", "mmshift", True),
    ]
    assert json.loads(made[1].parameters)["gamma"] == 3.0
    assert made[1].cell == one("method=mmshift", "methods.mmshift.gamma=3").cell


def test_a_variant_needs_its_base_to_be_no_method_of_the_run():
    made = cells("method=[]", "variants.w8={base: snapkv, window: 8}")
    assert [cell.method for cell in made] == ["full", "w8"]


def test_a_variant_keeps_what_the_run_changed_in_its_base():
    made = cells("method=mmshift", "methods.mmshift.tau=0.9", "variants.g3={base: mmshift, gamma: 3}", "baseline=none")
    assert [json.loads(cell.parameters)["tau"] for cell in made] == [0.9, 0.9]


def test_a_variant_may_have_a_reading_of_its_own():
    made = cells("method=snapkv", "variants.code={base: snapkv, reading: released}", "baseline=none")
    assert [(cell.method, cell.reading) for cell in made] == [("snapkv", "paper"), ("code", "released")]


def test_names_for_the_same_cell_run_once_and_are_told():
    made, notes = plan("method=mmshift", "variants.g10={base: mmshift, gamma: 10}", "baseline=none")
    assert [cell.method for cell in made] == ["mmshift"]
    assert len(notes) == 1
    assert "g10@64" in notes[0]


def test_a_variant_with_the_name_of_a_method_is_refused():
    with pytest.raises(ConfigError, match=r"variants\.mmshift has the name of a method"):
        plan("method=mmshift", "variants.mmshift={base: mmshift, gamma: 3}")


@each(
    ("variant", "words"),
    [
        ("variants.a={base: mmshift, gama: 3}", "no parameter 'gama'; did you mean 'gamma'"),
        ("variants.a={base: mmshift, gamma: wide}", "variants.a.gamma=wide"),
        ("variants.a={gamma: 3}", "names no base"),
        ("variants.keydiff={base: random}", "variants.keydiff has the name of a method but is based on random"),
        ("variants.a={base: mmshft}", "did you mean 'mmshift'"),
        ("variants.a={base: full}", "no parameters to vary"),
        ("variants.a={base: snapkv, reading: code}", "variants.a.reading=code"),
    ],
)
def test_variants_that_cannot_be_are_refused(variant, words):
    with pytest.raises(ConfigError) as refused:
        plan("method=[]", variant)
    assert words in str(refused.value)


def test_tuned_marks_parameters_other_than_the_defaults_of_the_reading():
    assert not one("method=snapkv").tuned
    assert not one("method=snapkv", "reading=released").tuned
    assert one("method=snapkv", "methods.snapkv.window=16").tuned
    assert one("method=snapkv", "methods.snapkv.scorer.pool=3").tuned


def test_released_parameters_apply_under_that_reading_only():
    made = cells("method=snapkv", "reading=[paper,released]", "baseline=none")
    assert {cell.reading: json.loads(cell.parameters)["window"] for cell in made} == {"paper": 32, "released": 1}
    assert {cell.reading: cell.compressor.scorer.window for cell in made} == {"paper": 32, "released": 1}


def test_an_override_that_released_would_undo_is_refused():
    with pytest.raises(ConfigError, match="no effect, because reading=released"):
        plan("method=snapkv", "methods.snapkv.window=16", "reading=[paper,released]")
    assert one("method=snapkv", "methods.snapkv.released.window=2", "reading=released").compressor.scorer.window == 2


def test_a_method_may_have_a_reading_of_its_own():
    made = cells("method=[snapkv,mmshift]", "methods.mmshift.reading=released", "baseline=none")
    assert {cell.method: cell.reading for cell in made} == {"snapkv": "paper", "mmshift": "released"}


def test_a_cell_row_has_the_identity_columns_of_the_schema():
    row = one("method=snapkv").row()
    columns = {column.name for column in CELL_COLUMNS}
    assert set(row) <= columns
    assert {column.name for column in CELL_COLUMNS if column.identity} <= set(row)
    assert json.loads(row["parameters"])["window"] == 32


def test_labels_tell_cells_of_one_dataset_apart():
    made = cells(
        "method=[random,snapkv]", "budget=[16,0.2]", "seed=[0,1]", "protocol=[paper,strict]", "reading=[paper,released]"
    )
    labels = [cell.label for cell in made]
    assert len(set(labels)) == len(labels)
    assert "snapkv@20% strict released" in labels


def test_a_budget_in_bytes_is_the_cell_of_its_entries_and_says_what_was_asked():
    known = facts("pages", cost=StateCost(entry=2048, beside=100_000))
    made, notes = plan("method=snapkv", "budget=1MiB", "baseline=none", facts_=known)
    entries = (2**20 - 100_000) // 2048
    assert [cell.cell for cell in made] == [one("method=snapkv", f"budget={entries}").cell]
    assert (made[0].row()["budget_kind"], made[0].row()["budget_entries"]) == ("entries", entries)
    assert (
        made[0].config_additions() == {"budget_in_bytes": "1MiB"}
        and one("method=snapkv", "budget=64").config_additions() == {}
    )
    assert notes == [
        f"budget=1MiB of all state is {entries} entries per KV head, when 100,000 bytes of windows and recurrent states are paid"
    ]
    with pytest.raises(ConfigError, match="the model's shape"):
        plan("method=snapkv", "budget=1MiB")


def test_what_a_method_without_one_of_its_calibrations_read_enters_no_other_method(monkeypatch):
    class Calibrations:
        def __init__(self):
            self.used = {}

        def taken(self):
            used, self.used = self.used, {}
            return used

    def built(entry, calibrations, dtype):
        if calibrations is not None and entry == "half":
            calibrations.used = {"first_part": "abc"}
            raise CalibrationError("the second part has no calibration")
        return entry, {} if calibrations is None else calibrations.taken()

    monkeypatch.setattr(cells_module, "_build", built)
    lacking: list[str] = []
    assert cells_module.build_methods(["half", "snapkv"], Calibrations(), lacking=lacking) == [
        ("half", {}),
        ("snapkv", {}),
    ]
    assert lacking == ["the second part has no calibration"]
    with pytest.raises(CalibrationError):
        cells_module.build_methods(["half"], Calibrations())
