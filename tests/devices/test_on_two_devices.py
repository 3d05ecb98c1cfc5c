"""A model whose layers lie on several devices (`model.device_map`) gives what it gives on one, mixing none of their tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._pytree import tree_map

from mmkv_bench.families.facts import text_model
from tests import zoo
from tests.devices.test_on_second_device import EVERYTHING, cells
from tests.generation import common
from tests.second_device import HOST, PLACE, second_device

KINDS = (
    "full",
    "h2o_decode",
    "hybridkv",
    "kivi_prefixkv",
    "meda",
    "madakv",
    "flashcache",
    "mmshift_adakv",
    "snapkv",
    "pyramidkv",
)


def split(model: torch.nn.Module) -> torch.nn.Module:
    """A copy with its upper layers and its head on the second device; hooks move what they are given there, and the logits
    back, as accelerate's do."""
    made = copy.deepcopy(model)
    text = text_model(made)

    def takes(place: torch.device):
        def move(one):
            return one.to(place) if isinstance(one, torch.Tensor) else one

        def hook(module, args, kwargs):
            kept = {name: kwargs[name] for name in ("past_key_values",) if name in kwargs}
            return tree_map(move, args), {**tree_map(move, {k: v for k, v in kwargs.items() if k not in kept}), **kept}

        return hook

    upper = [*text.layers[len(text.layers) // 2 :], text.norm]
    for module in (*text.layers, text.norm, made.lm_head):
        place = HOST if module in [*text.layers[: len(text.layers) // 2]] else PLACE
        module.register_forward_pre_hook(takes(place), with_kwargs=True)
    for module in (*upper, made.lm_head):
        module.to(PLACE)
    made.lm_head.register_forward_hook(lambda module, args, output: output.to(HOST))
    return made


def results(run, family: str, asked) -> tuple[list, list]:
    """On one device and on two."""
    model, prompt = zoo.model(family), common.encoded(family)
    expected = run(model, family, prompt, asked, common.rules(model, 4))
    with second_device() as device:
        found = run(split(model), family, prompt, asked, common.rules(model, 4))
        assert device.memory.peak().allocated > 0
    return expected, found


def assert_same_on_two_devices(run, family: str, asked) -> None:
    expected, found = results(run, family, asked)
    common.assert_same(found, expected)
    assert sum(one.status == "ok" for one in found) >= 0.8 * len(found), "refused combinations are the exception"


@pytest.mark.full
def test_a_method_that_asks_the_model_again_runs_alone_with_layers_on_two_devices():
    assert_same_on_two_devices(common.alone, "qwen2_5_vl", cells("qwen2_5_vl", ("mmshift_adakv",)))


@pytest.mark.full
def test_each_kind_of_method_forks_and_runs_alone_with_layers_on_two_devices():
    for run in (common.alone, lambda *given: common.together(*given, extras=EVERYTHING)):
        assert_same_on_two_devices(run, "qwen2_5_vl", cells("qwen2_5_vl", KINDS, turns=True))
