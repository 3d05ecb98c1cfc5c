"""KIVI after every eviction of the registry: one line of configuration, forks as alone, bytes that say what was saved."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.compression.decoding.heavy_hitters import HeavyHitters
from mmkv_bench.compression.decoding.kivi import KIVI
from mmkv_bench.config.files import options
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.methods.build import build_compressor
from tests import cover, zoo
from tests.compression.test_registry import DEFAULTS
from tests.generation import common
from tests.plan.setting import cells

TARGET = "mmkv_bench.compression.decoding.kivi.KIVI"
POLICY = {"_target_": TARGET, "bits": 4, "group": 4, "residual": 8}
WITHOUT = {
    "full",
    "kivi",
    "pixels",
    "cut_prompt",
    "custom",
    "kvpress",
}  # nothing is evicted, or the code is not in the package
# Parameters without which a method needs what was measured of a model: other calibrated ones are tried as they are.
ONLINE = {"prefixkv": {"mode": "online"}, "kivi_prefixkv": {"mode": "online"}}
NAMES = sorted(set(options("method")) - WITHOUT)


def composed(name: str, **changes):
    return build_compressor(name, DEFAULTS[name] | ONLINE.get(name, {}) | changes, "paper")


def calibrated(name: str) -> bool:
    """Whether the method cannot be used without a calibration of the model."""
    node = DEFAULTS[name]
    return "calibration" in node and name not in ONLINE


@pytest.mark.slow
@cover.few("name", [name for name in NAMES if not calibrated(name)], keep=3)
def test_any_eviction_composes_with_kivi_by_one_line(name):
    family = "qwen2_5_vl"
    model, prompt = zoo.model(family), common.encoded(family)
    made = composed(name, decoding=POLICY)
    assert made.decoding == KIVI(4, 4, 8)
    asked, without = ((12, "paper"), ("60%", "strict")), composed(name, decoding=None)
    small = [common.cell(made, budget, protocol) for budget, protocol in asked]
    plain = [common.cell(without, budget, protocol, name=f"plain/{budget}") for budget, protocol in asked]
    forks = common.assert_forks_equal_alone(model, family, prompt, small + plain, common.rules(model, 10))
    quantised, full = forks[:2], forks[2:]
    for small, large in zip(quantised, full, strict=True):
        assert small.kept_digest == large.kept_digest, "the same entries stay"
        assert small.entries_resident == large.entries_resident
    if quantised[1].entries_resident > 16 * len(quantised[1].kept) * len(quantised[1].kept[0]):
        assert quantised[1].bytes_device < 0.75 * full[1].bytes_device, "R = 8 of some 24 entries stay as they are"


def test_prefixkv_and_kivi_keep_what_prefixkv_keeps_in_a_quarter_of_the_bytes():
    """PrefixKV's table 15: the selection is PrefixKV's, the storage KIVI's with 4 bits; what is left is residual."""
    family = "llava_next"
    model, prompt = zoo.model(family), common.encoded(family)
    small, large = (
        composed(name, decoding=POLICY if name != "prefixkv" else None) for name in ("kivi_prefixkv", "prefixkv")
    )
    pairs = [common.cell(one, budget) for one in (small, large) for budget in ("50%", "80%")]
    forks = common.assert_forks_equal_alone(model, family, prompt, pairs, common.rules(model, 6))
    for one, other in zip(forks[:2], forks[2:], strict=True):
        assert one.kept_digest == other.kept_digest and one.token_ids != []
        assert one.bytes_device < 0.4 * other.bytes_device


@pytest.mark.slow
def test_one_override_or_one_variant_puts_kivi_behind_a_method():
    line = f"{{_target_: {TARGET}, bits: 4}}"
    (cell,) = cells("method=snapkv", "baseline=none", f"methods.snapkv.decoding={line}", "budget=32")
    assert cell.compressor.decoding == KIVI(4) and cell.tuned and cell.budget.entries == 32
    shown = json.loads(cell.parameters)["decoding"]
    online = ("methods.kivi_prefixkv.mode=online", "methods.kivi_prefixkv.bits=8")  # without an artefact
    (eight,) = cells("method=kivi_prefixkv", "baseline=none", "budget=32", *online)
    assert eight.compressor.decoding == KIVI(8, residual=32)
    assert shown == "KIVI(bits=4, group=32, residual=128, flush='before')", "a row says what was put behind the method"
    several = cells(
        "method=[snapkv,h2o_decode]",
        "baseline=none",
        f"variants.snapkv_kivi4={{base: snapkv, decoding: {line}}}",
        f"variants.h2o_kivi4={{base: h2o_decode, decoding: {line}}}",  # replaces H2O's own
    )
    found = {one.method: one.compressor.decoding for one in several}
    assert found == {"snapkv": None, "h2o_decode": HeavyHitters(), "snapkv_kivi4": KIVI(4), "h2o_kivi4": KIVI(4)}
    assert len({one.cell for one in several}) == 4
    assert all("decoding" not in json.loads(one.parameters) for one in several[:2])
    (plain,) = cells("method=h2o_decode", "baseline=none", "methods.h2o_decode.decoding=null")
    assert plain.compressor.decoding is None and json.loads(plain.parameters)["decoding"] == "None"


def test_policies_are_never_mixed_and_mistakes_are_named():
    line = f"{{_target_: {TARGET}, bits: 4}}"
    with pytest.raises(ConfigError, match="h2o_decode already has a decode policy.*variant"):
        cells("method=h2o_decode", f"methods.h2o_decode.decoding={line}")
    with pytest.raises(ConfigError, match="decoding=kivi is text; allowed: null"):
        cells("method=snapkv", "methods.snapkv.decoding=kivi")
    with pytest.raises(ConfigError, match="'decodin'"):
        cells("method=snapkv", f"methods.snapkv.decodin={line}")
    with pytest.raises(ConfigError, match="scorer"):
        cells("method=kivi", "methods.kivi.decoding=null")


def test_kivi_alone_is_one_cell_whatever_the_budgets():
    (cell,) = cells("method=kivi", "baseline=none", "budget=[16,32,0.5]", "seed=[0,1]", "methods.kivi.bits=4")
    assert (cell.budget, cell.budget_kind, cell.seed) == (None, "none", None) and cell.label == "kivi"
    assert json.loads(cell.parameters) == {"bits": 4, "flush": "before", "group": 32, "residual": 128}
    both = cells("method=kivi", "baseline=none", "reading=[paper,released]")
    assert [one.compressor.decoding.flush for one in both] == ["before", "after"]


def test_a_decode_policy_of_another_package_is_refused():
    with pytest.raises(MMKVError, match="outside this package"):
        composed("snapkv", decoding={"_target_": "torch.nn.Linear"})
    with pytest.raises(MMKVError, match="DecodePolicy"):
        composed("snapkv", decoding={"_target_": "mmkv_bench.compression.reducers.evict.Evict"})
    with pytest.raises(MMKVError, match="has no parameter 'bit'"):
        composed("snapkv", decoding={"_target_": TARGET, "bit": 4})
