"""Promise: bytes, operations and limits come out as a reader computes them by hand, and as transformers counts parameters."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from mmkv_bench.families.base import Layer
from mmkv_bench.families.facts import model_facts, stated
from mmkv_bench.forecast import roofline
from mmkv_bench.models.shape import Decoder, config_of, decoder_of, sizes_of, stored_parameters, values_of
from mmkv_bench.models.source import shaped
from tests import zoo
from tests.each import each
from tests.families.shapes import node

NAMES = shaped()
# q 3584*3584, k and v 3584*512 each, o 3584*3584, gate, up and down 3584*18944 each; biases 3584 + 2*512, two norms of 3584
LAYER = Layer(28, 2 * 12_845_056 + 2 * 1_835_008 + 3 * 67_895_296, 4_608 + 7_168, queries=28 * 128)
QWEN = Decoder(28, 3584, 18944, 4, 128, 152064, tied=False, shapes=(LAYER,))
"""Qwen2.5-VL-7B's text model, by hand; `test_what_is_known_of_a_models_size_says_its_source` reads it from its config.json."""
H100 = 3.35e12  # bytes per second, as its maker says


def test_parameters_of_a_published_shape_are_those_computed_by_hand():
    assert QWEN.multiplied == 28 * 233_046_016
    assert QWEN.blocks == 28 * (233_046_016 + 4_608 + 7_168) + 3_584 == 6_525_621_760
    assert QWEN.table == 544_997_376
    assert QWEN.read == 7_070_619_136  # the head, and not the embedding table, which is another one
    assert QWEN.parameters == 7_615_616_512
    assert QWEN.compressed * QWEN.entry == 2 * 28 * 4 * 128 == 28_672


def test_a_step_of_7b_at_32k_has_the_published_limits():
    weights, kv = 2 * QWEN.read, 2 * QWEN.compressed * QWEN.entry * 32768
    assert (weights, kv) == (14_141_238_272, 1_879_048_192)
    assert roofline.roofline_ms(roofline.step_bytes(weights, kv), H100) == pytest.approx(4.7822, abs=1e-4)
    # evicting 90 % at batch 1 wins 1.12x at most; at batch 8 the caches weigh more: 29.17 GB over 15.64
    assert roofline.speed_up_allowed(weights, kv, kv / 10) == pytest.approx(1.1180, abs=1e-4)
    assert roofline.speed_up_allowed(weights, kv, kv / 10, batch=8) == pytest.approx(1.8648, abs=1e-4)
    assert roofline.speed_up_allowed(weights, kv, kv) == 1


def test_operations_of_steps_and_prefills_are_those_computed_by_hand():
    matrices = 28 * 233_046_016 + 544_997_376
    assert roofline.step_operations(QWEN, 1000) == 2 * matrices + 28 * 28 * 128 * 4 * 1000
    assert roofline.step_operations(QWEN, 1000, batch=3) == 3 * roofline.step_operations(QWEN, 1000)
    # a prompt of one token is a step on a cache of one entry, that of itself
    assert roofline.prefill_operations(QWEN, 1) == roofline.step_operations(QWEN, 1)
    # of 2048: each pair of a query and an earlier key twice, products of 28 heads of 128
    pairs = sum(range(1, 2049))
    assert roofline.prefill_operations(QWEN, 2048) == (
        2 * 28 * 233_046_016 * 2048 + 4 * 28 * 28 * 128 * pairs + 2 * 544_997_376
    )


def test_a_prompt_that_is_fed_in_pieces_costs_what_it_costs_in_one():
    """Also where a window of sliding layers ends within a piece, or before it."""
    windows = decoder_of(stated(values_of(node("gemma3_270m").shape, None)))
    assert windows is not None and windows.states.window == 511
    for decoder in (QWEN, windows):
        for pieces in ((300, 1), (100, 700), (600, 50, 5), (511, 1, 1), (2000, 2000)):
            done, operations = 0, 2 * decoder.table
            for tokens in pieces:
                operations += roofline.fed_operations(decoder, tokens, done)
                done += tokens
            assert operations == roofline.prefill_operations(decoder, done), (decoder, pieces)


def test_computing_may_be_the_limit():
    weights = 2.0 * QWEN.read
    # batch 512 at 60 TFLOP/s: 512 * 14.1 GFLOP take longer than reading
    slow, operations = 6e13, roofline.step_operations(QWEN, 1, batch=512)
    assert roofline.roofline_ms(weights, H100, operations, slow) == pytest.approx(1000 * operations / slow)
    assert roofline.roofline_ms(weights, H100, operations / 1e6, slow) == pytest.approx(1000 * weights / H100)


def as_built(name: str, layers: int | None = None) -> None:
    from tests.models.test_shapes import on_meta

    model = on_meta(name, layers)
    decoder = decoder_of(stated(values_of(node(name).shape, layers)) or model.config)
    text, head = model.get_decoder(), model.get_output_embeddings()
    embeddings = model.get_input_embeddings().weight
    blocks = sum(parameter.numel() for parameter in text.parameters()) - embeddings.numel() - decoder.rows
    of_experts = sum(parameter.numel() for name, parameter in text.named_parameters() if ".experts." in name)
    taken = text.config.num_experts_per_tok / text.config.num_local_experts if of_experts else 0
    assert (decoder.blocks, decoder.table) == (blocks - of_experts * (1 - taken), head.weight.numel())
    assert decoder.tied == (head.weight is embeddings)
    assert decoder.parameters == blocks + decoder.rows + embeddings.numel() * (1 if decoder.tied else 2)


def test_a_decoder_has_as_many_parameters_as_transformers_builds():
    """Biases and tied embeddings."""
    as_built("qwen2_5_vl_3b", layers=1)


@pytest.mark.full
@each("name", NAMES)
def test_every_models_decoder_has_as_many_parameters_as_transformers_builds(name):
    as_built(name)


def test_what_is_known_of_a_models_size_says_its_source(tmp_path):
    model = dict(vars(node("qwen2_5_vl_7b")))
    whole = stated(dict(model["shape"]))
    known = sizes_of(model, whole)
    assert (known.decoder, known.parameters, known.source) == (QWEN, 8_292_166_656, "stated")
    shrunk = stated({**model["shape"], "text_config": {**model["shape"]["text_config"], "num_hidden_layers": 2}})
    fewer = sizes_of({**model, "layers": 2}, shrunk, whole)
    assert fewer.source == "bound" and fewer.parameters == known.parameters - 26 * (QWEN.blocks - 3584) // 28
    assert "not on this machine" in sizes_of(model, None).missing
    text = {key: value for key, value in model["shape"]["text_config"].items() if key != "intermediate_size"}
    assert "does not state" in sizes_of(model, stated({**model["shape"], "text_config": text})).missing
    save_file({"a": np.zeros((3, 5), np.float16), "b": np.zeros(7, np.float32)}, tmp_path / "model.safetensors")
    assert stored_parameters(tmp_path) == 22
    assert sizes_of(model, whole, folder=tmp_path).parameters == 22
    (tmp_path / "more.safetensors").write_bytes(b"\xff" * 40)
    assert stored_parameters(tmp_path) is None and stored_parameters(tmp_path / "none") is None
    (tmp_path / "more.safetensors").write_bytes((2).to_bytes(8, "little") + json.dumps({}).encode())
    assert stored_parameters(tmp_path) == 22


@each("name", zoo.HYBRID)
def test_decoders_with_states_have_as_many_parameters_as_transformers_builds(name):
    """Gates, linear layers and four norms; from a config.json alone as from transformers' config."""
    model = zoo.model(name)
    decoder = decoder_of(model.config)
    assert decoder == decoder_of(stated(model.config.to_dict()))
    assert decoder.parameters == model.num_parameters()
    assert (decoder.layers, decoder.compressed) == (4, 2)
    matrices = sum(
        module.weight.numel()
        for block in model.get_decoder().layers
        for module in block.modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv1d)
    )
    if name == "gpt_oss":  # two of four experts a token; a step of one sequence reads no other
        for block in model.get_decoder().layers:
            router, experts = block.mlp.router, list(block.mlp.experts.parameters())
            matrices += router.weight.numel() + sum(one.numel() for one in experts if one.ndim == 3) / 2
        idle = 4 * sum(one.numel() for one in experts) / 2
        assert decoder.parameters - decoder.read == decoder.table + idle
    assert decoder.multiplied == pytest.approx(matrices, rel=1e-3)


def test_windows_and_states_are_read_whole_by_a_step_and_bound_a_prefill():
    """Gemma's windows see 16 tokens at most; a query of a full layer sees all before it; by hand."""
    decoder, tokens = decoder_of(zoo.model("gemma3").config), 40
    entry, heads = 2 * zoo.HEAD_DIM * 4, zoo.HEADS * zoo.HEAD_DIM
    assert (
        decoder.states.nbytes(tokens, decoder.entry, 4) == 2 * 15 * entry
        and decoder.compressed * decoder.entry * 4 == 2 * entry
    )
    near, full = sum(min(i, 16) for i in range(1, tokens + 1)), tokens * (tokens + 1) // 2
    pairs = 4 * heads * 2 * (near + full)
    assert roofline.prefill_operations(decoder, tokens) == 2 * (tokens * decoder.multiplied + decoder.table) + pairs
    device = roofline.Roofline(decoder, 4, 1e30, 1e12, "none")  # computing is the limit
    kept = 2 * (9 + 15) * entry
    operations = 2 * (decoder.multiplied + decoder.table) + 4 * heads * 2 * (9 + 15)
    assert device.step_ms(3 * kept, batch=3) == pytest.approx(3 * operations / 1e12 * 1000)
    linear = decoder_of(zoo.model("qwen3_5").config)
    held = linear.states.nbytes(tokens, linear.entry, 4)
    assert held == linear.states.nbytes(1, linear.entry, 4) == 2 * 4 * ((2 * 16 + 32) * 4 + 4 * 8 * 8)
    operations = 2 * (linear.multiplied + linear.table) + 6 * 2 * 256 + 4 * heads * 2 * 9
    assert roofline.Roofline(linear, 4, 1e30, 1e12, "none").step_ms(
        held + 9 * linear.compressed * linear.entry * 4
    ) == pytest.approx(operations / 1e12 * 1000)


def test_layers_of_several_shapes_cost_what_torch_counts():
    """Gemma 4: readers run for a prompt's last token, full layers have wider heads and one projection for keys and values."""
    from torch.utils.flop_counter import FlopCounterMode

    model, tokens = zoo.model("gemma4", "eager"), 40
    decoder = decoder_of(model.config)
    assert decoder.parameters == model.num_parameters()
    wide, narrow = 2 * zoo.HEAD_DIM * zoo.HEADS, zoo.HEAD_DIM * zoo.HEADS
    queries = [decoder.queries(near, reads) for reads in (False, True) for near in (False, True)]
    assert queries == [2 * wide, 2 * narrow, wide, narrow]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.tensor([zoo.text(tokens, 1)]), logits_to_keep=1)
    square = 4 * (tokens * tokens * sum(queries[:2]) + tokens * sum(queries[2:]))  # eager multiplies what it masks, too
    last = decoder.multiplied - decoder.prefilled + decoder.table
    assert counter.get_total_flops() == 2 * (tokens * decoder.prefilled + last) + square
    pairs = tokens * (tokens + 1) // 2, sum(min(i, 16) for i in range(1, tokens + 1)), tokens, 16
    products = sum(4 * one * seen for one, seen in zip(queries, pairs, strict=True))
    assert roofline.prefill_operations(decoder, tokens) == 2 * (tokens * decoder.prefilled + last) + products
    stored = 9 * decoder.compressed * decoder.entry + decoder.states.nbytes(tokens, decoder.entry, 1)
    operations = 2 * (decoder.multiplied + decoder.table) + 4 * (9 * 3 * wide + 15 * 3 * narrow)
    assert roofline.Roofline(decoder, 4, 1e30, 1e12, "none").step_ms(4 * stored) == pytest.approx(operations / 1e9)


@each("name", ["gemma4_e2b", "gemma4_31b"])
def test_a_shape_with_several_widths_is_read_from_config_json_as_from_transformers(name):
    for layers in (None, 2, 17):
        known, built = stated(values_of(node(name).shape, layers)), config_of(node(name).shape, layers)
        assert model_facts(known) == model_facts(built) and decoder_of(known) == decoder_of(built)
        if name == "gemma4_e2b":
            assert decoder_of(known).rows == 262144 * 256 * (layers or 35)
