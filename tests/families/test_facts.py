"""The facts of every supported family agree with what the loaded models do, and everything else is refused."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families import facts
from tests import zoo
from tests.each import each


class OneMarkerTokenizer:
    """The two calls facts.py makes of a tokenizer; every other word is unknown (id 3)."""

    unk_token_id = 3

    def convert_tokens_to_ids(self, token):
        return {"</img>": 289}.get(token, self.unk_token_id)


@each("name", zoo.ALL)
def test_facts_match_the_loaded_model_and_its_cache(name):
    model, inputs = zoo.model(name), zoo.prompt(name)
    family = facts.model_facts(model.config)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    _batch, heads, length, dim = cache.layers[0].keys.shape
    assert (family.num_layers, family.num_kv_heads, family.head_dim) == (len(cache.layers), heads, dim)
    groups = facts.text_model(model).layers[0].self_attn.num_key_value_groups
    assert (family.num_query_heads, family.groups) == (groups * heads, groups)
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert facts.kv_bytes_per_token(model.config, "float32") * length == stored
    assert facts.kv_bytes_per_token(model.config, "bfloat16") * length * 2 == stored
    assert family.multimodal == (name in zoo.MULTIMODAL)


@each("name", zoo.ALL)
def test_text_model_and_attention_modules_are_found(name):
    model = zoo.model(name)
    text = facts.text_model(model)
    modules = [layer.self_attn for layer in text.layers]
    assert len(modules) == zoo.LAYERS and [m.layer_idx for m in modules] == [0, 1, 2]
    assert all(hasattr(m, part) for m in modules for part in ("q_proj", "k_proj", "v_proj", "o_proj"))
    assert facts.text_config(model.config) is text.config
    assert hasattr(text, "rotary_emb") and hasattr(text, "embed_tokens")


@each("name", zoo.ALL)
def test_token_types_mark_visual_tokens(name):
    inputs, family = zoo.prompt(name), facts.model_facts(zoo.model(name).config)
    types = facts.token_types(inputs["input_ids"], family)
    kind = zoo.VIDEO if "video" in name else zoo.IMAGE
    assert types.shape == inputs["input_ids"].shape and types.dtype == torch.int64
    assert torch.equal(types > 0, inputs["input_ids"] == kind)
    assert set(types[types > 0].tolist()) == ({2 if "video" in name else 1} if name in zoo.MULTIMODAL else set())
    if "mm_token_type_ids" in inputs:
        assert torch.equal(types, inputs["mm_token_type_ids"].long())


@each("name", zoo.MULTIMODAL)
def test_context_ends_with_the_last_visual_tokens_closing_marker(name):
    family = facts.model_facts(zoo.model(name).config)
    for after in (0, 1, 9):
        ids = zoo.prompt(name, after=after)["input_ids"]
        assert facts.context_length(ids, family) == ids.shape[1] - after
        assert facts.context_length(ids[0], family) == ids.shape[1] - after


def test_context_length_includes_a_marker_that_only_the_tokenizer_knows():
    config = zoo.model("internvl").config
    ids = torch.tensor([5, 6, zoo.IMAGE, zoo.IMAGE, 289, 7, 8])
    plain, told = (facts.model_facts(config), facts.model_facts(config, OneMarkerTokenizer()))
    assert facts.context_length(ids, told) == 5
    assert facts.context_length(ids, plain) == 4
    assert facts.context_length(torch.tensor([5, zoo.IMAGE, 7]), told) == 2, "what follows is no closing marker"
    assert facts.model_facts(zoo.model("llava").config, OneMarkerTokenizer()).closing_token_ids == ()


def test_a_tokenizer_without_the_marker_closes_nothing():
    tokenizer = OneMarkerTokenizer()
    tokenizer.convert_tokens_to_ids = lambda token: tokenizer.unk_token_id
    assert facts.model_facts(zoo.model("internvl").config, tokenizer).closing_token_ids == ()


def test_truncated_prompt_without_closing_marker_ends_at_the_last_visual_token():
    family = facts.model_facts(zoo.model("qwen2_5_vl").config)
    assert facts.context_length(torch.tensor([5, zoo.VISION_START, zoo.IMAGE, 7, zoo.VISION_END]), family) == 3


@each("name", zoo.ALL)
def test_context_of_a_text_only_prompt_is_refused(name):
    family = facts.model_facts(zoo.model(name).config)
    with pytest.raises(UnsupportedError, match="text only.*protocol=paper"):
        facts.context_length(zoo.without_visual(name)["input_ids"], family)


def test_context_length_of_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        facts.context_length(torch.zeros(2, 3, dtype=torch.long), facts.model_facts(zoo.model("llava").config))


def test_unknown_family_is_refused_with_the_supported_ones_named():
    with pytest.raises(UnsupportedError) as error:
        facts.model_facts(tf.GemmaConfig())
    for text in (
        "gemma",
        "Qwen2-VL",
        "Qwen2.5-VL",
        "Qwen3-VL",
        "LLaVA-1.5",
        "LLaVA-NeXT",
        "LLaVA-OneVision",
        "InternVL",
    ):
        assert text in str(error.value)


def test_untested_text_backbone_is_refused():
    config = tf.LlavaConfig(vision_config=tf.CLIPVisionConfig(), text_config=tf.GemmaConfig())
    with pytest.raises(UnsupportedError, match="LLaVA-1.5 with a 'gemma' text model.*llama"):
        facts.model_facts(config)


@each(
    "config",
    [
        tf.MistralConfig(sliding_window=4096),
        tf.Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=2, num_hidden_layers=4),
        tf.LlavaNextConfig(text_config=tf.MistralConfig(sliding_window=4096)),
    ],
)
def test_sliding_window_layers_are_refused_with_the_reason(config):
    with pytest.raises(UnsupportedError, match="sliding_attention.*sliding_window=.*full attention"):
        facts.model_facts(config)


def test_a_window_that_is_not_in_use_is_no_reason_to_refuse():
    for config in (tf.Qwen2Config(use_sliding_window=False, sliding_window=64), tf.MistralConfig(sliding_window=None)):
        assert not facts.model_facts(config).multimodal


def test_importing_the_facts_loads_neither_torch_nor_transformers():
    import subprocess
    import sys

    code = "import sys, mmkv_bench.families.registry; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ----------------------------------------------------------------------------------- layers that are not compressed


@each("name", zoo.HYBRID)
def test_facts_of_hybrid_models_count_compressed_layers_and_state_the_others(name):
    model, inputs = zoo.model(name), zoo.prompt(name)
    family = facts.model_facts(model.config)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    _batch, heads, length, dim = cache.layers[1].keys.shape
    assert (family.num_layers, family.all_layers, family.num_kv_heads, family.head_dim) == (2, 4, heads, dim)
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers[1::2])
    assert facts.kv_bytes_per_token(family, "float32") * length == stored
    values = model.config.to_dict()
    stated = facts.stated(values)
    assert isinstance(stated, facts.StatedConfig) and facts.model_facts(stated) == family
    assert facts.stated({key: value for key, value in values.items() if key != "layer_types"}) is None


def _small(config_class, **more):
    """Tiny widths; what a config does not know is left out by transformers."""
    widths = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return config_class(**{"vocab_size": 64, "num_hidden_layers": 4, "head_dim": 8, **widths, **more})


class Gemma3n(tf.PreTrainedConfig):
    """The type alone: importing the true class imports timm and, through it, trackers of experiments, for seconds."""

    model_type = "gemma3n_text"


REFUSED = {
    "capped softly": lambda: _small(tf.Gemma2Config),
    "read the keys of an earlier one": lambda: Gemma3n(),
    "short convolutions": lambda: _small(tf.Lfm2Config),
    "Mamba blocks": lambda: _small(tf.JambaConfig),
    "no keys and values": lambda: _small(tf.MambaConfig),
    "attend in chunks": tf.Llama4TextConfig,
    "its experts are not tested here": tf.Qwen3_5MoeConfig,
    "use_bidirectional_attention=True.*allowed: null or false": lambda: _small(
        tf.Gemma3TextConfig, use_bidirectional_attention=True, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "none of the 2 layers has full attention": lambda: _small(
        tf.Gemma3TextConfig, num_hidden_layers=2, layer_types=["sliding_attention"] * 2
    ),
    "layers 0 to 0 .1 of 2. use conv.*or linear_attention": lambda: _small(
        tf.Qwen3_5TextConfig, num_hidden_layers=2, layer_types=["conv", "full_attention"]
    ),
}


@each("reason", REFUSED)
def test_other_layers_are_refused_by_name_with_the_reason(reason):
    with pytest.raises(UnsupportedError, match=reason) as error:
        facts.model_facts(REFUSED[reason]())
    assert str(error.value).count(". ") <= 1


def test_a_refused_type_is_one_that_transformers_has():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from mmkv_bench.families.registry import REFUSED as names
    from mmkv_bench.families.registry import families

    assert set(names) <= set(CONFIG_MAPPING_NAMES) and not set(names) & set(families())
