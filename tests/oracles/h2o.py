"""H2O, written from arXiv 2306.14048 (algorithm 1, section 4) with a mask that changes from step to step.

A stock model decodes with eager attention over a full `DynamicCache`; what H2O has evicted is masked out, head by head.
The attention weights that the model itself reports are gathered in float64. Nothing of mmkv_bench runs here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests import reference, zoo


def kept(sums: list[float], budget: int, recents: int) -> list[int]:
    """The last `recents` tokens and the heaviest others, `budget` together, ascending; the lower index wins ties."""
    tokens = len(sums)
    late = list(range(tokens - min(recents, tokens), tokens))
    others = [j for j in range(tokens) if j not in late]
    others.sort(key=lambda j: (-sums[j], j))
    return sorted(late + others[: budget - len(late)])


def released(scores: list[list[float]], budget: int, length: int) -> list[int]:
    """ElasticCache's release: one mean score of all heads and layers (`scores`: one list per head and layer, over the
    tokens that may be kept, all but the last one), and its permutation taken for ranks. `budget` counts the last token,
    which stays and is left out of the answer here."""
    tokens = len(scores[0])
    mean = [sum(row[j] for row in scores) / len(scores) for j in range(tokens)]
    forget = length - budget
    if forget <= 0:
        return list(range(tokens))
    if forget == 1:
        behind = range(1, tokens) if tokens > 1 else range(tokens)
        lightest = min(behind, key=lambda j: (mean[j], j))
        return [j for j in range(tokens) if j != lightest]
    permutation = sorted(range(tokens), key=lambda j: (mean[j], j))
    return [place for place in range(tokens) if permutation[place] > forget]


@dataclass
class Head:
    """One KV head: the columns it holds in order, and what each has gathered."""

    held: list[int]
    gathered: dict[int, float]
    limit: int | None = None

    def evict(self, share: float) -> None:
        while len(self.held) > self.limit:
            recents = int(share * self.limit)
            reach = self.held[: len(self.held) - recents]
            least = min(self.gathered[j] for j in reach)
            self.held.remove(max(j for j in reach if self.gathered[j] == least))


@contextlib.contextmanager
def weights(model: nn.Module, take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside, `take(layer, attention weights [Hkv, g, n, S])` is called after every attention; eager models only."""

    def read(module: nn.Module, args: tuple, output: tuple) -> None:
        found = output[1][0].double()
        take(module.layer_idx, found.unflatten(0, (-1, module.num_key_value_groups)))

    hooks = [block.self_attn.register_forward_hook(read) for block in model.get_decoder().layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def column_sums(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Per layer float64 [Hkv, T]: what every token of a prompt gathered from all queries of the prompt."""
    sums: dict[int, Tensor] = {}
    zoo.set_attention(model, "eager")
    try:
        with weights(model, lambda layer, found: sums.update({layer: found.sum((1, 2))})):
            model(**inputs, use_cache=False)
    finally:
        zoo.set_attention(model, "sdpa")
    return [sums[layer] for layer in sorted(sums)]


@torch.no_grad()
def generate(
    model: nn.Module, inputs: dict[str, Tensor], budget: int, cut: int, tokens: int, share: float = 0.5
) -> tuple[Tensor, list[list[Head]]]:
    """Logits [n, V] of greedy decoding and what every head holds at the end.

    Args:
        budget: C. cut: tokens reduced to C of them: T (paper), T - 1 (strict: C - 1 of them, the last prompt token makes
            C and is counted in the sums of the whole prompt), or the context's (query_agnostic: the question's tokens
            come on top, and their queries are gathered).
    """
    ids = inputs["input_ids"]
    length, strict = ids.shape[1], cut == ids.shape[1] - 1
    inputs = {**inputs, "attention_mask": torch.ones_like(ids)}
    prefix = inputs
    if cut < length and not strict:
        prefix = {name: value[:, :cut] if value.shape == ids.shape else value for name, value in inputs.items()}
    sums = column_sums(model, prefix)
    late = int(share * budget)
    layers = []
    for layer in sums:
        heads = []
        for row in layer.tolist():
            held = kept(row, budget, late)
            if strict:  # the last token is one of the recents, or takes the place of one entry
                held = kept(row[:cut], budget - 1, max(late - 1, 0))
            heads.append(Head(held, dict(enumerate(row))))
        layers.append(heads)

    def rule(layer: int, queries: Tensor, columns: int) -> Tensor:
        allowed = torch.ones(1, len(layers[layer]), len(queries), columns, dtype=torch.bool)
        for head, state in enumerate(layers[layer]):
            gone = sorted(set(range(min(cut, columns))) - set(state.held))
            if columns > length:
                gone = sorted(set(range(columns - 1)) - set(state.held))
            for row, query in enumerate(queries.tolist()):
                if query >= cut:
                    allowed[0, head, row, gone] = False
        return allowed

    def take(layer: int, found: Tensor) -> None:
        columns, new = found.shape[-1], found.shape[-2]
        answer = columns > length
        for head, state in enumerate(layers[layer]):
            state.held += range(columns - 1, columns) if answer else range(cut, length)
            rows = found[head] if answer else found[head][:, new - (length - cut) :]
            if answer or not strict:
                for column in state.held:
                    state.gathered[column] = state.gathered.get(column, 0.0) + float(rows[..., column].sum())
            if answer:
                state.evict(share)
            else:
                state.limit = len(state.held)

    with reference.masked(model, rule) as cache, weights(model, take):
        run = reference.generate(model, inputs, tokens, past_key_values=cache)
    return run.logits[:, 0], layers
