"""Loading a model as any user would: AutoProcessor and AutoModel, from a folder or the hub, safetensors only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.models.families import Family, family_of, text_model

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass
class LoadedModel:
    """A model in eval mode with what is needed to prompt it.

    `processor` is the tokenizer itself for text models; `device` is where inputs go.
    """

    name: str
    model: nn.Module
    processor: Any
    tokenizer: Any
    family: Family
    device: torch.device
    dtype: str


def load_config(path: str, revision: str | None = None) -> Any:
    """The transformers config of a folder or hub id; refuses what is not there and families that are not supported.

    Raises:
        ConfigError: no such folder or repository, or a config that cannot be read.
        UnsupportedError: a family, backbone or layer type outside the supported ones.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(_why(path, error)) from error
    family_of(config)
    return config


def load_model(
    name: str,
    path: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    attention: str = "sdpa",
    device: str = "auto",
    device_map: Any = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> LoadedModel:
    """Load weights and processor.

    Args:
        path: local folder or hub id; dtype: float32, bfloat16, float16, or auto for the checkpoint's own.
        attention: implementation to wrap; the vision tower keeps transformers' default.
        device: auto, cpu or cuda; device_map: accelerate's, instead of `device`.
        min_pixels, max_pixels: limits of the image processor, where the family's has them.

    Raises:
        ConfigError, UnsupportedError: see `load_config`; also no CUDA device, or weights without safetensors.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    config = load_config(path, revision)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device=cuda, but this machine has no CUDA device; allowed here: cpu, auto")
    where = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    multimodal = family_of(config).multimodal
    common = {"revision": revision, "trust_remote_code": False}
    try:
        if multimodal:
            limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
            processor = AutoProcessor.from_pretrained(path, **common, **{k: v for k, v in limits.items() if v})
            tokenizer = processor.tokenizer
        else:
            processor = tokenizer = AutoTokenizer.from_pretrained(path, **common)
        loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
        model = loader.from_pretrained(
            path,
            **common,
            use_safetensors=True,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            device_map=device_map,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(_why(path, error)) from error
    if device_map is None:
        model = model.to(where)
    model = model.eval()
    alone = model.config is text_model(model).config
    model.set_attn_implementation(attention if alone else {"text_config": attention})
    family = family_of(config, tokenizer)
    if getattr(processor, "chat_template", None) is None:
        raise UnsupportedError(
            f"{path} has no chat template, so its prompts cannot be rendered; add chat_template.jinja to the folder"
        )
    if device_map is not None:
        where = model.get_input_embeddings().weight.device
    return LoadedModel(name, model, processor, tokenizer, family, where, str(model.dtype).removeprefix("torch."))


def _why(path: str, error: Exception) -> str:
    """One sentence for a folder or repository that cannot be loaded."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    local = path.startswith((".", "/", "~")) or os.path.sep in path.removesuffix("/") and os.path.exists(path)
    if local and not os.path.isdir(path):
        return f"model.path={path} is not there; give the folder of a Hugging Face checkpoint, or a hub id"
    return (
        f"model.path={path} cannot be loaded ({reason}); give a folder with config.json and *.safetensors, or a hub id"
    )
