"""KIVI after every eviction of the registry: one line of configuration, forks as alone, bytes that say what was saved."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from mmkv_bench.compression.decoding.kivi import KIVI
from mmkv_bench.config import options
from mmkv_bench.errors import MMKVError
from mmkv_bench.methods import build_compressor
from mmkv_bench.planning.compose import method_defaults
from tests import zoo
from tests.generation import common

TARGET = "mmkv_bench.compression.decoding.kivi.KIVI"
POLICY = {"_target_": TARGET, "bits": 4, "group": 4, "residual": 8}
WITHOUT = {"full", "kivi", "custom", "kvpress"}  # nothing is evicted, or the code is not in the package
# Parameters without which a method needs what was measured of a model: other calibrated ones are tried as they are.
ONLINE = {"prefixkv": {"mode": "online"}, "kivi_prefixkv": {"mode": "online"}}
NAMES = sorted(set(options("method")) - WITHOUT)


def composed(name: str, **changes):
    node = method_defaults([name])[name].copy()
    OmegaConf.set_struct(node, False)
    for key, value in (ONLINE.get(name, {}) | changes).items():
        node[key] = value
    return build_compressor(name, node, "paper")


def calibrated(name: str) -> bool:
    """Whether the method cannot be used without a calibration of the model."""
    node = method_defaults([name])[name]
    return "calibration" in node and name not in ONLINE


@pytest.mark.parametrize("name", [name for name in NAMES if not calibrated(name)])
def test_any_eviction_composes_with_kivi_by_one_line(name):
    family = "qwen2_5_vl"
    model, prompt = zoo.model(family), common.encoded(family)
    made = composed(name, decoding=POLICY)
    assert made.decoding == KIVI(4, 4, 8)
    budgets = (12, "60%")
    cells = [common.cell(made, budget, protocol) for budget in budgets for protocol in ("paper", "strict")]
    plain = [common.cell(composed(name, decoding=None), budget, "paper", name=f"plain/{budget}") for budget in budgets]
    forks = common.assert_forks_equal_alone(model, family, prompt, cells + plain, common.rules(model, 10))
    quantised, full = forks[: len(cells) : 2], forks[len(cells) :]
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
    cells = [common.cell(one, budget) for one in (small, large) for budget in ("50%", "80%")]
    forks = common.assert_forks_equal_alone(model, family, prompt, cells, common.rules(model, 6))
    for one, other in zip(forks[:2], forks[2:], strict=True):
        assert one.kept_digest == other.kept_digest and one.token_ids != []
        assert one.bytes_device < 0.4 * other.bytes_device


def test_a_decode_policy_of_another_package_is_refused():
    with pytest.raises(MMKVError, match="outside this package"):
        composed("snapkv", decoding={"_target_": "torch.nn.Linear"})
    with pytest.raises(MMKVError, match="DecodePolicy"):
        composed("snapkv", decoding={"_target_": "mmkv_bench.compression.reducers.evict.Evict"})
    with pytest.raises(MMKVError, match="has no parameter 'bit'"):
        composed("snapkv", decoding={"_target_": TARGET, "bit": 4})
