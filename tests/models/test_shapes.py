"""The shapes in conf/model are the checkpoints': sizes, ids, processors; and fewer layers of them still are a model."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.facts import model_facts, text_config
from mmkv_bench.models.processor import build_processor
from mmkv_bench.models.shape import GENERATION, config_of
from tests import cover
from tests.each import each
from tests.families.shapes import FAMILIES, NAMES, node


@functools.cache
def on_meta(name: str, layers: int | None = None):
    config = config_of(node(name).shape, layers)
    loader = AutoModelForImageTextToText if model_facts(config).multimodal else AutoModelForCausalLM
    with torch.device("meta"):
        return loader.from_config(config, dtype=torch.bfloat16)


@pytest.mark.full
@each("name", NAMES)
def test_the_shape_has_as_many_parameters_as_the_checkpoint(name):
    counted, printed = on_meta(name).num_parameters(), node(name).about["parameters"]
    assert counted == pytest.approx(printed, rel=0.001)


@pytest.mark.full
@each(
    ("name", "billions"),
    [
        ("qwen2_5_vl_3b", 3.75),
        ("qwen2_5_vl_7b", 8.29),
        ("qwen2_5_vl_32b", 33.5),
        ("qwen2_5_vl_72b", 73.4),
        ("qwen2_vl_7b", 8.29),
        ("qwen3_vl_8b", 8.77),
        ("llava_v1_5_7b", 7.06),
        ("llava_v1_5_13b", 13.4),
        ("llava_v1_6_vicuna_7b", 7.06),
        ("llava_v1_6_mistral_7b", 7.57),
        ("llava_onevision_7b", 8.03),
        ("internvl3_8b", 7.94),
        ("internvl3_2b", 2.09),
        ("smolvlm_256m", 0.256),
        ("smolvlm_500m", 0.507),
        ("smolvlm2_2_2b", 2.25),
        ("llama_3_8b", 8.03),
        ("smollm2_135m", 0.135),
        ("smollm2_360m", 0.362),
        ("smollm2_1_7b", 1.71),
        ("gemma3_270m", 0.268),
        ("gemma3_1b", 1.0),
        ("gemma3_4b", 4.3),
        ("gpt_oss_20b", 20.9),
        ("gemma4_31b", 30.7),
    ],
)
def test_counts_are_those_on_the_repositories_pages(name, billions):
    assert on_meta(name).num_parameters() / 1e9 == pytest.approx(billions, rel=0.01)


@each(
    ("name", "layers", "heads", "kv", "dim", "kib"),
    [  # KiB of keys and values per token in 16 bits, from the papers' model cards: 2 * layers * kv * dim * 2 / 1024
        ("qwen2_5_vl_3b", 36, 16, 2, 128, 36),
        ("qwen2_5_vl_7b", 28, 28, 4, 128, 56),
        ("qwen2_5_vl_32b", 64, 40, 8, 128, 256),
        ("qwen2_5_vl_72b", 80, 64, 8, 128, 320),
        ("qwen3_vl_8b", 36, 32, 8, 128, 144),
        ("llava_v1_5_7b", 32, 32, 32, 128, 512),
        ("llava_v1_5_13b", 40, 40, 40, 128, 800),
        ("llava_v1_6_mistral_7b", 32, 32, 8, 128, 128),
        ("smolvlm_256m", 30, 9, 3, 64, 22.5),
        ("smolvlm_500m", 32, 15, 5, 64, 40),
        ("smolvlm2_2_2b", 24, 32, 32, 64, 192),
        ("llama_3_8b", 32, 32, 8, 128, 128),
        ("smollm2_135m", 30, 9, 3, 64, 22.5),
        ("gemma3_270m", 3, 4, 1, 256, 3),  # its full layers; 15 others keep a window
        ("gemma3_1b", 4, 4, 1, 256, 4),
        ("gemma3_4b", 5, 8, 4, 256, 20),  # 29 others keep a window
        ("gemma4_e2b", 3, 8, 1, 512, 6),  # 12 others keep a window, 20 store nothing
        ("gemma4_31b", 10, 32, 4, 512, 80),
        ("gpt_oss_20b", 12, 64, 8, 64, 24),
        ("qwen3_5_9b", 8, 16, 4, 256, 32),  # 24 others keep recurrent states
    ],
)
def test_the_cache_has_the_checkpoints_dimensions(name, layers, heads, kv, dim, kib):
    from mmkv_bench.families.facts import kv_bytes_per_token

    config = config_of(node(name).shape)
    family = model_facts(config)
    assert (family.num_layers, family.num_query_heads, family.num_kv_heads, family.head_dim) == (layers, heads, kv, dim)
    assert kv_bytes_per_token(config, "bfloat16") == kib * 1024


@pytest.mark.slow
@cover.few("name", NAMES, keep=2)
def test_processor_settings_and_generation_fit_the_shape(name):
    model = node(name)
    config = config_of(model.shape)
    processor = build_processor(config, model.processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    ends = model.shape[GENERATION]["eos_token_id"]
    assert tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends])
    assert processor.chat_template
    assert tokenizer.model_max_length == model_facts(config).max_context


@pytest.mark.full
@each("layers", [1, 2, 5])
@each("name", FAMILIES)
def test_fewer_layers_change_depths_and_nothing_else(name, layers):
    whole, cut = on_meta(name), on_meta(name, layers)
    assert text_config(cut.config).num_hidden_layers == layers == model_facts(cut.config).all_layers
    shapes = {key: p.shape for key, p in whole.named_parameters()}
    kept = {key: p.shape for key, p in cut.named_parameters()}
    assert kept.items() <= shapes.items()
    blocks = {key.partition("blocks.")[2].partition("layers.")[2].partition(".")[0] for key in kept}
    assert len(kept) < len(shapes) and all(not b or int(b) < layers for b in blocks)
    vision = getattr(cut.config, "vision_config", None)
    for key in ("deepstack_visual_indexes", "fullatt_block_indexes"):
        indexes = getattr(vision, key, None)
        assert indexes is None or (indexes and max(indexes) < layers and len(set(indexes)) == len(indexes))
    if getattr(vision, "fullatt_block_indexes", None):
        assert layers - 1 in vision.fullatt_block_indexes, "the last block has full attention"


@each("layers", [0, -1, 29, 1000])
def test_layers_that_the_checkpoint_does_not_have_are_refused(layers):
    with pytest.raises(ConfigError, match=f"model.layers={layers}: this model has 28 layers"):
        config_of(node("qwen2_5_vl_7b").shape, layers)


def test_a_shape_of_no_architecture_is_refused():
    with pytest.raises(ConfigError, match="no model_type"):
        config_of({"hidden_size": 4})
    with pytest.raises(UnsupportedError, match="not an architecture of transformers"):
        config_of({"model_type": "llava_onevision1_5"})
    with pytest.raises(UnsupportedError, match="'bert' is not supported"):
        config_of({"model_type": "bert"})
