"""Measurements that calibrate methods; per method one function measures a sample, another summarises all samples.

SparseMM's visual head scores (arXiv 2506.05344, section 3): how often a query head attends to the answer on the page.

A page states the position of every character of its answer. The true answer follows the prompt in the model's input, with
the full cache. For each answer token a head scores a hit if the key with its largest attention is one of the visual tokens
that show the answer token's characters. A hit adds 1 / (number of these visual tokens). A head's score is the sum of hits per
sample, averaged over the samples. Only one row of attention per answer token is computed.

The model's family determines which visual tokens show a character (mmkv_bench/families). If a page is encoded both whole and
in tiles, the tokens of both count. If all characters of an answer token are cropped away, no visual token shows it: the answer
token is left out and counted.

Paper and code: both read 1000 images of rendered text (SynthDog), and the model writes what it reads. The release credits a
token only if exactly one text box of the image contains it. Our pages state each character's cell, so every token of the true
answer counts, even if the same digit occurs elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mmkv_bench.calibrate.samples import Cell, PromptSample, answer_ids, encoded, visual_tokens
from mmkv_bench.compression.allocators.hybrid import Hybrid
from mmkv_bench.compression.numerics.prefix import prefix_curves, prefix_ratios, scale_to
from mmkv_bench.compression.observation import Needs, Observation, PromptBatch
from mmkv_bench.compression.session import Session
from mmkv_bench.errors import CalibrationError
from mmkv_bench.families.registry import token_boxes

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel

GRID = tuple(Decimal(i) / 100 for i in range(1, 101))
"""Fractions of PrefixKV's profile: 0.01, 0.02, ..., 1."""
QUANTILES = tuple(i / 20 for i in range(21))


# ---------------------------------------------------------------- a model layer by layer
class LayerReader:
    """A listener of a prefill that stores `read(observation)` of each layer and compresses nothing."""

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
    """Prefill one sequence with the full cache, and return `read(observation)` of every layer, in order.

    Args:
        inputs: arguments of the model's forward, batch 1, without padding.
        types: token types, int `[1, T]`.
        needs: statistics that `read` uses.
        read: function from a layer's observation (its attention statistics) to a value.
        identity: the sample's identity, which seeds its random streams.
    """
    reader = LayerReader(needs, read)
    with torch.no_grad(), Session(model, reader, token_types=types, identity=identity):
        model(**inputs, use_cache=True, logits_to_keep=1, return_dict=True)
    return reader.values


def with_answer(inputs: dict[str, Tensor], types: Tensor, answer: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Append an answer's tokens to a prompt as text. Return the model inputs and the token types of T + n tokens.

    Args:
        inputs: inputs of one prompt, without an attention mask.
        types: token types of the prompt, int `[1, T]`.
        answer: tokens of the answer, int64 `[n]`.
    """
    length = inputs["input_ids"].shape[1]
    text_types = torch.zeros(1, len(answer), dtype=types.dtype, device=types.device)
    inputs_with_answer = {
        name: torch.cat([tensor, (answer if name == "input_ids" else 0 * answer).to(tensor)[None]], 1)
        if tensor.ndim == 2 and tensor.shape == (1, length)
        else tensor
        for name, tensor in inputs.items()
    }
    return inputs_with_answer, torch.cat([types, text_types], 1)


# ---------------------------------------------------------------- PrefixKV
def prefix_shares(loaded: LoadedModel, sample: PromptSample, settings: Mapping[str, Any]) -> list[list[float]]:
    """Measure the fraction ``R_l`` of one sample's entries that PrefixKV keeps in each layer (arXiv 2412.03409, section 3.3,
    algorithm 1).

    Only a prefill is needed, no answer.

    Returns:
        For every budget of `GRID` a list of one fraction per layer.
    """
    prompt = encoded(loaded, sample)

    def importance(obs: Observation) -> Tensor:  # attention that a token gathers, float64 [T]
        return obs.column_sums.double().sum(0).cpu()

    curves_of_layers = prefix_curves(
        read_layers(loaded.model, prompt.inputs, prompt.types, Needs(column_sums=True), importance)
    )
    return [prefix_ratios(curves_of_layers, float(rho), settings["delta"], settings["steps"])[0] for rho in GRID]


def prefix_profile(measured: Sequence[list[list[float]]], settings: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """Average `prefix_shares` over all samples, and scale the averages so that they add up to the budget.

    measured: the result of `prefix_shares` for each sample.

    Returns:
        The artefact's data, ``{"layers": L, "grid": [rho, ...], "ratios": [[R_l] per rho], "std": [[...] per rho]}``.
        ratios: share of the prompt that a layer keeps, mean over samples; they add up to ``L * rho`` except for rounding.
        std: population standard deviation over samples before the scaling (the paper's table 7).
    """
    ratios, std = [], []
    for rho, samples in zip(GRID, zip(*measured, strict=True), strict=True):
        columns = list(zip(*samples, strict=True))
        mean_shares = [Fraction(fmean(column)) for column in columns]
        ratios.append([float(share) for share in scale_to(mean_shares, len(columns) * Fraction(rho))])
        std.append([pstdev(column) for column in columns])
    return {"layers": len(measured[0][0]), "grid": [float(rho) for rho in GRID], "ratios": ratios, "std": std}


# ---------------------------------------------------------------- HybridKV
def head_sparsity(loaded: LoadedModel, sample: PromptSample, settings: Mapping[str, Any]) -> list[list[float]]:
    """Measure HybridKV's sparsity score S* (arXiv 2604.05887, equation 3) in one sample: per layer one number per KV
    head."""
    if not 0 <= settings["quantile"] <= 1:
        raise CalibrationError(f"--quantile {settings['quantile']} is not a quantile; allowed: 0 to 1")
    prompt = encoded(loaded, sample)
    method = Hybrid(top=settings["top"])
    return read_layers(
        loaded.model, prompt.inputs, prompt.types, method.needs, lambda obs: method.summary(obs, 1, 0).tolist()
    )


def sparsity_threshold(
    measured: Sequence[list[list[float]]], settings: Mapping[str, Any], kv_heads: int
) -> dict[str, Any]:
    """Compute HybridKV's sparsity threshold from `head_sparsity` of all samples.

    The paper calls its threshold "quantile-based, tuned on a validation set" and states one number, 0.9, for its models.
    Other models concentrate attention differently, so the threshold here is a quantile of the measured model's S*.

    measured: the result of `head_sparsity` for each sample.

    Returns:
        The artefact's data, ``{"theta": ..., "sparsity": [[mean S* per KV head] per layer], "std": [[...]], "quantiles":
        {"0.05": ...}}``.
        theta: the requested quantile (linear interpolation) of all S* of all heads and samples.
        std: the population standard deviation over the samples.
    """
    scores_of_heads = [[list(values) for values in zip(*layer, strict=True)] for layer in zip(*measured, strict=True)]
    values = [value for sample in measured for layer in sample for value in layer]
    return {
        "theta": float(np.quantile(values, settings["quantile"])),
        "sparsity": [[fmean(values) for values in layer] for layer in scores_of_heads],
        "std": [[pstdev(values) for values in layer] for layer in scores_of_heads],
        "quantiles": {f"{q:.2f}": float(np.quantile(values, q)) for q in QUANTILES},
    }


# ---------------------------------------------------------------- MM-ShiftKV
def moments(states: Tensor, length: int) -> tuple[list[float], float, float]:
    """Return the elementwise mean ``[E]`` of a prompt's states, and the population standard deviations of prompt and answer.

    Each deviation is taken over all values of all its tokens together.

    states: ``[T + n, E]``, n >= 1; the first `length` tokens are the prompt, the others the answer.
    """
    prompt_states, answer_states = states[:length].double(), states[length:].double()
    return (
        prompt_states.mean(0).tolist(),
        float(prompt_states.std(correction=0)),
        float(answer_states.std(correction=0)),
    )


def state_moments(
    loaded: LoadedModel, sample: PromptSample, settings: Mapping[str, Any]
) -> list[tuple[list[float], float, float]]:
    """Return `moments` of the input of every layer's query projection, for a sample's prompt and reference answer."""
    prompt = encoded(loaded, sample)
    answer_tokens = torch.tensor(answer_ids(loaded, sample), device=loaded.device)
    inputs_with_answer, types = with_answer(prompt.inputs, prompt.types, answer_tokens)
    return read_layers(
        loaded.model, inputs_with_answer, types, Needs(states=True), lambda obs: moments(obs.states, prompt.length)
    )


def state_statistics(measured: Sequence[list[tuple]], settings: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """Average `state_moments` over all samples, for MM-ShiftKV's ablations (the method needs no calibration).

    measured: the result of `state_moments` for each sample.

    Returns:
        The artefact's data.
        ``mean``: E floats per layer (table 11, global mean centring).
        ``gamma``: per layer the ratio of the states' spread while the answer is decoded to the spread over the prompt (table
            10, layer-wise expansion; figure 1a).
        ``std_prompt`` and ``std_answer``: the mean standard deviations whose ratio is gamma.
    """
    moments_of_layers = [list(zip(*layer, strict=True)) for layer in zip(*measured, strict=True)]
    prompt_deviations, answer_deviations = (
        [fmean(std) for _, std, _ in moments_of_layers],
        [fmean(std) for _, _, std in moments_of_layers],
    )
    return {
        "mean": [[fmean(values) for values in zip(*means, strict=True)] for means, _, _ in moments_of_layers],
        "gamma": [a / p for a, p in zip(answer_deviations, prompt_deviations, strict=True)],
        "std_prompt": prompt_deviations,
        "std_answer": answer_deviations,
    }


# ---------------------------------------------------------------- SparseMM
WORD_MARK = "\u2581"


@dataclass(frozen=True)
class SampleHits:
    """Hits of each query head in one sample (see `head_hits`).

    Attributes:
        hits: per layer one number per query head.
        tokens: number of answer tokens whose position on the page is known.
        hidden: number of these answer tokens that no visual token shows.
    """

    hits: list[list[float]]
    tokens: int
    hidden: int


def head_hits(query: Tensor, key: Tensor, regions: Sequence[Sequence[int]]) -> Tensor:
    """Return the hits (attention on the right visual tokens) of one layer's query heads in one sample: float64 ``[Hq]`` on
    the CPU.

    Args:
        query: ``[Hq, n, D]``, rotated queries of the last n of S tokens; the i-th answer token follows row i.
        key: ``[Hkv, S, D]``, rotated; query head h reads KV head ``h // g``.
        regions: per row the indices among the S tokens that count as hits; empty for a row without a known position.

    Returns:
        Per head the sum of ``1 / len(region)`` over the rows whose largest causal attention is in the row's region. Of equal
        attentions the one with the lower index counts.
    """
    heads, rows, dim = query.shape
    total_tokens = key.shape[1]
    grouped_queries = query.float().reshape(key.shape[0], -1, dim)
    scores = torch.bmm(grouped_queries, key.float().transpose(1, 2)).view(heads, rows, total_tokens)
    is_future = (
        torch.arange(total_tokens, device=key.device)
        > torch.arange(total_tokens - rows, total_tokens, device=key.device)[:, None]
    )
    top_key = scores.masked_fill(is_future, float("-inf")).argmax(-1).cpu()
    hits_of_heads = torch.zeros(heads, dtype=torch.float64)
    for row, region in enumerate(regions):
        if region:
            hits_of_heads += torch.isin(top_key[:, row], torch.tensor(list(region))).double() / len(region)
    return hits_of_heads


def layer_hits(
    model: nn.Module, inputs: dict[str, Tensor], types: Tensor, answer: Tensor, regions: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return `head_hits` of every layer in one sample, as lists of one number per query head.

    Args:
        inputs: arguments of the model's forward for one prompt of T tokens, without padding.
        types: token types, int ``[1, T]``.
        answer: int64 ``[n]``, the true answer's tokens.
        regions: per answer token the positions of the visual tokens that show it.
    """
    inputs_with_answer, types = with_answer(inputs, types, answer[:-1])
    answer_length = len(answer)
    needs = Needs(tail_queries=answer_length)
    return read_layers(
        model,
        inputs_with_answer,
        types,
        needs,
        lambda obs: head_hits(obs.tail(answer_length), obs.key, regions).tolist(),
    )


def answer_cells(tokenizer: Any, page: PromptSample) -> tuple[list[int], list[list[Cell]]]:
    """Return the token ids of a page's answer, and for each token the cells of the page's grid that show its characters.

    A token without characters has no cells. Llama's tokenizers put a word mark before the answer, which may be a separate
    token. The offsets of that token span the first character, which belongs to the next token.
    """
    encoding = tokenizer(page.answer, add_special_tokens=False, return_offsets_mapping=True)
    token_texts = tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    cells = [
        [] if piece == WORD_MARK else [cell for character in page.sources[start:end] for cell in character]
        for piece, (start, end) in zip(token_texts, encoding["offset_mapping"], strict=True)
    ]
    return encoding["input_ids"], cells


def visual_hits(loaded: LoadedModel, page: PromptSample, settings: Mapping[str, Any]) -> SampleHits:
    """Measure the hits of every query head on one page (see `head_hits`).

    Raises:
        UnsupportedError: the model reads no images, or the positions of its visual tokens are unknown.
    """
    prompt = encoded(loaded, page)
    visual_positions = prompt.types[0].nonzero().flatten().tolist()
    image_sizes = [image.size for image in page.images]
    box_of_token = token_boxes(loaded.model.config, loaded.processor, prompt.inputs, image_sizes, len(visual_positions))
    ids, cells = answer_cells(loaded.tokenizer, page)
    regions = [
        [visual_positions[number] for number in visual_tokens(shown, page.grid, box_of_token)] for shown in cells
    ]
    hidden_tokens = sum(bool(shown) and not region for shown, region in zip(cells, regions, strict=True))
    answer_tokens = torch.tensor(ids, device=prompt.input_ids.device)
    hits = layer_hits(loaded.model, prompt.inputs, prompt.types, answer_tokens, regions)
    return SampleHits(hits, sum(map(bool, cells)), hidden_tokens)


def head_scores(measured: Sequence[SampleHits], settings: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """Average `visual_hits` over all samples: return ``{"scores": [[one per query head] per layer], "kv_heads"}``.

    If the family's crop hides answer tokens, ``"hidden": {"tokens", "of"}`` states their number and the number of all answer
    tokens with a known position.

    measured: the result of `visual_hits` for each sample.

    Raises:
        CalibrationError: no visual token shows any answer token.
    """
    answer_tokens, hidden_tokens = sum(one.tokens for one in measured), sum(one.hidden for one in measured)
    if hidden_tokens == answer_tokens:
        raise CalibrationError(
            f"no visual token shows any of the {answer_tokens} answer tokens of {len(measured)} pages, because the model's "
            "processor crops them away; choose other pages (--kinds, --size)"
        )
    number_of_samples, hits_of_samples = len(measured), [one.hits for one in measured]
    scores = [
        [sum(heads) / number_of_samples for heads in zip(*layers, strict=True)]
        for layers in zip(*hits_of_samples, strict=True)
    ]
    artefact_data: dict[str, Any] = {"scores": scores, "kv_heads": kv_heads}
    return artefact_data | ({"hidden": {"tokens": hidden_tokens, "of": answer_tokens}} if hidden_tokens else {})


class CalibrationMeasurement(NamedTuple):
    """The functions that calibrate one method.

    measure: measures one sample.
    summarise: computes the artefact's data from the measurements of all samples.
    options: names of the command's options that affect the data.
    """

    measure: Callable[[LoadedModel, Any, Mapping[str, Any]], Any]
    summarise: Callable[[Sequence[Any], Mapping[str, Any], int], dict[str, Any]]
    options: tuple[str, ...] = ()


MEASUREMENTS = {
    "hybridkv": CalibrationMeasurement(head_sparsity, sparsity_threshold, ("top", "quantile")),
    "mmshift": CalibrationMeasurement(state_moments, state_statistics),
    "prefixkv": CalibrationMeasurement(prefix_shares, prefix_profile, ("delta", "steps")),
    "sparsemm": CalibrationMeasurement(visual_hits, head_scores),
}
