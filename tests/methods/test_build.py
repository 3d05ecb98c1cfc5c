"""From a method node to a Compressor: only this package's classes, and mistakes named where they are."""

from __future__ import annotations

from copy import deepcopy
from functools import reduce
from operator import getitem

import pytest

from mmkv_bench.config.compose import method_defaults
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods.build import build_compressor
from mmkv_bench.methods.node import flat_parameters, under_reading
from tests.each import each

WINDOW = "mmkv_bench.compression.scorers.window.WindowScorer"
UNIFORM = "mmkv_bench.compression.allocators.uniform.Uniform"


def node(**changes):
    """SnapKV as its file has it, with changes by dotted key."""
    made = method_defaults(["snapkv"])["snapkv"]
    for key, value in changes.items():
        *path, leaf = key.replace("__", ".").split(".")
        reduce(getitem, path, made)[leaf] = value
    return made


def test_parts_take_the_flat_parameters():
    compressor = build_compressor("mine", node(window=7, pool=3), "paper")
    assert (compressor.name, compressor.scorer.window, compressor.scorer.pool) == ("mine", 7, 3)
    assert compressor.reading == "paper"


def test_parts_of_different_methods_compose():
    scorer = {"_target_": "mmkv_bench.compression.scorers.random.RandomScorer"}
    made = build_compressor("mixed", node(scorer=scorer), "paper")
    assert made.scorer.stochastic
    assert made.selector.window == 32


def test_building_leaves_the_node_as_it_was():
    before = node()
    copy = deepcopy(before)
    build_compressor("snapkv", before, "released")
    assert before == copy


@each(
    "target",
    [
        "os.system",
        "subprocess.Popen",
        "torch.nn.Linear",
        "mmkv_benchmark.evil.Class",
        "WindowScorer",
        "mmkv_bench.compression.scorers.window.os.system",
        "mmkv_bench.compression.scorers.window.Needs",
        "mmkv_bench.compression.scorers.window.dataclass",
        "mmkv_bench.compression.scorers.windw.WindowScorer",
        "mmkv_bench.compression.scorers.window.NoSuchScorer",
        "mmkv_bench.methods.build.build_compressor",
    ],
)
def test_only_classes_that_this_package_defines_can_be_named(target):
    with pytest.raises(ConfigError, match="_target_"):
        build_compressor("snapkv", node(scorer___target_=target), "paper")


@each(
    ("changes", "words"),
    [
        ({"scorer__windw": 3}, "WindowScorer has no parameter 'windw'; did you mean 'window'"),
        ({"window": 0}, r"window is 0; allowed: 1 or more"),
        ({"pool": 4}, "pool is 4; allowed: odd"),
        ({"scorer___target_": UNIFORM, "scorer__pool": None}, "Uniform has no parameter"),
        ({"allocator": None}, "has no allocator"),
        ({"selector__window": "${..widow}"}, "widow"),
        ({"released__windw": 2}, "`released` sets 'windw'"),
    ],
)
def test_a_method_that_cannot_be_built_is_refused_in_one_sentence(changes, words):
    with pytest.raises(ConfigError) as refused:
        build_compressor("snapkv", node(**changes), "released" if "released__windw" in changes else "paper")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_part_in_the_wrong_place_is_refused():
    wrong = node(allocator={"_target_": WINDOW})
    with pytest.raises(ConfigError, match="allowed: subclasses of Allocator"):
        build_compressor("snapkv", wrong, "paper")


def test_an_unknown_reading_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'released'"):
        build_compressor("snapkv", node(), "realeased")


def test_released_may_reach_into_a_part():
    plain = under_reading("snapkv", node(released={"scorer.pool": 9}), "released")
    assert (plain["scorer"]["pool"], plain["pool"]) == (9, 5)


def test_flat_parameters_are_what_users_override():
    flat = flat_parameters(under_reading("snapkv", node(), "paper"))
    parameters = {"window": 32, "pool": 5, "pooling": "average", "heads": "first", "score_rounding": "none", "sinks": 0}
    assert flat == parameters
