"""SparseMM's visual head scores (arXiv 2506.05344, section 3): how often a query head attends to the answer on the page.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmkv_bench.calibrate.layers import read_layers, with_answer
from mmkv_bench.calibrate.samples import Cell, PromptSample, encoded, visual_tokens
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
        hits: per layer one number per query head.
        tokens: number of answer tokens whose position on the page is known.
        hidden: number of these answer tokens that no visual token shows.
    """

    hits: list[list[float]]
    tokens: int
    hidden: int


def head_hits(query: Tensor, key: Tensor, regions: Sequence[Sequence[int]]) -> Tensor:
    """Return hits of one layer's query heads in one sample: float64 ``[Hq]`` on the CPU.

    Args:
        query: ``[Hq, n, D]``, rotated queries of the last n of S tokens; the i-th answer token follows row i.
        key: ``[Hkv, S, D]``, rotated; query head h reads KV head ``h // g``.
        regions: per row the indices among the S tokens that count as hits; empty for a row without a known position.

    Returns:
        Sum of ``1 / len(region)`` over the rows whose largest causal attention (of equal ones the lower index) is in the
        row's region.
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
    """Return `head_hits` of every layer: rows of one number per query head.

    Args:
        inputs: arguments of the model's forward for one prompt of T tokens, without padding.
        types: int ``[1, T]``.
        answer: int64 ``[n]``, the true answer's tokens.
        regions: per answer token indices of prompt tokens.
    """
    longer, types = with_answer(inputs, types, answer[:-1])
    n = len(answer)
    needs = Needs(tail_queries=n)
    return read_layers(model, longer, types, needs, lambda obs: head_hits(obs.tail(n), obs.key, regions).tolist())


def answer_cells(tokenizer: Any, page: PromptSample) -> tuple[list[int], list[list[Cell]]]:
    """Return the answer's token ids, and for each token the page's cells that show its characters (an empty list for a token
    without characters).

    Llama's tokenizers put a word mark before the answer, which may be a separate token. The offsets of that token span the first
    character, which belongs to the next token.
    """
    encoding = tokenizer(page.answer, add_special_tokens=False, return_offsets_mapping=True)
    pieces = tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    cells = [
        [] if piece == WORD_MARK else [cell for character in page.sources[start:end] for cell in character]
        for piece, (start, end) in zip(pieces, encoding["offset_mapping"], strict=True)
    ]
    return encoding["input_ids"], cells


def measure(loaded: LoadedModel, page: PromptSample, settings: Mapping[str, Any]) -> SampleHits:
    """Measure the hits of one sample.

    Raises:
        UnsupportedError: the model reads no images, or the positions of its visual tokens are unknown.
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
    """Summarise `measure` of all samples: ``{"scores": [[one per query head] per layer], "kv_heads"}``.

    If the family's crop hides answer tokens, ``"hidden": {"tokens", "of"}`` states their number and the number of all
    answer tokens with a known position.

    Raises:
        CalibrationError: no visual token shows any answer token.
    """
    tokens, hidden = sum(one.tokens for one in measured), sum(one.hidden for one in measured)
    if hidden == tokens:
        raise CalibrationError(
            f"no visual token shows any of the {tokens} answer tokens of {len(measured)} pages, because the model's "
            "processor crops them away; choose other pages (--kinds, --size)"
        )
    count, samples = len(measured), [one.hits for one in measured]
    scores = [[sum(heads) / count for heads in zip(*layers, strict=True)] for layers in zip(*samples, strict=True)]
    data: dict[str, Any] = {"scores": scores, "kv_heads": kv_heads}
    return data | ({"hidden": {"tokens": hidden, "of": tokens}} if hidden else {})
