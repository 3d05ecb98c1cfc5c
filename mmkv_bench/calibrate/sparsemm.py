"""SparseMM's visual head scores (arXiv 2506.05344, section 3): which query heads look at what the answer is read from.

A page says where every character of its answer stands. The true answer is fed to the model behind the prompt with the
full cache; for each of its tokens a head scores a hit when the key it attends to most lies among the visual tokens that
show that token's characters. A hit adds 1 / (number of these visual tokens); a head's score is its sum per sample,
averaged over the samples. Only one row of attention per answer token is ever computed.

Which tokens show a character follows from how the model's family cuts images up (mmkv_bench/families). Where a page is
given whole and in tiles, the tokens of both count. An answer token whose characters are cut away altogether has no visual
token and cannot be hit: it is left out and counted.

Paper and code: both read 1000 images of rendered text (SynthDog) and let the model write what it reads; the release then
credits a token only if exactly one text box of the image contains it. Pages tell each character's own cell, so every
token of the true answer counts, also where the same digit stands elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmkv_bench.calibrate.layers import read_layers, with_answer
from mmkv_bench.calibrate.samples import Cell, Page, encoded, visual_tokens
from mmkv_bench.compression.observation import Needs
from mmkv_bench.errors import CalibrationError
from mmkv_bench.families.registry import token_boxes

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel

WORD_MARK = "\u2581"


@dataclass(frozen=True)
class SampleHits:
    """Hits of one sample.

    Attributes:
        hits: per layer one number per query head. tokens: answer tokens whose place on the page is known.
        hidden: number of these that no visual token shows.
    """

    hits: list[list[float]]
    tokens: int
    hidden: int


def head_hits(query: Tensor, key: Tensor, regions: Sequence[Sequence[int]]) -> Tensor:
    """Return hits of one layer's query heads in one sample: float64 ``[Hq]`` on the CPU.

    Args:
        query: ``[Hq, n, D]``, rotated, of the last n of S tokens; row i is the one that the i-th answer token follows.
        key: ``[Hkv, S, D]``, rotated; query head h reads KV head ``h // g``.
        regions: per row the indices among the S tokens that count as hits; none for a row without a known place.

    Returns:
        Sum over the rows of ``1 / len(region)`` where the largest causal attention of the row (equal ones: the lower
        index) lies in its region.
    """
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


def answer_cells(tokenizer: Any, page: Page) -> tuple[list[int], list[list[Cell]]]:
    """Return token ids of the answer, and per token the cells of its characters; none for a token without characters.

    Llama's tokenizers put a word mark in front that may be a token of its own. Its offsets span the first character, which
    belongs to the next token.
    """
    encoding = tokenizer(page.answer, add_special_tokens=False, return_offsets_mapping=True)
    pieces = tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    cells = [
        [] if piece == WORD_MARK else [cell for character in page.sources[start:end] for cell in character]
        for piece, (start, end) in zip(pieces, encoding["offset_mapping"], strict=True)
    ]
    return encoding["input_ids"], cells


def measure(loaded: LoadedModel, page: Page, settings: Mapping[str, Any]) -> SampleHits:
    """Measure the hits of one sample.

    Raises:
        UnsupportedError: a model without images, or one whose visual tokens' places are unknown.
    """
    prompt = encoded(loaded, page)
    visual = prompt.types[0].nonzero().flatten().tolist()
    sizes = [image.size for image in page.images]
    boxes = token_boxes(loaded.model.config, loaded.processor, prompt.inputs, sizes, len(visual))
    ids, cells = answer_cells(loaded.tokenizer, page)
    regions = [[visual[number] for number in visual_tokens(shown, page.grid, boxes)] for shown in cells]
    hidden = sum(bool(shown) and not region for shown, region in zip(cells, regions, strict=True))
    answer = torch.tensor(ids, device=prompt.input_ids.device)
    hits = layer_hits(loaded.model, prompt.inputs, prompt.types, answer, regions)
    return SampleHits(hits, sum(map(bool, cells)), hidden)


def summarise(measured: Sequence[SampleHits], settings: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """Summarise `measure` of every sample: ``{"scores": [[one per query head] per layer], "kv_heads"}``.

    Where a family's crop hides answer tokens, also ``"hidden": {"tokens", "of"}``: their number, of all with a known place.

    Raises:
        CalibrationError: no answer token is shown by any visual token.
    """
    tokens, hidden = sum(one.tokens for one in measured), sum(one.hidden for one in measured)
    if hidden == tokens:
        raise CalibrationError(
            f"no visual token shows any of the {tokens} answer tokens of {len(measured)} pages, so every score would be 0: the "
            "model's processor cuts these places away; choose other pages (--kinds, --size)"
        )
    count, samples = len(measured), [one.hits for one in measured]
    scores = [[sum(heads) / count for heads in zip(*layers, strict=True)] for layers in zip(*samples, strict=True)]
    data: dict[str, Any] = {"scores": scores, "kv_heads": kv_heads}
    return data | ({"hidden": {"tokens": hidden, "of": tokens}} if hidden else {})
