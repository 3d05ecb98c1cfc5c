"""Read a model layer by layer in one forward pass; nothing larger than one layer's keys stays in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmkv_bench.compression.observation import Needs, Observation, PromptBatch
from mmkv_bench.compression.session import Session


class LayerReader:
    """A session's listener that stores `read(observation)` of each layer and compresses nothing."""

    def __init__(self, needs: Needs, read: Callable[[Observation], Any]):
        self.needs, self.read = needs, read
        self.values: list[Any] = []

    def layer_done(self, prompt: PromptBatch, layer: int, observations: list[Observation]) -> None:
        self.values.append(self.read(observations[0]))

    def prompt_done(self, prompt: PromptBatch) -> None:
        """Do nothing: the cache is not reduced."""

    def kept(self) -> list[Tensor]:
        return []


def read_layers(
    model: nn.Module,
    inputs: dict[str, Tensor],
    types: Tensor,
    needs: Needs,
    read: Callable[[Observation], Any],
    identity: str = "prompt",
) -> list[Any]:
    """Return `read(observation)` of every layer, in order, from one prefill of one sequence with the full cache.

    Args:
        inputs: arguments of the model's forward, batch 1, without padding.
        types: int `[1, T]`.
        needs: statistics that `read` uses.
        identity: the sample's identity, which seeds its random streams.
    """
    reader = LayerReader(needs, read)
    with torch.no_grad(), Session(model, reader, token_types=types, identity=identity):
        model(**inputs, use_cache=True, logits_to_keep=1, return_dict=True)
    return reader.values


def with_answer(inputs: dict[str, Tensor], types: Tensor, answer: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs and types of T + n tokens: a prompt followed by an answer's tokens as text.

    Args:
        inputs: inputs of one prompt, without an attention mask.
        types: int `[1, T]`.
        answer: int64 `[n]`.
    """
    length = inputs["input_ids"].shape[1]
    text = torch.zeros(1, len(answer), dtype=types.dtype, device=types.device)
    longer = {
        name: torch.cat([tensor, (answer if name == "input_ids" else 0 * answer).to(tensor)[None]], 1)
        if tensor.ndim == 2 and tensor.shape == (1, length)
        else tensor
        for name, tensor in inputs.items()
    }
    return longer, torch.cat([types, text], 1)
