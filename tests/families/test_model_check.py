"""Promise: `tools.check_model` finds nothing wrong with shipped families, and names what is wrong with others."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property

import pytest

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import Box
from tests import cover
from tests.families.shapes import FAMILIES, small
from tools import check_model as model_check
from tools.check_model import CHECKS, NEEDED, Checked, pictures_are_counted, visual_tokens_have_places


@dataclass(frozen=True)
class Narrow(Checked):
    """A model of the shape's structure and small widths."""

    @cached_property
    def node(self):
        return small(self.name, layers=2)


@pytest.mark.slow
@cover.few("name", FAMILIES, keep=1, first=0)
def test_shipped_families_keep_every_promise(name):
    checked = Narrow(name)
    checks = [check for check in CHECKS if NEEDED.get(check) in (None, *checked.media)]
    assert {check.__name__: check(checked) for check in checks} == {check.__name__: None for check in checks}


class LinearBesideFull(Narrow):
    """Qwen3.5, which has no file in conf/model: the pictures of Qwen3-VL before a linear and a full layer."""

    @cached_property
    def node(self):
        made = small("qwen3_vl_8b", layers=2)
        text, vision = made.shape["text_config"], made.shape["vision_config"]
        made.shape["model_type"], text["model_type"], vision["model_type"] = "qwen3_5", "qwen3_5_text", "qwen3_5_vision"
        text |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        text |= {
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        }
        text["rope_parameters"] |= {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
        del vision["deepstack_visual_indexes"]
        return made


@pytest.mark.full
def test_qwen3_5_keeps_every_promise():
    checked = LinearBesideFull("qwen3_vl_8b")
    assert {check.__name__: check(checked) for check in CHECKS} == {check.__name__: None for check in CHECKS}
    assert checked.model.config.model_type == "qwen3_5" and checked.loaded.family.num_layers == 1


@pytest.mark.slow
def test_wrong_counts_and_places_are_named(capsys):
    checked = Narrow("llava_v1_5_7b")
    settings = copy.deepcopy(dict(checked.settings))
    settings["image"]["crop_size"] = {"height": 350, "width": 350}

    class Miscounted(Narrow):
        @property
        def settings(self):
            return settings

    assert "image_tokens gives 625, the processor 576" in pictures_are_counted(Miscounted("llava_v1_5_7b"))
    checked.loaded.processor.image_processor.do_resize = False
    with pytest.raises(UnsupportedError, match="visual tokens cannot be located"):
        visual_tokens_have_places(checked)
    assert model_check.main(["paligemma"]) == 2 and "name one model of conf/model" in capsys.readouterr().err


@pytest.mark.slow
@cover.shares(2)
def test_places_that_are_not_those_of_the_pixels_are_named(monkeypatch, share):
    def whole(box):
        return box._replace(top=0, bottom=1, left=0, right=1)

    def exchanged(box):
        return Box(box.image, box.left, box.right, box.top, box.bottom)

    checked, right = Narrow("qwen2_5_vl_7b"), model_check.token_boxes
    assert visual_tokens_have_places(checked) is None
    mistakes = (lambda boxes: boxes[::-1], lambda boxes: [*map(whole, boxes)], lambda boxes: [*map(exchanged, boxes)])
    for wrong in cover.turn(mistakes, 1, share):
        monkeypatch.setattr(model_check, "token_boxes", lambda *given, wrong=wrong: wrong(right(*given)))
        assert "changes most in the token of" in visual_tokens_have_places(checked)
