"""The reader: SmolLM2-135M-Instruct inside transformers' SmolVLM class, with a tower, a connector and a LoRA trained here.

`weights` has `tower.safetensors` (tower and connector, float16) and a LoRA in PEFT's format (float16), below 10 MB together.
The language model is read from its GGUF file. `write_folders` combines all parts into ordinary Hugging Face folders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmkv_bench.reader.documents import PATCH
from mmkv_bench.reader.tokenizer_and_processor import IMAGE_ID, processor, tokenizer

VISION = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "image_size": 448,
    "patch_size": PATCH,
}
RANK, ALPHA = 8, 16
TOWER_FILE = "tower.safetensors"
WEIGHTS = Path(__file__).parent / "weights"
SIDES = {"pages": 448, "frames": 224}
"""Folder of a reader -> side of its pictures in pixels. A processor of transformers has a fixed number of visual tokens."""


def language_model(gguf: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read SmolLM2's GGUF file (about 30 s). Return configuration and float32 weights, with the names of
    LlamaForCausalLM."""
    import torch
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    return base.config.to_dict(), base.state_dict()


def blank_reader(base: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    """Return a SmolVLMForConditionalGeneration in float32, with a language model's weights and a random vision tower.

    base: the result of `language_model`.
    """
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    text = {
        key: value
        for key, value in base[0].items()
        if key not in ("_name_or_path", "_model_name_or_path", "architectures", "dtype", "quantization_config")
    }
    config = SmolVLMConfig(
        text_config=text, vision_config=dict(VISION), scale_factor=1, image_token_id=IMAGE_ID, tie_word_embeddings=True
    )
    model = SmolVLMForConditionalGeneration(config).float()
    weights = {name.removeprefix("model."): value for name, value in base[1].items() if name != "lm_head.weight"}
    model.model.text_model.load_state_dict(weights, strict=True)
    model.tie_weights()
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 2
    return model.eval()


def tower_weights(model: Any) -> dict[str, Any]:
    """Return the parameters of vision tower and connector by name, not copied."""
    return {
        name: value
        for name, value in model.named_parameters()
        if name.startswith(("model.vision_model.", "model.connector."))
    }


def write_folders(gguf: Path, out: Path) -> None:
    """Write one model folder for each of `SIDES`, with config, float32 weights, processor and tokenizer.

    The folders share one weights file by hard links. The LoRA is merged into the weights in float64 and rounded once, so every
    machine writes the same bytes.

    gguf: the language model's file. out: parent of the folders.
    """
    import os

    import torch
    from safetensors.torch import load_file

    config, weights = language_model(gguf)
    added = load_file(WEIGHTS / "adapter_model.safetensors")
    for name in [name for name in added if name.endswith(".lora_A.weight")]:
        target = name.removeprefix("base_model.model.").replace("model.text_model.", "model.").replace(".lora_A", "")
        lora_b, down = added[name.replace("lora_A", "lora_B")].double(), added[name].double()
        weights[target] = (weights[target].double() + ALPHA / RANK * (lora_b @ down)).float()
    model = blank_reader((config, weights))
    tower = load_file(WEIGHTS / TOWER_FILE)
    with torch.no_grad():
        for name, value in tower_weights(model).items():
            value.copy_(tower[name])
    tokenizer_files = tokenizer(gguf)
    first_folder = None
    for name, side in SIDES.items():
        folder = out / name
        processor(tokenizer_files, side).save_pretrained(folder)
        if first_folder is not None:
            for file in ("config.json", "generation_config.json", "model.safetensors"):
                os.link(first_folder / file, folder / file)
            continue
        first_folder = folder
        model.save_pretrained(folder, max_shard_size="2GB")
        for written in (folder / "config.json", folder / "generation_config.json"):
            values = json.loads(written.read_text())
            values.pop("transformers_version")  # otherwise the fingerprint would depend on the version
            written.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
