"""The oracle control, from stock eager attention alone: what the full cache's answer looked at, row by row.

Prefilling a prompt at once or in two parts gives the same rows, so the rows of the protocols are all there in one stock
run: under `paper` those of the answer, under `strict` the prompt's last one before them, under `query_agnostic` the
question's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def rows(model: nn.Module, inputs: dict[str, Tensor], tokens: int, first: int) -> list[list[Tensor]]:
    """Per layer the attention rows `[Hq, S]` (float64) of all tokens from index `first` on that the model was fed while it
    answered with `tokens` tokens."""
    options = {"do_sample": False, "return_dict_in_generate": True, "output_attentions": True}
    output = model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, **options)
    length = inputs["input_ids"].shape[1]
    found: list[list[Tensor]] = [[] for _ in output.attentions[0]]
    for layer, whole in enumerate(output.attentions[0]):
        found[layer] += [whole[0, :, i].double() for i in range(first, length)]
    for step in output.attentions[1:]:
        for layer, one in enumerate(step):
            assert one.shape[2] == 1
            found[layer].append(one[0, :, 0].double())
    return found


def mass(fed: list[Tensor], columns: int, heads: int) -> list[list[float]]:
    """Sums over the rows, means over the query heads of each KV head: `[heads][columns]`."""
    group = fed[0].shape[0] // heads
    found = [[0.0] * columns for _ in range(heads)]
    for row in fed:
        for h in range(row.shape[0]):
            for j in range(columns):
                found[h // group][j] += float(row[h, j]) / group
    return found


def kept(mass_of_head: list[float], count: int) -> set[int]:
    """The `count` largest; of equals, the lower index."""
    return set(sorted(range(len(mass_of_head)), key=lambda j: (-mass_of_head[j], j))[:count])
