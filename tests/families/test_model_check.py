"""Promise: `mmkv-bench check model=<name>` finds nothing wrong with shipped families, and names what is wrong with others."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property

import pytest

from mmkv_bench.cli.main import main
from mmkv_bench.diagnostics import model_check
from mmkv_bench.diagnostics.model_check import CHECKS, NEEDED, Checked, pictures_are_counted, visual_tokens_have_places
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import Box
from tests import cover
from tests.families.shapes import FAMILIES, small


@dataclass(frozen=True)
class Narrow(Checked):
    """A model of the shape's structure and small widths."""

    @cached_property
    def node(self):
        return small(self.name, layers=2)


@cover.few("name", FAMILIES, keep=1, first=0)
def test_shipped_families_keep_every_promise(name):
    checked = Narrow(name)
    checks = [check for check in CHECKS if NEEDED.get(check) in (None, *checked.media)]
    assert {check.__name__: check(checked) for check in checks} == {check.__name__: None for check in checks}


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
    with pytest.raises(UnsupportedError, match="the places of visual tokens are unknown"):
        visual_tokens_have_places(checked)
    assert main(["check", "model=paligemma"]) == 2 and "unknown model 'paligemma'" in capsys.readouterr().err


def test_places_that_are_not_those_of_the_pixels_are_named(monkeypatch):
    def whole(box):
        return box._replace(top=0, bottom=1, left=0, right=1)

    def exchanged(box):
        return Box(box.image, box.left, box.right, box.top, box.bottom)

    checked, right = Narrow("qwen2_5_vl_7b"), model_check.token_boxes
    assert visual_tokens_have_places(checked) is None
    for wrong in (
        lambda boxes: boxes[::-1],
        lambda boxes: [*map(whole, boxes)],
        lambda boxes: [*map(exchanged, boxes)],
    ):
        monkeypatch.setattr(model_check, "token_boxes", lambda *given, wrong=wrong: wrong(right(*given)))
        assert "changes most in the token of" in visual_tokens_have_places(checked)
