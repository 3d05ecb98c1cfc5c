"""A family that the package does not have, added by one file, one model file and one template: VipLLaVA of transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import mmkv_bench.families
from mmkv_bench.compression.compressor import full
from mmkv_bench.config.schema import Model
from mmkv_bench.families.base import Family
from mmkv_bench.families.facts import StatedConfig
from mmkv_bench.families.registry import families, image_tokens, token_boxes
from mmkv_bench.generation.encode import encode
from mmkv_bench.generation.engine import Engine
from mmkv_bench.models.source import Source
from tests.generation.common import cell, rules

BLOCKS = dict(
    re.findall(
        r"^```(python|jinja|yaml)\n(.*?)^```",
        Path("docs/own_model.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)
"""The family, its template and its model's file, as the page shows them."""


def test_a_family_is_one_file_one_model_file_and_one_template(tmp_path, monkeypatch):
    (tmp_path / "vipllava.py").write_text(BLOCKS["python"])
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "vip.jinja").write_text(BLOCKS["jinja"])
    monkeypatch.setattr(mmkv_bench.families, "__path__", [*mmkv_bench.families.__path__, str(tmp_path)])
    families.cache_clear()
    try:
        _count_place_and_answer()
    finally:
        families.cache_clear()


def _count_place_and_answer() -> None:
    node = Model(**yaml.safe_load(BLOCKS["yaml"]))
    source = Source.of(node)
    assert isinstance(source.described, StatedConfig), "planned without transformers"
    loaded = source.load()
    assert len(loaded.model.model.vision_tower.encoder.layers) == 2

    pictures = [Image.new("RGB", size, (200, 90, 10)) for size in ((60, 90), (80, 80))]
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "which?"}]
    prompt = encode(loaded.processor, loaded.family, "vip/0", [{"role": "user", "content": parts}], pictures)
    counts = [image_tokens("vipllava", node.processor, *picture.size, images=2) for picture in pictures]
    assert prompt.visual_tokens == sum(counts) == 32

    sizes = [picture.size for picture in pictures]
    boxes = token_boxes(loaded.model.config, loaded.processor, prompt.inputs, sizes, prompt.visual_tokens)
    assert [box.image for box in boxes] == [0] * 16 + [1] * 16
    assert boxes[5][1:] == (0.25, 0.5, 0.25, 0.5)

    with Engine(loaded.model, loaded.family, rules(loaded.model, 3), loaded.tokenizer) as engine, torch.no_grad():
        (result,) = engine.answer(prompt, [cell(full())])
    assert (result.status, result.n_tokens, result.visual_tokens) == ("ok", 3, 32)


def test_a_family_with_images_and_no_rule_for_their_tokens_is_refused_when_it_is_made():
    with pytest.raises(TypeError, match="processor of images but no image_tokens"):
        Family("newer_vl", "Newer", (), "NewerForConditionalGeneration", "NewerProcessor", "NewerImageProcessor")
