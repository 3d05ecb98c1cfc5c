"""Random weights: one function of name and place, the same everywhere, and a model whose cache matters."""

from __future__ import annotations

import math

import pytest
import torch

from mmkv_bench.errors import ConfigError
from mmkv_bench.models import random_weights
from mmkv_bench.models.random_weights import QUERY_KEY_GAIN, values
from mmkv_bench.models.shape import config_of
from mmkv_bench.models.source import Source
from tests import cover
from tests.each import each
from tests.families.shapes import FAMILIES, small

CPU = torch.device("cpu")


def mixed(x: int) -> int:
    """The hash of one index in Python's unbounded integers."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x


def weights(name: str, **options):
    model = small(name)
    options = {"dtype": torch.float32, "device": CPU} | options
    return random_weights.build(config_of(model.shape, model.layers), **options)


def test_an_entry_is_a_hash_of_its_name_and_place():
    first, second = (key % 2**32 for key in random_weights._keys("a.weight"))
    for place in (0, 1, 2, 12345, 2**30):
        digits = mixed(mixed((place + first) % 2**32) ^ second) >> 8
        expected = digits / 2**24 * 2 * math.sqrt(3) - math.sqrt(3)
        assert values("a.weight", 1, CPU, place).item() == pytest.approx(expected, abs=1e-6)


def test_entries_are_spread_evenly_and_differ_between_parameters():
    a, b = (values(name, 200_000, CPU) for name in ("layers.0.q_proj.weight", "layers.1.q_proj.weight"))
    for x in (a, b):
        assert abs(x.mean()) < 0.01 and x.std() == pytest.approx(1, abs=0.01) and x.abs().max() <= math.sqrt(3)
        counts = torch.histc(x, 20)
        assert counts.min() > 9500 and counts.max() < 10500
        assert abs(torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1]) < 0.01
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.01


@pytest.mark.full
def test_entries_do_not_depend_on_the_chunks_they_are_made_in(monkeypatch):
    whole = weights("llama_3_8b").state_dict()
    monkeypatch.setattr(random_weights, "_CHUNK", 1000)
    assert all(torch.equal(whole[key], value) for key, value in weights("llama_3_8b").state_dict().items())


@pytest.mark.full
@each("name", ["qwen2_5_vl_7b", "internvl3_8b"])
def test_weights_are_the_same_whatever_ran_before_and_leave_the_generators_alone(name):
    torch.manual_seed(1)
    first = weights(name).state_dict()
    torch.manual_seed(2)
    torch.rand(7)
    before = torch.get_rng_state()
    second = weights(name).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.full
def test_a_lower_precision_holds_the_rounded_values():
    full, half = weights("qwen2_vl_7b").state_dict(), weights("qwen2_vl_7b", dtype=torch.bfloat16).state_dict()
    assert {v.dtype for v in half.values()} == {torch.bfloat16}
    assert all(torch.equal(full[key].bfloat16(), half[key]) for key in full)


@pytest.mark.slow
@cover.few("name", FAMILIES, keep=1, first=1)
def test_every_parameter_is_made_and_buffers_are_computed(name):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model = weights(name)
    config = config_of(small(name).shape)
    loader = AutoModelForCausalLM if name == "llama_3_8b" else AutoModelForImageTextToText
    stock = loader.from_config(config, dtype=torch.float32)
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in stock.state_dict().items()}
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[key], value) for key, value in stock.named_buffers())
    for key, parameter in model.named_parameters():
        assert parameter.device == CPU and parameter.isfinite().all(), key
        assert parameter.ndim < 2 or parameter.float().std() > 0, key


@pytest.mark.full
def test_tied_embeddings_stay_one_parameter():
    model = weights("qwen2_5_vl_7b")
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    tied = small("qwen2_5_vl_3b")
    model = random_weights.build(config_of(tied.shape), dtype=torch.float32, device=CPU)
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.full
@each("place", [{"": "cpu"}, "auto", {"model": "cpu", "lm_head": "cpu"}])
def test_a_device_map_gives_the_same_weights(place):
    here, spread = weights("qwen2_5_vl_7b"), weights("qwen2_5_vl_7b", device_map=place)
    other = dict(spread.named_parameters())
    assert all(torch.equal(p, other[key]) for key, p in here.named_parameters())


@each(("place", "words"), [({"": "disk"}, "on disk"), ({"model.visual": "cpu"}, "no device for some weights")])
def test_a_device_map_that_cannot_be_is_refused(place, words):
    with pytest.raises(ConfigError, match=words):
        weights("qwen2_5_vl_7b", device_map=place)


@pytest.mark.slow
@cover.few("name", FAMILIES, keep=1)
def test_logits_are_finite_differ_between_prompts_and_move_when_the_cache_is_cut(name):
    loaded = Source.of(small(name)).load()
    model, tokenizer = loaded.model, loaded.tokenizer
    logits = {}
    for text in ("what is written on the second page?", "how many red squares are there?"):
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            full = model(input_ids=ids).logits[0, -1]
            cut = model(input_ids=ids[:, -12:]).logits[0, -1]
        assert full.isfinite().all()
        assert 0.1 < full.std() < 10
        assert (full.log_softmax(-1) - cut.log_softmax(-1)).abs().max() > 0.1, (
            "dropping most of the context does nothing"
        )
        assert int(full.argmax()) != int(ids[0, -1]), "an answer is more than the last token again"
        logits[text] = full
    first, second = logits.values()
    assert (first - second).abs().max() > 0.1


@pytest.mark.full
def test_text_queries_and_keys_are_sharpened_and_nothing_else_of_a_model():
    model = weights("qwen2_5_vl_7b")
    layer = model.get_decoder().layers[1].self_attn
    fan_in = layer.q_proj.weight.shape[1]
    for part, gain in ((layer.q_proj, QUERY_KEY_GAIN), (layer.k_proj, QUERY_KEY_GAIN), (layer.v_proj, 1.0)):
        assert part.weight.std() * math.sqrt(fan_in) == pytest.approx(gain, rel=0.05)
    normed = weights("qwen3_vl_8b").get_decoder().layers[0].self_attn
    assert (normed.q_norm.weight == QUERY_KEY_GAIN).all() and (normed.k_norm.weight == QUERY_KEY_GAIN).all()


@pytest.mark.full
def test_generation_ends_with_the_checkpoints_ids_and_never_samples():
    loaded = Source.of(small("qwen2_5_vl_7b")).load()
    config = loaded.model.generation_config
    assert (config.do_sample, list(config.eos_token_id), config.pad_token_id) == (False, [151645, 151643], 151643)
