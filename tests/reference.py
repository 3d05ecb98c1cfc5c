"""What compression must equal: stock Hugging Face eager attention over a FULL `DynamicCache`, with evicted entries
masked out. No code of mmkv_bench runs here.

A `Keep` says what later rows may see of the compressed prefix: per layer a bool tensor [B,Hkv,cut] over columns (token
indices of the padded batch), True = kept. Rows (queries) before `cut` see what they always saw; rows from `cut` on see
the kept part of the prefix and everything from `cut` on. `cut` tells the protocols apart:

    paper            cut = T     the prompt's own rows, the first token's included, see everything
    strict           cut = T-1   the last prompt token's row sees kept entries of the others, and itself
    query_agnostic   cut = Tc    the question's rows see kept context entries and the question
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tests import zoo

Keep = list[Tensor]


@dataclass
class Run:
    """Tokens [B,n] and logits [n,B,V] of n greedy steps, as `model.generate` reports them."""

    tokens: Tensor
    logits: Tensor
    cache: Any


def run_of(output: Any, inputs: dict[str, Tensor]) -> Run:
    """The `Run` inside a `generate(..., return_dict_in_generate=True, output_logits=True)` result."""
    length = inputs["input_ids"].shape[1]
    return Run(output.sequences[:, length:], torch.stack(output.logits), output.past_key_values)


@torch.no_grad()
def generate(model: nn.Module, inputs: dict[str, Tensor], tokens: int, **options: Any) -> Run:
    """Stock greedy `model.generate`."""
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True} | options
    return run_of(model.generate(**inputs, max_new_tokens=tokens, **options), inputs)


@functools.cache
def stock(name: str, attention: str = "sdpa", tokens: int = 6) -> Run:
    """The untouched model of the zoo on its first prompt, run once per session: to compare with, never to write to."""
    return generate(zoo.model(name, attention), zoo.prompt(name), tokens)


def visible(keep: Keep, cut: int) -> Callable[[int, Tensor, int], Tensor]:
    """The rule of the module docstring as a function (layer, query positions [n], S) -> bool [B,Hkv,n,S]."""

    def rule(layer: int, queries: Tensor, columns: int) -> Tensor:
        kept = keep[layer]
        assert kept.shape[-1] == cut, f"keep covers {kept.shape[-1]} columns, not {cut}"
        allowed = torch.ones(*kept.shape[:2], len(queries), columns, dtype=torch.bool)
        late = queries >= cut
        span = min(cut, columns)
        allowed[:, :, late, :span] = kept[:, :, None, :span]
        return allowed

    return rule


@contextlib.contextmanager
def masked(model: nn.Module, rule: Callable[[int, Tensor, int], Tensor]) -> Iterator[DynamicCache]:
    """Inside, every forward pass of the text model's attention obeys `rule` besides its own mask; yields a full cache.

    `rule` may depend on the query positions, which makes masks that change from step to step. Eager attention adds
    the dtype's minimum to forbidden scores, exactly 0 after softmax for rows that see at least one entry.
    """
    text = model.get_decoder()
    attention = text.config._attn_implementation
    zoo.set_attention(model, "eager")

    def restrict(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        mask = kwargs["attention_mask"]  # additive float [B,1,n,S]
        n, columns = mask.shape[-2:]
        allowed = rule(full.index(reading.get(module, module)), torch.arange(columns - n, columns), columns)
        allowed = allowed.repeat_interleave(module.num_key_value_groups, dim=1)
        if allowed.shape[0] != mask.shape[0]:  # beams repeat rows
            allowed = allowed.repeat_interleave(mask.shape[0] // allowed.shape[0], dim=0)
        restricted = mask.expand(-1, allowed.shape[1], -1, -1).masked_fill(~allowed, torch.finfo(mask.dtype).min)
        return args, dict(kwargs, attention_mask=restricted)

    full, reading = zoo.full_attention(model), zoo.readers(model)
    hooks = [module.register_forward_pre_hook(restrict, with_kwargs=True) for module in (*full, *reading)]
    try:
        yield DynamicCache(config=model.config)
    finally:
        for hook in hooks:
            hook.remove()
        zoo.set_attention(model, attention)


def masked_generate(
    model: nn.Module, inputs: dict[str, Tensor], keep: Keep, cut: int, tokens: int, **options: Any
) -> Run:
    """Greedy decoding of the whole prompt under `visible(keep, cut)`."""
    with masked(model, visible(keep, cut)) as cache:
        return generate(model, inputs, tokens, past_key_values=cache, **options)


@torch.no_grad()
def masked_rows(model: nn.Module, inputs: dict[str, Tensor], keep: Keep, cut: int) -> Tensor:
    """Logits [B,T,V] of every prompt row under `visible(keep, cut)`, from one forward pass."""
    with masked(model, visible(keep, cut)) as cache:
        return model(**inputs, past_key_values=cache, use_cache=True).logits


def keep_of(kept: list[Tensor], cut: int) -> Keep:
    """Kept indices per layer, [B,Hkv,m] with -1 padding, as a `Keep` over `cut` columns; none may lie beyond."""
    keep = []
    for index in kept:
        last = int(index.max()) if index.numel() else -1
        assert last < cut, f"kept index {last} lies outside of the {cut} tokens before the cut"
        columns = torch.zeros(*index.shape[:2], cut + 1, dtype=torch.bool)
        columns.scatter_(-1, index.masked_fill(index < 0, cut), True)
        keep.append(columns[..., :cut])
    return keep


def random_keep(model: nn.Module, rows: int, cut: int, counts: list[int], seed: int = 3) -> Keep:
    """Random kept sets over `cut` columns, `counts[layer]` entries in every KV head."""
    heads, generator = (
        model.config.get_text_config(decoder=True).num_key_value_heads,
        torch.Generator().manual_seed(seed),
    )
    keep = []
    for count in counts:
        rank = torch.rand(rows, heads, cut, generator=generator).argsort(dim=-1).argsort(dim=-1)
        keep.append(rank < count)
    return keep


def recorded_hidden(model: nn.Module, run: Callable[[], Any]) -> Tensor:
    """Final hidden states [B,rows,E] (after the last norm) of every row that `run()` feeds through the text model."""
    rows: list[Tensor] = []
    hook = model.get_decoder().register_forward_hook(lambda module, args, out: rows.append(out.last_hidden_state))
    try:
        run()
    finally:
        hook.remove()
    return torch.cat(rows, dim=1)
