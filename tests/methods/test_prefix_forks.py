"""Forks of PrefixKV's family under the fork engine are what they are alone; prompts within their budget are untouched."""

from __future__ import annotations

import pytest
import torch

from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.decoding.fixed_distance import FixedDistance
from mmkv_bench.compression.reducers.feature_merge import FeatureMerge
from mmkv_bench.compression.reducers.position_merge import PositionMerge
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.methods.build import build_compressor
from tests import cover, reference, zoo
from tests.generation import common
from tests.methods.test_prefix_decoding import FAMILIES, PROFILE, TOKENS, prefixkv, run

every_family = cover.few("name", FAMILIES)


class Profiles:
    """Every method's calibration is the same profile of three layers."""

    def data(self, method: str, spec: str) -> dict:
        return PROFILE


def family_methods() -> list[Compressor]:
    """The files' parts under both readings, and small distances that bite within a short answer."""

    made = []
    for name in ("prefixkv", "prefixkv_uniform", "prefixkv_pyramid", "elastic_cache", "local"):
        for reading in ("paper", "released"):
            built = build_compressor(name, method_defaults([name])[name], reading, calibrations=Profiles())
            made.append(Compressor(f"{name}/{reading}", *parts_of(built), reading, built.decoding))
    made.append(prefixkv(FixedDistance(distance=2), FeatureMerge(), delta=0.05))
    made.append(prefixkv(FixedDistance(distance=2, anchor="prefill", positions="cached"), PositionMerge(), steps=7))
    return made


def parts_of(made: Compressor):
    return made.scorer, made.allocator, made.selector, made.reducer


@pytest.mark.full
@cover.few("name", FAMILIES, first=1)
def test_forks_of_the_family_are_what_they_are_alone(name):
    model, prompt = zoo.model(name), common.encoded(name)
    cells = [
        common.cell(made, budget, protocol, name=f"{i}/{made.name}@{budget}/{protocol}")
        for i, made in enumerate(family_methods())
        for budget, protocol in (("40%", "paper"), (2, "strict"), (9, "query_agnostic"))
    ]
    forks = common.assert_forks_equal_alone(model, name, prompt, cells, common.rules(model, TOKENS))
    for cell, fork in zip(cells, forks, strict=True):
        if cell.compressor.reading == "paper":
            assert fork.entries_resident <= fork.entries_asked
    assert len({tuple(fork.token_ids) for fork in forks}) > len(cells) // 8


def test_the_released_profile_is_read_at_the_fraction_that_was_asked_for_alone_and_in_forks():
    """With 50 % of an odd prompt C / T is less than the profile's 0.5; `strict` counts the token that is fed again."""
    model, prompt = zoo.model("qwen2_5_vl"), common.encoded("qwen2_5_vl")
    assert prompt.length % 2
    built = build_compressor("prefixkv", method_defaults(["prefixkv"])["prefixkv"], "released", calibrations=Profiles())
    cells = [common.cell(built, "50%", protocol) for protocol in ("paper", "strict")]
    forks = common.assert_forks_equal_alone(model, "qwen2_5_vl", prompt, cells)
    want = [prompt.length - round((1 - kept) * prompt.length) for kept in PROFILE["ratios"][1]]
    for fork in forks:
        assert [set(heads) for heads in fork.kept] == [{count} for count in want]


@pytest.mark.slow
@every_family
def test_prompts_within_their_budget_are_the_full_cache_bit_for_bit(name):
    untouched = reference.generate(zoo.model(name), zoo.prompt(name), TOKENS)
    for made in family_methods():
        done, kept, _ = run(name, made, "100%")
        assert torch.equal(done.logits, untouched.logits)
