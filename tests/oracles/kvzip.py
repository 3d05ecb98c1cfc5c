"""KVzip from stock eager attention alone: the context and what is fed behind it as one sequence, rows of the whole softmax.

A softmax over some of the keys is the whole softmax's weights of these keys, divided by their sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def received(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """What the text model of a stock model is given of a prompt."""
    seen: dict[str, Any] = {}
    text = model.get_decoder()
    hook = text.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    model(**inputs)
    hook.remove()
    if seen.get("inputs_embeds") is None:
        seen["inputs_embeds"] = text.get_input_embeddings()(inputs["input_ids"])
    return seen


@torch.no_grad()
def rows(model: nn.Module, seen: dict[str, Any], end: int, fed: list[int | list[int]]) -> list[Tensor]:
    """Per layer the attention rows `[Hq, f, end + f]` of f tokens behind the first `end`.

    fed: places of the prompt whose tokens are fed again, or lists of token ids.
    """
    text, embeds = model.get_decoder(), seen["inputs_embeds"]
    parts, added = [embeds[:, :end]], []
    for one in fed:
        parts.append(embeds[:, [one]] if isinstance(one, int) else text.get_input_embeddings()(torch.tensor([one])))
        added += [one] if isinstance(one, int) else [None] * len(one)
    positions = seen.get("position_ids")
    if positions is None:
        positions = torch.arange(embeds.shape[1])[None]
    context = positions[..., :end]
    last = int(context.max()) if positions.ndim == 3 else end - 1
    behind = torch.arange(last + 1, last + 1 + len(added)).expand(*context.shape[:-1], -1)
    options: dict[str, Any] = {}
    if seen.get("deepstack_visual_embeds") is not None:
        visual = seen["visual_pos_masks"][0].tolist()
        order = {place: number for number, place in enumerate(i for i, one in enumerate(visual) if one)}
        every = [*range(end), *added]
        mask = [place is not None and visual[place] for place in every]
        taken = [order[place] for place, one in zip(every, mask, strict=True) if one]
        options["visual_pos_masks"] = torch.tensor([mask])
        options["deepstack_visual_embeds"] = [layer[taken] for layer in seen["deepstack_visual_embeds"]]
    output = text(
        inputs_embeds=torch.cat(parts, 1),
        position_ids=torch.cat([context, behind], -1),
        output_attentions=True,
        use_cache=False,
        **options,
    )
    return [layer[0, :, end:].double() for layer in output.attentions]


def scores(
    model: nn.Module,
    inputs: dict[str, Tensor],
    heads: int,
    end: int,
    prefix: int,
    chunk: int,
    sinks: int,
    words: tuple[list[int], list[int], list[int]],
) -> list[list[list[float]]]:
    """Scores `[layers][heads][end]`; infinity for what always stays.

    words: token ids of the instruction for the whole, for a part, and of the template's end of a turn.
    """
    seen, (whole, part, tail) = received(model, inputs), words
    made = [[[float("inf")] * end for _ in range(heads)] for _ in model.get_decoder().layers]
    for first in range(prefix, end, chunk):
        last = min(first + chunk, end)
        before = list(range(max(prefix, first - 8), first))
        fed = [whole if first == prefix else part, *before, tail, *range(first, last)]
        for layer, every in enumerate(rows(model, seen, end, [one for one in fed if one != []])):
            group = every.shape[0] // heads
            read = [*range(min(sinks, first)), *range(first, last), *range(end, every.shape[2])]
            for head in range(heads):
                weights = every[head * group : (head + 1) * group].flatten(0, 1)
                shares = weights / weights[:, read].sum(-1, keepdim=True)
                for place in range(max(first, sinks), last):
                    made[layer][head][place] = float(shares[:, place].max())
    return made


def kept(made: list[list[list[float]]], count: int) -> list[list[list[int]]]:
    """The `count` best entries of all layers and heads, of equals those of the lower layer, head and place."""
    places = [
        (-one, i, h, j) for i, layer in enumerate(made) for h, head in enumerate(layer) for j, one in enumerate(head)
    ]
    chosen = {place[1:] for place in sorted(places)[:count]}
    return [
        [[j for j in range(len(head)) if (i, h, j) in chosen] for h, head in enumerate(layer)]
        for i, layer in enumerate(made)
    ]
