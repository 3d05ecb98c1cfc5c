"""PrefixKV's family as configuration: what each file builds, its released reading, and the papers' ablations."""

from __future__ import annotations

import pytest

from mmkv_bench.compression.allocators.prefix import Prefix
from mmkv_bench.compression.allocators.pyramid import Pyramid
from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.decoding.fixed_distance import FixedDistance
from mmkv_bench.compression.decoding.sliding import Sliding
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.reducers.merging import Merging
from mmkv_bench.compression.reducers.position_merge import PositionMerge
from mmkv_bench.compression.scorers.layer_mean import LayerMeanScorer
from mmkv_bench.compression.scorers.recency import RecencyScorer
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.errors import CalibrationError, ConfigError
from mmkv_bench.methods.build import build_compressor
from tests.each import each

NAMES = ("prefixkv", "prefixkv_uniform", "prefixkv_pyramid", "elastic_cache", "local")


def build(name: str, reading: str = "paper", **parameters):
    node = method_defaults([name])[name] | parameters
    return build_compressor(name, node, reading, method_defaults([name])[name])


def parts_of(made):
    return made.scorer, made.allocator, made.selector, made.reducer, made.decoding


ENDS = TopK(sinks=1, recents=1)


@pytest.mark.slow
@each(
    ("name", "reading", "parts"),
    [
        (
            "prefixkv",
            "paper",
            (LayerMeanScorer(), Prefix(calibration="auto"), ENDS, Merging("none"), FixedDistance(distance=25)),
        ),
        (
            "prefixkv",
            "released",
            (
                LayerMeanScorer(),
                Prefix(calibration="auto", rounding="nearest"),
                ENDS,
                Merging("none"),
                FixedDistance(anchor="prefill", positions="cached"),
            ),
        ),
        ("prefixkv_uniform", "paper", (LayerMeanScorer(), Uniform(), ENDS, Merging("none"), FixedDistance())),
        ("prefixkv_pyramid", "paper", (LayerMeanScorer(), Pyramid(window=2), ENDS, Merging("none"), FixedDistance())),
        (
            "elastic_cache",
            "paper",
            (LayerMeanScorer(), Uniform(), ENDS, PositionMerge(), FixedDistance(anchor="prefill")),
        ),
        (
            "elastic_cache",
            "released",
            (
                LayerMeanScorer("permutation"),
                Uniform(unused=1),
                ENDS,
                PositionMerge(shift=1, closed=1),
                FixedDistance(anchor="prefill", positions="cached", slack=1),
            ),
        ),
        ("local", "paper", (RecencyScorer(), Uniform(), ENDS, Evict(), Sliding())),
        ("local", "released", (RecencyScorer(), Uniform(), ENDS, Evict(), Sliding(hold="ratio", positions="cached"))),
    ],
)
def test_a_file_builds_its_method(name, reading, parts):
    assert parts_of(build(name, reading)) == parts


def test_the_ablations_of_the_papers_tables_are_parameters():
    """Tables 4 (files), 5 and 8 (other profiles), 6 (online), 10 (delta), 11 (steps), 12 (merging)."""
    assert build("prefixkv", mode="online").allocator.scope == "model"  # table 6; the profile is not asked for
    assert build("prefixkv", mode="online", calibration=None).allocator.mode == "online"
    assert build("prefixkv", mode="online", delta=0.1).allocator.delta == 0.1
    assert build("prefixkv", mode="online", steps=7).allocator.steps == 7
    assert build("prefixkv", calibration="mine.json").allocator.calibration == "mine.json"
    for metric in ("none", "position", "feature"):
        assert build("prefixkv", merging=metric).reducer.metric == metric
    assert build("prefixkv", distance=10, anchor="prefill", hold="size").decoding == FixedDistance(
        hold="size", distance=10, anchor="prefill"
    )


def test_only_the_offline_mode_reads_a_profile():
    assert Prefix.needs_calibration({}) and Prefix.needs_calibration({"mode": "offline"})
    assert not Prefix.needs_calibration({"mode": "online"})


@each(
    "parameters",
    [
        {"mode": "both"},
        {"merging": "mean"},
        {"anchor": "oldest"},
        {"hold": "none"},
        {"positions": "true"},
        {"delta": -1},
    ],
)
def test_unknown_values_are_refused_by_name(parameters):
    with pytest.raises(ConfigError, match=next(iter(parameters.values())) if "delta" not in parameters else "delta"):
        build("prefixkv", **parameters)


def test_an_offline_profile_that_nobody_looked_up_divides_nothing():
    import torch

    with pytest.raises(CalibrationError, match="calibration=auto was not loaded.*mmkv_bench.calibrate prefixkv"):
        build("prefixkv").allocator.caps([torch.zeros(1, 9)], 4, [0], 3)
    with pytest.raises(ConfigError, match="mode=offline without a calibration"):
        build("prefixkv", calibration=None)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_what_its_method_is(name):
    about = method_defaults([name])[name]["about"]
    assert set(about) == {"idea", "source", "cost", "readings"} and "arXiv" in about["source"]
