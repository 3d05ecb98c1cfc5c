"""The reader: SmolLM2-135M-Instruct inside transformers' SmolVLM class, with an own tower, connector and LoRA.

A reader's folder holds `tower.safetensors` (tower and connector, float16) and an adapter in PEFT's format (float16), below 10 MB
together. The language model is read from its GGUF file, and is the same for every reader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.reader.documents import PATCH
from tools.reader.prompts import IMAGE_ID
from tools.reader.render import CHARACTERS

VISION = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "image_size": 448,
    "patch_size": PATCH,
}
RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOWER_FILE = "tower.safetensors"


def language_model(gguf: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return SmolLM2's configuration and its weights in float32, by the names of LlamaForCausalLM; about 30 s."""
    import torch
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    return base.config.to_dict(), base.state_dict()


def blank_reader(base: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    """Return SmolVLMForConditionalGeneration in float32 with a language model's weights and a tower of random ones."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    text = {
        key: value
        for key, value in base[0].items()
        if key not in ("_name_or_path", "architectures", "dtype", "torch_dtype")
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
    """Return the parameters of tower and connector by name, as they are (not copied)."""
    return {
        name: value
        for name, value in model.named_parameters()
        if name.startswith(("model.vision_model.", "model.connector."))
    }


def save_tower(model: Any, folder: Path) -> None:
    """Write tower and connector in float16."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to("cpu", torch.float16).contiguous() for name, value in tower_weights(model).items()
    }
    save_file(weights, folder / TOWER_FILE, {"format": "pt"})


def save_adapter(pairs: dict[str, tuple[Any, Any]], folder: Path) -> None:
    """Write a LoRA in PEFT's format, float16. pairs: by the name of a linear layer, A (rank, in) and B (out, rank)."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, (down, up) in pairs.items():
        for part, value in (("lora_A", down), ("lora_B", up)):
            weights[f"base_model.model.{name}.{part}.weight"] = value.detach().to("cpu", torch.float16).contiguous()
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": f".*text_model.*\\.({'|'.join(sorted(TARGETS))})",
        "task_type": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def load_reader(folder: Path, base: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    """Return a trained reader in float32, its LoRA merged: a stock SmolVLMForConditionalGeneration in eval mode.

    Args:
        base: what `language_model` returns.

    Raises:
        RuntimeError: tower or adapter of another shape.
    """
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file

    model = blank_reader(base)
    own, kept = tower_weights(model), load_file(folder / TOWER_FILE)
    if own.keys() != kept.keys():
        raise RuntimeError(f"{folder / TOWER_FILE} is no tower of this reader")
    with torch.no_grad():
        for name, value in kept.items():
            own[name].copy_(value)
    return PeftModel.from_pretrained(model, str(folder), local_files_only=True).merge_and_unload(safe_merge=True).eval()


def character_ids(words: Any) -> list[int]:
    """Return the tokens of the signs on pages, each of one token, in the order of `render.CHARACTERS`."""
    ids = [words(sign, add_special_tokens=False).input_ids for sign in CHARACTERS]
    assert all(len(one) == 1 for one in ids)
    return [one[0] for one in ids]
