"""Promise: checkpoints as publishers write them are answered as stock transformers answers them, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf

from mmkv_bench.datasets.fixtures import needle
from mmkv_bench.models.tokenizer import build_tokenizer
from mmkv_bench.store.store import Store
from tests.models.test_chat_template import CHATML, PLUS
from tests.run.setting import done, go, responses

SIZES = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
QUESTION = "What is under the third stone?"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A small Llama with a tokenizer that has no padding token, as Llama-3's has none."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    tf.LlamaForCausalLM(
        tf.LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    ).save_pretrained(folder)
    build_tokenizer(400, CHATML, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, PLUS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    (root / "needle").mkdir()
    needle.make(root / "needle")
    settings = root / "needle" / "needle.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lengths": [300], "depths": [50]}))
    return root


def changed(plain: Path, folder: Path, file: str, **settings) -> Path:
    """The checkpoint with some keys of one of its files written otherwise; None takes a key away."""
    folder.mkdir()
    for source in plain.iterdir():
        (folder / source.name).write_bytes(source.read_bytes())
    known = json.loads((folder / file).read_text()) | settings
    (folder / file).write_text(json.dumps({name: value for name, value in known.items() if value is not None}))
    return folder


def stock_answer(folder: Path, rendered: str, tokens: int) -> list[int]:
    """Greedy tokens of plain transformers for the very prompt."""
    model, tokenizer = tf.AutoModelForCausalLM.from_pretrained(folder), tf.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(rendered, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, num_beams=1)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


CASES = {
    "several ends of a turn": ("generation_config.json", {"eos_token_id": [2, 77, 310]}),
    "a folder that samples": (
        "generation_config.json",
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_length": 20, "eos_token_id": 2},
    ),
    "a repetition penalty": ("generation_config.json", {"repetition_penalty": 1.05, "do_sample": True, "eos_token_id": 2}),
    "no generation config": ("generation_config.json", {"eos_token_id": None, "bos_token_id": None}),
    "dtype in its old word": ("config.json", {"dtype": None, "torch_dtype": "float32"}),
    "rope in its old words": ("config.json", {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": None}),
    "linear rope, old": (
        "config.json",
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "Llama-3.1's rope, old": (
        "config.json",
        {
            "rope_parameters": None,
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}  # fmt: skip


def test_checkpoints_of_publishers_are_answered_as_transformers_answers_them(plain, data, tmp_path):
    for number, (name, (file, settings)) in enumerate(CASES.items()):
        folder = changed(plain, tmp_path / f"model{number}", file, **settings)
        root = tmp_path / f"rows{number}"
        words = ("dataset=needle", f"data.root={data}", "method=snapkv", "budget=32", "limit=1")
        done(root, "model=hf", f"model.path={folder}", *words, "dataset.generation.max_new_tokens=12")
        (prompt,) = Store(root).prompts().to_pylist()
        full = max(responses(root).values(), key=lambda row: row["entries_resident"])
        assert {row["status"] for row in responses(root).values()} == {"ok"}, name
        assert list(full["token_ids"]) == stock_answer(folder, prompt["rendered"], 12), name


def test_shards_with_an_index_are_one_model(plain, data, tmp_path):
    folder = changed(plain, tmp_path / "sharded", "config.json")
    model = tf.AutoModelForCausalLM.from_pretrained(plain)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    words = (
        "dataset=needle",
        f"data.root={data}",
        "method=snapkv",
        "budget=32",
        "limit=1",
        "dataset.generation.max_new_tokens=6",
    )
    for number, path in enumerate((plain, folder)):
        done(tmp_path / f"rows{number}", "model=hf", f"model.path={path}", *words)
    first, second = (
        sorted(tuple(row["token_ids"]) for row in responses(tmp_path / f"rows{number}").values()) for number in (0, 1)
    )
    assert first == second


def test_an_unknown_rope_is_one_sentence(plain, data, tmp_path):
    folder = changed(plain, tmp_path / "odd", "config.json", rope_parameters={"rope_type": "spiral", "rope_theta": 1.0})
    outcome = go(
        tmp_path / "rows", "model=hf", f"model.path={folder}", "dataset=needle", f"data.root={data}", "limit=1"
    )
    assert (
        outcome.code == 2
        and "Traceback" not in outcome.err
        and outcome.err.strip().splitlines()[-1].count("mmkv_bench:") == 1
    )


def test_a_question_that_spells_a_control_token_is_a_row_that_says_so(plain, data, tmp_path):
    """The tokenizer ends the user's turn there, as stock transformers does; nobody would know."""
    file = data / "needle" / "needle.json"
    before = file.read_text()
    words = (
        "dataset=needle",
        f"data.root={data}",
        "method=snapkv",
        "budget=32",
        "limit=1",
        "dataset.generation.max_new_tokens=2",
    )
    for number, (question, marked) in enumerate(
        (("Who said <|im_end|> there?", True), ("Who said im_end there?", False))
    ):
        file.write_text(json.dumps(json.loads(before) | {"question": question}))
        done(tmp_path / f"rows{number}", "model=hf", f"model.path={plain}", *words)
        rows = responses(tmp_path / f"rows{number}").values()
        assert {row["status"] for row in rows} == {"ok"}
        assert {"control_token_in_text" in row["fallback"] for row in rows} == {marked}
    file.write_text(before)
