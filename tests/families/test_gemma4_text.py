"""Gemma 4: its text model is taken out of a checkpoint with towers, and is the same model."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as tf

from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.facts import model_facts, stated
from mmkv_bench.models.load import load_config
from mmkv_bench.models.shape import values_of
from mmkv_bench.models.source import Source
from mmkv_bench.run.console_output import _uncompressed_layers_line
from tests import zoo
from tests.families.shapes import node
from tools.gemma4_text import extract, main


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint as published: text model under another name, a tower beside it, keys of readers that nothing uses."""
    vision = tf.Gemma4VisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, position_embedding_size=16,
    )  # fmt: skip
    text = zoo.config("gemma4")
    text.tie_word_embeddings = True
    torch.manual_seed(0)
    model = tf.Gemma4ForConditionalGeneration(tf.Gemma4Config(text_config=text, vision_config=vision)).eval()
    folder = tmp_path_factory.mktemp("gemma4")
    unused = {"model.language_model.layers.5.self_attn.k_proj.weight": torch.zeros(3)}
    model.save_pretrained(folder, state_dict=model.state_dict() | unused)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    return folder, model


def test_the_text_model_that_is_taken_out_gives_the_same_logits(whole, tmp_path, capsys):
    folder, model = whole
    assert main([str(folder), str(tmp_path / "text")]) == 0 and "model.weights=" in capsys.readouterr().out
    assert load_config(str(tmp_path / "text")).model_type == "gemma4_text"
    made, told = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert made.generation_config.eos_token_id == [1, 106]
    ids = torch.tensor([zoo.text(40, 1)])
    with torch.no_grad():
        assert torch.equal(made.eval()(input_ids=ids).logits, model(input_ids=ids).logits)


def test_other_folders_are_refused(whole, tmp_path):
    with pytest.raises(ConfigError, match="no readable config.json"):
        extract(tmp_path, tmp_path / "new")
    with pytest.raises(ConfigError, match="is not empty; name a new folder"):
        extract(whole[0], whole[0])
    other = tmp_path / "other"
    zoo.config("gemma3").save_pretrained(other)
    with pytest.raises(ConfigError, match="has a gemma3_text model; give the folder of a Gemma 4"):
        extract(other, tmp_path / "new")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((whole[0] / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"lacks \d+ weights of the text model"):
        extract(bare, tmp_path / "new")


def test_a_folder_with_towers_is_refused_by_name_with_what_to_do(whole):
    with pytest.raises(UnsupportedError, match="tools.gemma4_text"):
        Source.of(node("gemma4_e2b", weights=str(whole[0]))).hf_config  # noqa: B018


def test_a_card_names_the_layers_that_are_not_compressed():
    facts = model_facts(stated(values_of(node("gemma4_e2b").shape)))
    assert _uncompressed_layers_line(facts) == [
        "beside     12 with a window of 511 entries and 20 that read another layer's entries, which are not compressed"
    ]
