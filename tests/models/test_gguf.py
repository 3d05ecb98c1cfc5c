"""GGUF files: read and dequantised by transformers, identified by content, refused where they hold something else."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.models.gguf import tensor_types
from mmkv_bench.models.source import Source
from tests.families.shapes import node

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'mmkv-bench[gguf]')")
WIDTH, HEADS, ROWS = 32, 4, 300


def written(path, architecture="llama", tokenizer=True):
    """A GGUF file of a narrow Llama of one layer, its attention's output quantised to Q8_0."""
    import numpy as np

    writer, draws = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_vocab_size(ROWS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*(chr(0x100 + index) for index in range(ROWS - 1)), "\u0100\u0101"])
        writer.add_token_types([1] * ROWS)
        writer.add_token_merges(["\u0100 \u0101"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}\u0103")
    block = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (WIDTH, WIDTH),
        "attn_v": (WIDTH, WIDTH),
        "attn_output": (WIDTH, WIDTH),
    }
    block |= {"ffn_gate": (2 * WIDTH, WIDTH), "ffn_up": (2 * WIDTH, WIDTH), "ffn_down": (WIDTH, 2 * WIDTH)}
    block |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
    shapes = {"token_embd": (ROWS, WIDTH), "output_norm": (WIDTH,), "output": (ROWS, WIDTH)}
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in block.items()}).items():
        values = draws.standard_normal(shape, dtype=np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if name.endswith("attn_output") else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path


GEMMA = {
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{f"self_attn.{one}_norm": f"attn_{one}_norm" for one in "qk"},
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Names of a block's weights, as llama.cpp's converter writes them."""


def written_gemma(path, model):
    """A GGUF file of a Gemma 3, whose norms are stored with the 1 that transformers adds."""
    config, writer = model.config, gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(ROWS)
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*pieces, *(chr(0x100 + index) for index in range(ROWS - len(pieces)))])
    writer.add_token_scores([0.0] * ROWS)
    writer.add_token_types([3] * 4 + [6] * 256 + [1] * (ROWS - len(pieces)))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, values in model.model.state_dict().items():
        place, *rest = name.removesuffix(".weight").split(".", 2)
        whole = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(place)
        stored = whole or f"blk.{rest[0]}.{GEMMA[rest[1]]}"
        writer.add_tensor(f"{stored}.weight", (values + 1 if "norm" in name else values).numpy())
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path


@torch.inference_mode()
def test_a_file_of_gemma_3_has_its_windows_its_two_rotations_and_its_logits(tmp_path):
    """As `model=gemma3_270m_q4_k_m` is read, whose own file needs terms that a person accepts."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma3TextConfig(
        vocab_size=ROWS, num_hidden_layers=6, head_dim=16, sliding_window=16, max_position_embeddings=128, **sizes
    )
    reference = Gemma3ForCausalLM(config).eval()
    for name, parameter in reference.named_parameters():
        if "norm" in name:
            parameter.normal_(0, 0.3)
    loaded = of(written_gemma(tmp_path / "gemma.gguf", reference)).load()
    tokens = torch.arange(4, 94)[None]
    assert torch.equal(loaded.model(tokens).logits, reference(tokens).logits)
    assert (loaded.family.states.windows, loaded.family.states.window, loaded.family.num_layers) == (5, 15, 1)


def of(file) -> Source:
    return Source.of(node("hf", path=None, weights=str(file)))


def test_a_file_is_its_content_and_computes_what_transformers_computes(tmp_path):
    from transformers import AutoModelForCausalLM

    file = written(tmp_path / "small.gguf")
    source = of(file)
    loaded = source.load()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32).eval()
    tokens = torch.arange(10)[None]
    assert source.gguf_file == "small.gguf (F32 11, Q8_0 1)"
    with torch.inference_mode():
        assert torch.equal(loaded.model(tokens).logits.float(), reference(tokens).logits)
    (tmp_path / "sub").mkdir()
    elsewhere = shutil.copy(file, tmp_path / "sub" / "renamed.gguf")
    assert of(elsewhere).fingerprint() == source.fingerprint()
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    elsewhere.write_bytes(changed)
    assert of(elsewhere).fingerprint() != source.fingerprint()


def test_a_file_without_tokenizer_takes_the_named_one_which_is_part_of_the_model(tmp_path):
    whole, bare = written(tmp_path / "whole.gguf"), written(tmp_path / "bare.gguf", tokenizer=False)
    of(whole).load().tokenizer.save_pretrained(tmp_path / "named")
    source = Source.of(node("hf", path=None, weights=str(bare), tokenizer=str(tmp_path / "named")))
    loaded = source.load()
    tokens = torch.arange(10)[None]
    with torch.inference_mode():
        assert torch.equal(loaded.model(tokens).logits, of(whole).load().model(tokens).logits)
    assert loaded.tokenizer.get_vocab() == of(whole).load().tokenizer.get_vocab()
    first = source.fingerprint()
    assert first[0] not in (of(bare).fingerprint()[0], of(whole).fingerprint()[0])
    file = tmp_path / "named" / "tokenizer_config.json"
    file.write_text(file.read_text() + " ")
    assert source.fingerprint() != first
    with pytest.raises(ConfigError, match="has no tokenizer.json"):
        Source.of(node("hf", path=None, weights=str(bare), tokenizer=str(tmp_path)))
    with pytest.raises(ConfigError, match="is for GGUF files"):
        Source.of(node("tiny", tokenizer=str(tmp_path / "named")))


def test_what_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="vision tower of a multimodal model"):
        of(written(tmp_path / "mmproj.gguf", "clip")).described  # noqa: B018
    with pytest.raises(UnsupportedError, match="model_type 'gemma2' is not supported .its scores are capped softly"):
        of(written(tmp_path / "gemma.gguf", "gemma2")).described  # noqa: B018
    with pytest.raises(ConfigError, match="cannot be loaded .*architecture rwkv6 is not supported yet"):
        of(written(tmp_path / "rwkv.gguf", "rwkv6")).described  # noqa: B018
    with pytest.raises(ConfigError, match="has no tokenizer"):
        of(written(tmp_path / "bare.gguf", tokenizer=False)).described  # noqa: B018
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        of(tmp_path / "text.gguf").described  # noqa: B018


def test_a_header_is_read_once_and_again_when_the_file_changes(tmp_path, monkeypatch):
    file, reads = written(tmp_path / "small.gguf"), []
    old = file.stat().st_mtime_ns
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mmkv_bench.models.gguf.outlives_the_process", lambda file, state: True)
    read = gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda *args: reads.append(args) or read(*args))
    assert tensor_types(file) == "F32 11, Q8_0 1" and len(reads) == 1
    monkeypatch.setattr("mmkv_bench.models.gguf._here", {})  # another process
    assert tensor_types(file) == "F32 11, Q8_0 1" and len(reads) == 1
    file.unlink()
    os.utime(written(file), ns=(old, old))
    tensor_types(file)
    assert len(reads) == 2, "a file of the same name, size and time is another file"


def test_plain_prompts_are_the_words_alone_and_part_of_the_model(tmp_path):
    file = written(tmp_path / "base.gguf")
    plain = Source.of(node("hf", path=None, weights=str(file), template="plain"))
    assert plain.fingerprint() != of(file).fingerprint()
    tokenizer = plain.load().tokenizer
    messages = [{"role": "system", "content": "\u0105"}, {"role": "user", "content": "\u0106"}]
    made = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert made == "\u0105\n\n\u0106"
    for model, changes in (("hf", {"path": None, "weights": str(file)}), ("smolvlm_256m", {"weights": "random"})):
        with pytest.raises(ConfigError, match="allowed: plain, only for a text model"):
            Source.of(node(model, template="plane" if model == "hf" else "plain", **changes))
