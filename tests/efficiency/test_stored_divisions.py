"""Promise: with random weights a method that divides its budget by the prompt divides it as a stored row of a real prompt did,
entry by entry; without such a row it is refused with the reason."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch

from mmkv_bench.compression.allocators.head_pool import HeadPool
from mmkv_bench.compression.allocators.replayed import Replayed
from mmkv_bench.config.compose import compose
from mmkv_bench.config.files import conf_dir
from mmkv_bench.efficiency.measure import Bench
from mmkv_bench.efficiency.plan import plan_passes
from mmkv_bench.efficiency.prompts import visual_prompt
from mmkv_bench.errors import MMKVError
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.models.source import Source
from mmkv_bench.plan.validate import validate
from mmkv_bench.store.store import Store
from tests.each import each
from tests.run.setting import done

RANDOM = ["model=qwen2_5_vl_3b", "model.weights=random", "model.layers=4", "model.dtype=float32"]
METHODS = "method=[adakv,meda]"
ROWS = conf_dir().parent / "results" / "tiny" / "readings"
"""Committed rows of real prompts of the embedded model, which has four layers of two KV heads."""


def composed(*words: str):
    config = compose(
        ["scenario=efficiency", "budget=32", "lengths=150", "repeats=1", "new_tokens=3", "model.device=cpu", *words]
    )
    validate(config)
    return config


@pytest.mark.full
def test_what_a_timed_pass_keeps_is_the_profile_scaled_to_the_prompt():
    plan = plan_passes(composed(*RANDOM, METHODS, f"profiles={ROWS}", "budget=32", "prompts=image"))
    assert [cell.base for cell in plan.cells] == ["full", "adakv", "meda"]
    loaded = Source.of(compose(["model.device=cpu"]).model).load()  # of the same shape, and small
    bench, prompt = Bench(loaded, 3), visual_prompt(loaded, "image", 300)
    for cell in plan.cells[1:]:
        profile = plan.profiles[cell.cell]
        stored = Store(ROWS).responses([profile.cell], ("sample_id", "kept")).to_pylist()
        (row,) = [one for one in stored if one["sample_id"] == profile.sample]
        assert [list(layer) for layer in profile.kept] == row["kept"] and profile.digest in json.dumps(
            cell.config_additions()
        )
        held = bench.measure_times([prompt], CellSpec(cell.cell, cell.compressor, cell.budget)).held
        slot = 2 * loaded.family.head_dim * 4
        assert held.useful == (sum(map(sum, row["kept"])) + 4 * 2) * slot, (
            "the same C: the same entries, and the step's own"
        )
        allocator = cell.compressor.allocator
        assert isinstance(allocator, Replayed) and allocator.divide(32, 299) == row["kept"]
    assert len({profile.digest for profile in plan.profiles.values()}) == 2
    own = plan_passes(composed(METHODS, "prompts=image")).cells
    assert not {cell.cell for cell in own} & set(plan.profiles)


def test_a_division_is_scaled_exactly_and_what_a_head_cannot_hold_goes_to_the_others():
    kept, entries = ((10, 30), (5, 15)), 15
    replayed = Replayed(HeadPool(), kept, entries)
    for budget, candidates in ((15, 100), (30, 100), (7, 100), (40, 60), (59, 60)):
        found = replayed.divide(budget, candidates)
        flat = [count for layer in found for count in layer]
        assert sum(flat) == min(60 * budget // entries, 4 * candidates) and max(flat) <= candidates
        if max(flat) < candidates:
            assert all(abs(n - Fraction(k * budget, entries)) < 1 for n, k in zip(flat, (10, 30, 5, 15), strict=True))
    scores = [torch.rand(2, 50), torch.rand(2, 50)]
    caps = replayed.caps(scores, 15, [0, 1], 2)
    assert [cap.tolist() for cap in caps] == [[10, 30], [5, 15]]
    assert replayed.allowance(15, 50, [0], 2) == 20 and replayed.allowance(15, 50, [0, 1], 2) == 30


@pytest.mark.full
@each(
    "words, said",
    [
        (
            [*RANDOM, "method=adakv"],
            "method adakv divides its budget by the prompt's scores (HeadPool)",
        ),
        ([*RANDOM, "method=adakv"], "allowed: profiles=<folder of its rows of real prompts>, or real weights"),
        ([*RANDOM, "method=adakv", "profiles=nowhere"], "profiles=nowhere is not a folder"),
        (
            [*RANDOM, "method=adakv", "budget=48", "profiles={ROWS}"],
            "needs rows of adakv@48 with the same parameters",
        ),
        ([*RANDOM, "method=adakv", "methods.adakv.alpha=0.5", "profiles={ROWS}"], "has no such rows"),
        (
            [*RANDOM, "model.layers=3", "method=adakv", "profiles={ROWS}"],
            "no row with 3 layers of 2 KV heads and a prompt longer than the budget",
        ),
        ([*RANDOM, "method=hybridkv", "prompts=image", "profiles={ROWS}"], "not which heads are dynamic"),
        ([*RANDOM, "method=hybridkv", "prompts=image"], "not which heads are dynamic"),
        ([*RANDOM, "method=snapkv", "profiles={ROWS}"], "is not used by any method of this run"),
        (["method=adakv", "profiles={ROWS}"], "is not used by any method of this run"),
    ],
)
def test_a_division_that_nothing_tells_is_refused_in_one_sentence(words, said):
    with pytest.raises(MMKVError) as caught:
        plan_passes(composed(*(word.replace("{ROWS}", str(ROWS)) for word in words)))
    assert said in str(caught.value)


@pytest.mark.full
def test_rows_of_passes_name_the_profile(tmp_path):
    asked = [*RANDOM[:3], "model.dtype=float32", "method=adakv", "budget=32", f"profiles={ROWS}"]
    done(tmp_path, "scenario=efficiency", "lengths=64", "repeats=1", "new_tokens=3", *asked)
    found = {(row["cell"], row["profile"]) for row in Store(tmp_path).timings().to_pylist()}
    assert len(found) == 2 and sum(profile is None for _, profile in found) == 1
