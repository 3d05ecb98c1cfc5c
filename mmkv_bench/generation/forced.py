"""Teacher forcing: given tokens are fed to forks of one prompt, and their logits come out block by block.

Forks whose entries stay what they were take many tokens in one forward pass under the causal mask, which gives what
stepping gives. Forks with a decode policy are stepped token by token, because each token changes what the next sees.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.generation.group import Group
from mmkv_bench.generation.status import GenerationTimeout

BLOCK_BYTES = 1 << 28  # of float32 logits in one forward pass
BLOCK_LOGITS = 1 << 22  # compared at a time: 32 MiB as float64, of which `divergence` holds at most six at once


@torch.no_grad()
def forced(
    group: Group,
    cache: CompressedCache,
    rows: int,
    protocol: str,
    tokens: Sequence[int],
    *,
    stepwise: bool = False,
    block: int | None = None,
    deadline: float | None = None,
) -> Iterator[Tensor]:
    """Feed `tokens` to every row of `cache` and yield the logits that predict them.

    Args:
        cache: the forks' reduced entries, `rows` of them; what is fed stays in it (see `returned`).
        group: gives positions, what of the prompt is fed first, and the logits of the first token where nothing is.
        stepwise: one token per forward pass. block: tokens per forward pass; as many as `BLOCK_BYTES` allow when None.
        deadline: `time.monotonic()` after which no further pass begins.

    Yields:
        `[R, b, V]` in the model's dtype, blocks in order; together one row of logits per token.

    Raises:
        GenerationTimeout: past the deadline.
    """
    prefilled, (lead, offset) = group.prefilled, group.lead(protocol)
    given = torch.tensor([list(tokens)], device=lead.device)
    fed = torch.cat([lead, given[:, :-1]], 1)
    if not lead.shape[1]:
        yield prefilled.logits.expand(rows, 1, -1)
    if block is None:
        block = 1 if stepwise else max(1, BLOCK_BYTES // (4 * rows * prefilled.logits.shape[-1]))
    start, unread = 0, max(lead.shape[1] - 1, 0)  # the logits of a question but its last token's predict nothing asked
    while start < fed.shape[1]:
        if deadline is not None and time.monotonic() > deadline:
            raise GenerationTimeout("measuring ran past timeout_s")
        stop = min(max(start, unread) + block, fed.shape[1])
        output = group.model(
            input_ids=fed[:, start:stop].expand(rows, -1),
            position_ids=prefilled.positions(offset + start, stop - start, rows),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=stop - max(start, unread),
            return_dict=True,
        )
        yield output.logits
        start = stop


@contextmanager
def returned(cache: CompressedCache) -> Iterator[CompressedCache]:
    """The cache of forks without decode policies, to be fed to; afterwards it holds what it held."""
    held = [layer.seen for layer in cache.layers]
    try:
        yield cache
    finally:
        for layer, seen in zip(cache.layers, held, strict=True):
            layer.forget(layer.seen - seen)


def divergence(full: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """How far the rows' next-token distributions are from the full cache's, in float64.

    Args:
        full: `[b, V]`; logits: `[R, b, V]`; as the model gave them, before any processor of the generation settings.

    Returns:
        KL(full || row) in nats, float64 `[R, b]`, and whether both rank the same token first, bool `[R, b]`.
    """
    kl = torch.empty(logits.shape[:-1], dtype=torch.float64, device=logits.device)
    for tokens in _stretches(logits.shape[1], logits.shape[2]):
        log_p = full[tokens].double().log_softmax(-1)
        p = log_p.exp()
        for rows in _stretches(len(logits), log_p.numel()):
            log_q = logits[rows, tokens].double().log_softmax(-1)
            kl[rows, tokens] = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
            del log_q
    return kl.clamp_min(0.0), logits.argmax(-1) == full.argmax(-1)  # below 0 by rounding only


def negative_log_likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    """-log probability of each token, float64 `[R, b]`, from logits `[R, b, V]` and tokens int64 `[b]`."""
    nll = torch.empty(logits.shape[:-1], dtype=torch.float64, device=logits.device)
    for stretch in _stretches(logits.shape[1], logits.shape[2]):
        wanted = tokens[stretch].to(logits.device)[None, :, None]
        for rows in _stretches(len(logits), len(wanted[0]) * logits.shape[2]):
            log_q = logits[rows, stretch].double().log_softmax(-1)
            nll[rows, stretch] = -log_q.gather(-1, wanted.expand(len(log_q), -1, -1)).squeeze(-1)
            del log_q
    return nll


def _stretches(count: int, size: int) -> list[slice]:
    """`count` things of `size` logits each, as many at a time as `BLOCK_LOGITS` allow and at least one."""
    step = max(1, BLOCK_LOGITS // max(1, size))
    return [slice(start, start + step) for start in range(0, count, step)]
