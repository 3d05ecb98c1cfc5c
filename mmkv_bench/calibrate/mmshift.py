"""MM-ShiftKV's statistics of other prompts: what its ablations read (the method itself needs none).

``mean``: elementwise mean of the query projection's input over a prompt's tokens, averaged over the samples (table 11,
global mean centring). ``gamma``: how much wider these inputs spread while the answer is decoded than over the prompt,
one factor per layer (table 10, layer-wise expansion; figure 1a): the standard deviation over all values of the answer's
tokens over that of the prompt's, each averaged over the samples. The true answer is fed behind the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mmkv_bench.calibrate.observing import read_layers, with_answer
from mmkv_bench.calibrate.samples import Sample, answer_ids, encoded
from mmkv_bench.compression.observation import Needs, Observation

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.models.load import LoadedModel


def moments(states: Tensor, length: int) -> tuple[list[float], float, float]:
    """Elementwise mean ``[E]`` of the first `length` tokens, and the population standard deviation over all values of
    these and of the other tokens. states: ``[T + n, E]``, n >= 1."""
    prompt, answer = states[:length].double(), states[length:].double()
    return prompt.mean(0).tolist(), float(prompt.std(correction=0)), float(answer.std(correction=0))


def measure(loaded: LoadedModel, sample: Sample, settings: Mapping[str, Any]) -> list[tuple[list[float], float, float]]:
    """`moments` of every layer for one sample."""
    import torch

    prompt = encoded(loaded, sample)
    answer = torch.tensor(answer_ids(loaded, sample), device=loaded.device)
    longer, types = with_answer(prompt.inputs, prompt.types, answer)

    def read(obs: Observation) -> tuple[list[float], float, float]:
        return moments(obs.states, prompt.length)

    return read_layers(loaded.model, longer, types, Needs(states=True), read)


def summarise(found: Sequence[list[tuple]], settings: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """The artefact's data from `measure` of every sample: ``mean`` (E floats per layer), ``gamma``, ``std_prompt`` and
    ``std_answer`` (one float per layer)."""
    layers = [list(zip(*layer, strict=True)) for layer in zip(*found, strict=True)]
    prompt, answer = [fmean(std) for _, std, _ in layers], [fmean(std) for _, _, std in layers]
    return {
        "mean": [[fmean(values) for values in zip(*means, strict=True)] for means, _, _ in layers],
        "gamma": [a / p for a, p in zip(answer, prompt, strict=True)],
        "std_prompt": prompt,
        "std_answer": answer,
    }
