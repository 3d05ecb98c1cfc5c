"""Files of a reader that is trained: tower and connector, and a LoRA in PEFT's format, both in float16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmkv_bench.reader.model import ALPHA, RANK, TOWER_FILE, blank_reader, tower_weights

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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
