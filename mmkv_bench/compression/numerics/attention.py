"""Attention mass per key, streamed by blocks of query rows, or by fused kernels (``fused.py``) if the device runs them.

A block contains complete rows and so their softmax denominators: one pass is enough, and nothing larger than a tile
(``tiles.py``) exists at any time. Inputs may be float16 or bfloat16: scores, softmax and sums are float32.

Shapes: Hq query heads, Hkv KV heads, g = Hq / Hkv, w or n query rows, T or S keys, D head dimension. Query head h reads
KV head h // g. ``scaling`` is the factor of the dot products, usually ``D ** -0.5``.

Sinks, float32 ``[Hq]``, are learned scores that join the keys' scores in a softmax (gpt-oss). Each takes a share of its
head's softmax that goes to no key, so that the probabilities of a row sum to less than 1. None: there are none.

Reach, int64 ``[n]`` on the CPU, ascending, is the last key that each row sees. It may come after the row's own key if
the tokens of a picture see the whole picture (Gemma 3). None: attention is causal, so each row sees keys up to its own.
"""

from __future__ import annotations

from mmkv_bench import devices
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.tiles import head_blocks, row_blocks

LOWEST = -87.0  # below this, exp is subnormal in float32


def exponentials(scores: Tensor, masked: bool, sinks: Tensor | None = None) -> Tensor:
    """Turn ``scores [..., S]`` into exp(score - row maximum), IN PLACE (``torch.softmax`` would need a second tile).

    Args:
        scores: finite, or with -inf at keys that a row does not see.
        masked: keep exact zeros for -inf. Otherwise exponentials below 1.7e-38 are raised to that value: a CPU takes
            ten times as long for subnormal numbers, which widely spread proxies often reach.
        sinks: ``[...]``, the sink of each row; the maximum is over keys and sink.

    Returns:
        ``[...]``: 1 / row sum, the factor that makes each row a softmax.
    """
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.unsqueeze(-1))
    scores -= peak
    if not masked:
        scores.clamp_min_(LOWEST)
    scores.exp_()
    total = scores.sum(-1)
    if sinks is not None:
        total += (sinks - peak.squeeze(-1)).exp_()
    return total.reciprocal_()


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of ``scores [..., S]`` over keys and sink, without the sink: float32 ``[..., S]``.

    sinks: ``[...]``, one per row; None: there are none.
    """
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    both = torch.cat([scores.float(), sinks.float().expand(scores.shape[:-1]).unsqueeze(-1)], -1)
    return both.softmax(-1)[..., :-1]


def hide(scores: Tensor, reach: range | Tensor) -> None:
    """Set ``scores [..., n, S]`` to -inf, in place, at keys after the last one that a row sees (``reach``)."""
    first = int(reach[0])  # keys before it are seen by every row
    last_keys = torch.arange(reach.start, reach.stop) if isinstance(reach, range) else reach
    is_hidden = torch.arange(first, scores.shape[-1], device=scores.device) > last_keys.to(scores.device)[:, None]
    scores[..., first:].masked_fill_(is_hidden, float("-inf"))


def column_sums(
    query: Tensor,
    key: Tensor,
    scaling: float,
    offset: int = 0,
    sinks: Tensor | None = None,
    reach: Tensor | None = None,
) -> Tensor:
    """Sum the attention to each key over rows and over the g query heads of a KV head, float32 ``[Hkv, S]``.

    Args:
        query: ``[Hq, n, D]``, rows at positions ``offset .. offset + n - 1``.
        key: ``[Hkv, S, D]`` with ``S = offset + n``.
        offset: tokens before this chunk; the sums of all chunks add up to those of the whole prompt.
        scaling, sinks, reach: see the module's docstring; with ``reach`` no fused kernel is used.
    """
    if reach is None and devices.at(key.device).fuses:
        from mmkv_bench.compression.numerics import fused

        return fused.column_sums(query, key, scaling, offset, sinks)
    heads, total, _ = key.shape
    query = query.view(heads, -1, *query.shape[1:])
    sinks_by_head = None if sinks is None else sinks.view(heads, -1)
    sums = torch.zeros(heads, total, dtype=torch.float32, device=key.device)
    for first, last in head_blocks(heads, query.shape[1] * total, key.device):
        block_sinks = None if sinks_by_head is None else sinks_by_head[first:last]
        _add_column_sums(sums[first:last], query[first:last], key[first:last], scaling, offset, block_sinks, reach)
    return sums


def _add_column_sums(
    sums: Tensor, query: Tensor, key: Tensor, scaling: float, offset: int, sinks: Tensor | None, reach: Tensor | None
) -> None:
    """Add ``column_sums`` of h KV heads to ``sums [h, S]``, in place.

    The shapes are ``query [h, g, n, D]``, ``key [h, S, D]`` and ``sinks [h, g]``.
    """
    heads, total, dim = key.shape
    group, rows = query.shape[1:3]
    keys = key.float().transpose(1, 2)
    for start, end in row_blocks(rows, heads * group * total, key.device):
        n, visible_ends = end - start, range(offset + start, offset + end) if reach is None else reach[start:end]
        seen = int(visible_ends[-1]) + 1  # keys that the last row of the block sees
        block = query[:, :, start:end].reshape(heads, group * n, dim).float() * scaling
        scores = torch.bmm(block, keys[:, :, :seen])
        hide(scores.view(heads, group, n, seen), visible_ends)
        weight = exponentials(scores, masked=True, sinks=by_row(sinks, n))
        sums[:, :seen] += torch.bmm(weight.unsqueeze(1), scores).squeeze(1)


def by_row(sinks: Tensor | None, rows: int) -> Tensor | None:
    """Repeat the sinks ``[h, g]`` for each of ``rows`` query rows: ``[h, g * rows]``; None if there are none."""
    return None if sinks is None else sinks.repeat_interleave(rows, -1)


def window_mass(
    tail: Tensor, key: Tensor, scaling: float, sinks: Tensor | None = None, reach: Tensor | None = None
) -> Tensor:
    """Return the attention of the last w queries to every key, ``[Hkv, T]`` float32: mean over rows and g query heads.

    The softmax runs over all T keys, causal inside the window, as in SnapKV (arXiv 2404.14469, section 4).

    Args:
        tail: ``[Hq, w, D]``, the prompt's last w queries (w <= T).
        key: ``[Hkv, T, D]``.
        scaling, sinks, reach: see the module's docstring.
    """
    rows = tail.shape[1]
    group = tail.shape[0] // key.shape[0]
    return column_sums(tail, key, scaling, key.shape[1] - rows, sinks, reach) / (rows * group)


def largest_attention(query: Tensor, key: Tensor, scaling: float, sinks: int, first: int, last: int) -> Tensor:
    """Return the largest attention of keys ``first .. last - 1`` from the newest n queries: ``[Hkv, last - first]``.

    It is float32, and the maximum over the queries and the g query heads of a KV head. The softmax runs over these
    keys, the first ``sinks`` keys and, causally, the queries' own keys.

    Args:
        query: ``[Hq, n, D]``.
        key: ``[Hkv, S, D]``, the queries' own keys last.
        sinks, first, last: ``sinks <= first < last <= S - n``.
    """
    heads, total, dim = key.shape
    rows, stretch = query.shape[1], slice(sinks, sinks + last - first)
    key = torch.cat([key[:, :sinks], key[:, first:last], key[:, total - rows :]], 1)
    query = query.view(heads, -1, rows, dim)
    group, width = query.shape[1], key.shape[1]
    largest = torch.zeros(heads, last - first, dtype=torch.float32, device=key.device)
    for head, end in head_blocks(heads, group * width, key.device):
        keys = key[head:end].float().transpose(1, 2)
        for start, stop in row_blocks(rows, (end - head) * group * width, key.device):
            n, seen = stop - start, width - rows + stop
            block = query[head:end, :, start:stop].reshape(end - head, group * n, dim).float() * scaling
            scores = torch.bmm(block, keys[:, :, :seen])
            future_mask = torch.ones(n, n, dtype=torch.bool, device=key.device).triu_(1)
            scores.view(end - head, group, n, seen)[..., seen - n :].masked_fill_(future_mask, float("-inf"))
            weight = exponentials(scores, masked=True)
            largest_scores = (scores[..., stretch] * weight.unsqueeze(-1)).amax(1)
            torch.maximum(largest[head:end], largest_scores, out=largest[head:end])
    return largest


def is_half(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is bfloat16 or float16."""
    return dtype.is_floating_point and dtype.itemsize == 2


def rounded_window_mass(
    tail: Tensor, key: Tensor, scaling: float, sinks: Tensor | None = None, reach: Tensor | None = None
) -> Tensor:
    """Return the mean attention of the last w queries to every key, ``[Hq, T]`` in the dtype of the keys.

    Dot products, scores, probabilities and means are rounded to that dtype; the softmax is float32. A few heads are
    computed at a time (``tiles.py``). Arguments: see ``window_mass``.
    """
    heads, total, _ = key.shape
    rows, group = tail.shape[1], tail.shape[0] // heads
    masses = []
    for first, last in row_blocks(heads, group * rows * total, key.device):
        keys = key[first:last].repeat_interleave(group, 0)
        # Divided, as in the releases: multiplying by the factor sometimes changes the last digit.
        logits = torch.bmm(tail[first * group : last * group], keys.transpose(1, 2)) / (1 / scaling)
        hide(logits, range(total - rows, total) if reach is None else reach)
        block_sinks = None if sinks is None else sinks[first * group : last * group, None]
        masses.append(softmax(logits, block_sinks).to(key.dtype).mean(1))
    return torch.cat(masses)
