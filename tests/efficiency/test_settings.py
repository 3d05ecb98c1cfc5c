"""Promise: every efficiency table and figure of the papers is a setting by name that comes to a plan of what was printed."""

from __future__ import annotations

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.config.files import options
from mmkv_bench.efficiency.plan import plan_passes
from mmkv_bench.errors import ConfigError
from mmkv_bench.plan.validate import validate

SETTINGS = [name for name in options("experiment") if name.startswith("efficiency_")]
WITHOUT = {f"hybridkv_{what}" for what in ("static", "dynamic", "without_h", "without_both")}
PRINTED = {  # lengths, methods beside full, budgets, new tokens
    "mmshift_table09": ([32768], {"snapkv", "expected_attention", "mmshift"}, {"256"}, 512),
    "mmshift_fig03": ([2**n for n in range(11, 16)], {"snapkv", "expected_attention", "mmshift"}, {"256"}, 100),
    "mmshift_fig05": ([2**n for n in range(11, 16)], {"mmshift"}, {"256"}, 100),
    "flashcache_table06": ([2000, 4000, 8000], {"h2o", "snapkv", "look_m", "meda", "flashcache"}, {"20%"}, 16),
    "flashcache_table08": ([2000 * 2**n for n in range(6)], {"flashcache"}, {"10%"}, 512),
    "flashcache_fig06": ([2000 * 2**n for n in range(6)], {"flashcache"}, {"10%", "20%"}, 100),
    "hybridkv_table03": ([30168], {"hybridkv"}, {"10%", "20%"}, 128),
    "hybridkv_table04": ([30168], {"hybridkv"} | WITHOUT, {"10%"}, 128),
    "prefixkv_table03_13b_1024": ([1024], {"prefixkv"}, {"20%", "40%", "60%", "80%"}, 512),
    "prefixkv_table03_13b_624": ([624], {"prefixkv"}, {"20%", "40%", "60%", "80%"}, 256),
    "prefixkv_table03_7b_1024": ([1024], {"prefixkv"}, {"20%", "40%", "60%", "80%"}, 512),
    "prefixkv_table03_7b_624": ([624], {"prefixkv"}, {"20%", "40%", "60%", "80%"}, 256),
    "meda_table06": ([4430], {"meda"}, {"5%", "20%", "35%", "50%"}, 535),
}
NO_RIVAL = ("mmshift_fig03", "mmshift_table09", "prefixkv")  # whose models show no smaller picture within their budgets
BATCHES = {
    "prefixkv_table03_13b_1024": 8,
    "prefixkv_table03_13b_624": 16,
    "prefixkv_table03_7b_1024": 16,
    "prefixkv_table03_7b_624": 48,
}


@pytest.mark.full
def test_each_setting_comes_to_a_plan_of_what_was_printed(tmp_path):
    assert {name.removeprefix("efficiency_") for name in SETTINGS} == {*PRINTED, "hybrid"}  # which no paper printed
    for name, (lengths, methods, budgets, new_tokens) in PRINTED.items():
        config = compose([f"experiment=efficiency_{name}", f"out={tmp_path}"])
        validate(config)
        plan = plan_passes(config, outline=True)
        assert sorted({unit.tokens for unit in plan.units}) == lengths, name
        rival = set() if name.startswith(NO_RIVAL) else {"pixels"}
        assert {cell.method for cell in plan.cells} == methods | {"full"} | rival, name
        assert {str(cell.budget) for cell in plan.cells if cell.budget} == budgets, name
        assert config.new_tokens == new_tokens and plan.cells[0].compressor.is_full
        if name.startswith("prefixkv"):
            assert plan.batches == [BATCHES[name]] and plan.searches


@pytest.mark.slow
def test_the_hybrid_setting_plans_three_lengths_and_the_control_of_full_layers(tmp_path):
    plan = plan_passes(compose(["experiment=efficiency_hybrid", f"out={tmp_path}"]), outline=True)
    assert plan.lengths == [2048, 8192, 16384] and {cell.method for cell in plan.cells} > {"full", "global0", "snapkv"}
    assert {str(cell.budget) for cell in plan.cells if cell.budget} == {"511", "25%"}


def test_default_lengths_are_those_that_the_model_takes_and_others_are_refused(tmp_path):
    words = ["scenario=efficiency", "method=full", f"out={tmp_path}"]
    assert plan_passes(compose(words)).lengths == plan_passes(compose(words), outline=True).lengths == [2048]
    assert "are left out" in " ".join(plan_passes(compose(words)).notes)
    with pytest.raises(ConfigError, match="is more than the model's context of 4096"):
        plan_passes(compose([*words, "lengths=[2048,8192]"]))
