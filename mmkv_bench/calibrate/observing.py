"""One forward pass of an unmodified model, every layer read as it passes: nothing larger than a layer's keys is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.session import Session

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from mmkv_bench.compression.prompt import Prompt


class Reading:
    """A session's listener that keeps what `read` makes of each layer and compresses nothing."""

    def __init__(self, needs: Needs, read: Callable[[Observation], Any]):
        self.needs, self.read = needs, read
        self.values: list[Any] = []

    def layer_done(self, prompt: Prompt, layer: int, observations: list[Observation]) -> None:
        self.values.append(self.read(observations[0]))

    def prompt_done(self, prompt: Prompt) -> None:
        """Nothing to reduce."""

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
    """`read(observation)` of every layer, in order, from one prefill of one sequence with the full cache.

    Args:
        inputs: what the model's forward takes, batch 1, without padding; types: int `[1, T]`.
        needs: what `read` reads of a layer; identity: of the sample, for its random streams.
    """
    import torch

    reading = Reading(needs, read)
    with torch.no_grad(), Session(model, reading, token_types=types, identity=identity):
        model(**inputs, use_cache=True, logits_to_keep=1, return_dict=True)
    return reading.values


def with_answer(inputs: dict[str, Tensor], types: Tensor, answer: torch.Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same prompt with the tokens of an answer behind it, as text.

    Args:
        inputs: of one prompt without an attention mask; types: int `[1, T]`; answer: int64 `[n]`.

    Returns:
        Inputs and types of T + n tokens.
    """
    import torch

    length = inputs["input_ids"].shape[1]
    text = torch.zeros(1, len(answer), dtype=types.dtype, device=types.device)
    longer = {
        name: torch.cat([tensor, (answer if name == "input_ids" else 0 * answer).to(tensor)[None]], 1)
        if tensor.ndim == 2 and tensor.shape == (1, length)
        else tensor
        for name, tensor in inputs.items()
    }
    return longer, torch.cat([types, text], 1)
