"""LoRA as sums of weights: one dense product a layer, which is faster on a GPU than two thin ones beside it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mmkv_bench.reader.model import ALPHA, RANK
from tools.train_reader.weights import TARGETS


class LoraLinear(nn.Module):
    """A frozen linear layer of weight W (out, in) that computes with W + ALPHA / RANK * B A."""

    weight: torch.Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().float().clone(), persistent=False)
        out, size = self.weight.shape
        self.down = nn.Parameter(torch.empty(RANK, size))
        self.up = nn.Parameter(torch.zeros(out, RANK))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        weight = torch.addmm(self.weight, self.up, self.down, alpha=ALPHA / RANK)
        return functional.linear(states, weight.to(states.dtype))


def add_lora(model: Any, dtype: torch.dtype) -> dict[str, LoraLinear]:
    """Freeze the language model, keep it in `dtype`, and replace its linear layers; return these by name."""
    text = model.model.text_model
    model.requires_grad_(False)
    layers = {}
    for name, module in list(text.named_modules()):
        if name.rsplit(".", 1)[-1] in TARGETS:
            parent = text.get_submodule(name.rsplit(".", 1)[0])
            layers["model.text_model." + name] = LoraLinear(module)
            setattr(parent, name.rsplit(".", 1)[-1], layers["model.text_model." + name])
    for name, value in text.named_parameters():
        if not name.endswith((".down", ".up")):
            value.data = value.data.to(dtype)
    model.model.vision_model.requires_grad_(True)
    model.model.connector.requires_grad_(True)
    return layers


def pairs(layers: dict[str, LoraLinear]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A and B of each layer, as `tools.train_reader.weights.save_adapter` takes them."""
    return {name: (layer.down, layer.up) for name, layer in layers.items()}
