"""SparseMM's visual head scores (arXiv 2506.05344, section 3): which query heads look at what the answer is read from.

A page says where every character of its answer stands. The true answer is fed to the model behind the prompt with the
full cache; for each of its tokens a head scores a hit when the key it attends to most lies among the visual tokens that
show that token's characters. A hit adds 1 / (number of these visual tokens); a head's score is its sum per sample,
averaged over the samples. Only one row of attention per answer token is ever computed.

Paper and code: both read 1000 images of rendered text (SynthDog) and let the model write what it reads; the release then
credits a token only if exactly one text box of the image contains it. Pages tell each character's own cell, so every
token of the true answer counts, also where the same digit stands elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.calibrate.observing import read_layers, with_answer
from mmkv_bench.calibrate.samples import Page, token_grids, visual_tokens
from mmkv_bench.compression.observation import Needs
from mmkv_bench.generation.encode import encode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mmkv_bench.models.load import LoadedModel


def head_hits(query: Tensor, key: Tensor, regions: Sequence[Sequence[int]]) -> Tensor:
    """Hits of one layer's query heads in one sample: float64 ``[Hq]`` on the CPU.

    Args:
        query: ``[Hq, n, D]``, rotated, of the last n of S tokens; row i is the one that the i-th answer token follows.
        key: ``[Hkv, S, D]``, rotated; query head h reads KV head ``h // g``.
        regions: per row the indices among the S tokens that count as hits; none for a row without a known place.

    Returns:
        Sum over the rows of ``1 / len(region)`` where the largest causal attention of the row (equal ones: the lower
        index) lies in its region.
    """
    import torch

    heads, rows, dim = query.shape
    total = key.shape[1]
    grouped = query.float().reshape(key.shape[0], -1, dim)
    scores = torch.bmm(grouped, key.float().transpose(1, 2)).view(heads, rows, total)
    future = torch.arange(total, device=key.device) > torch.arange(total - rows, total, device=key.device)[:, None]
    top = scores.masked_fill(future, float("-inf")).argmax(-1).cpu()
    hits = torch.zeros(heads, dtype=torch.float64)
    for row, region in enumerate(regions):
        if region:
            hits += torch.isin(top[:, row], torch.tensor(list(region))).double() / len(region)
    return hits


def layer_hits(
    model: nn.Module, inputs: dict[str, Tensor], types: Tensor, answer: Tensor, regions: Sequence[Sequence[int]]
) -> list[list[float]]:
    """`head_hits` of every layer: rows of one number per query head.

    Args:
        inputs: one prompt of T tokens as the model's forward takes it, without padding; types: int ``[1, T]``.
        answer: int64 ``[n]``, the true answer's tokens; regions: per answer token indices of prompt tokens.
    """
    longer, types = with_answer(inputs, types, answer[:-1])
    needs = Needs(tail_queries=len(answer))
    return [
        hits.tolist()
        for hits in read_layers(
            model, longer, types, needs, lambda obs: head_hits(obs.tail(len(answer)), obs.key, regions)
        )
    ]


def measure(loaded: LoadedModel, page: Page, settings: Mapping[str, Any]) -> list[list[float]]:
    """Hits of one sample: one row of query heads per layer."""
    import torch

    prompt = encode(loaded.processor, loaded.family, page.sample_id, page.messages(), page.images, device=loaded.device)
    visual = prompt.types[0].nonzero().flatten().tolist()
    merged = token_grids(prompt.inputs, loaded.model, len(visual))
    told = loaded.tokenizer(page.answer, add_special_tokens=False, return_offsets_mapping=True)
    regions = []
    for start, end in told["offset_mapping"]:
        cells = [cell for character in page.sources[start:end] for cell in character]
        regions.append([visual[number] for number in visual_tokens(cells, page.grid, merged)])
    answer = torch.tensor(told["input_ids"], device=prompt.input_ids.device)
    return layer_hits(loaded.model, prompt.inputs, prompt.types, answer, regions)


def summarise(found: Sequence[list[list[float]]], settings: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """The artefact's data from `measure` of every sample: ``{"scores": [[one per query head] per layer], "kv_heads"}``."""
    count = len(found)
    scores = [[sum(heads) / count for heads in zip(*layers, strict=True)] for layers in zip(*found, strict=True)]
    return {"scores": scores, "kv_heads": kv_heads}
