"""Spread of a layer's attention, streamed by blocks of query rows: entropies, and the mass of a row's largest keys.

``query [Hq, T, D]`` and ``key [Hkv, T, D]`` are rotated, of any float dtype; query head h reads KV head h // g, g = Hq
/ Hkv. Scores, softmax and row entropies are float32, sums over rows float64. Entropies are in nats. ``scaling``,
``sinks [Hq]`` and ``reach [T]``: see ``attention.py``. Nothing larger than a tile (``tiles.py``) exists at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.attention import by_row, exponentials, hide
from mmkv_bench.compression.numerics.tiles import head_blocks, row_blocks


def map_entropy(query: Tensor, key: Tensor, scaling: float) -> float:
    """Average an attention map without a causal mask over heads, and return the mean entropy of its rows.

    Args:
        query: ``[Hq, n, D]``, n >= 1 rows.
        key: ``[Hkv, m, D]``, m >= 1.

    Returns:
        ``1/n sum_i H(1/Hq sum_h softmax(q_hi K^T * scaling))``, between 0 and log m.
    """
    heads, total, dim = key.shape
    query = query.view(heads, -1, *query.shape[1:])
    group, rows = query.shape[1:3]
    keys = key.float().transpose(1, 2)
    entropy = torch.zeros((), dtype=torch.float64, device=key.device)
    together = list(head_blocks(heads, group * total, key.device))
    for start, end in row_blocks(rows, together[0][1] * group * total, key.device):
        mean = torch.zeros(end - start, total, dtype=torch.float32, device=key.device)
        for first, last in together:
            block = query[first:last, :, start:end].reshape(last - first, -1, dim).float() * scaling
            scores = torch.bmm(block, keys[first:last])
            scores *= exponentials(scores, masked=False).unsqueeze(-1)
            mean += scores.view(-1, end - start, total).sum(0)
        entropy += torch.special.entr(mean / (heads * group)).sum(-1).double().sum()
    return float(entropy) / rows


def cross_modal_entropy(query: Tensor, key: Tensor, scaling: float, types: Tensor) -> float:
    """Return MEDA's eq. 4 to 6: the entropy of text attending to visual tokens plus that of visual attending to text.

    Each of the two maps is a softmax over the other modality's keys alone, averaged over heads before the entropy is
    taken. There is no causal mask: the paper names none, and the maps are a diagnostic, not what the model computes.

    Args:
        types: int ``[T]``, 0 text, above 0 visual; both must occur.

    Raises:
        ValueError: the prompt has only one modality.
    """
    visual, text = (((types.to(key.device) > 0) == seen).nonzero().flatten() for seen in (True, False))
    if not len(visual) or not len(text):
        raise ValueError("cross-modal entropy needs text and visual tokens; this prompt has one of them")
    seeing = map_entropy(query.index_select(1, text), key.index_select(1, visual), scaling)
    return seeing + map_entropy(query.index_select(1, visual), key.index_select(1, text), scaling)


def causal_entropy(
    query: Tensor, key: Tensor, scaling: float, sinks: Tensor | None = None, reach: Tensor | None = None
) -> float:
    """Return the mean entropy of the layer's own attention, over all heads and rows (MEDA's release).

    With sinks the entropy sums over keys only.
    """
    heads, total, dim = key.shape
    sinks_by_head = None if sinks is None else sinks.view(heads, -1)
    query = query.view(heads, -1, *query.shape[1:])
    group, rows = query.shape[1:3]
    keys = key.float().transpose(1, 2)
    entropy = torch.zeros((), dtype=torch.float64, device=key.device)
    for start, end in row_blocks(rows, heads * group * total, key.device):
        n, visible_ends = end - start, range(start, end) if reach is None else reach[start:end]
        seen = int(visible_ends[-1]) + 1
        block = query[:, :, start:end].reshape(heads, group * n, dim).float() * scaling
        scores = torch.bmm(block, keys[:, :, :seen])
        hide(scores.view(heads, group, n, seen), visible_ends)
        weight = exponentials(scores, masked=True, sinks=by_row(sinks_by_head, n))
        # With e = exp(score - maximum) and S = sum e, the sink's included: H = sum(e) / S * log S - sum(e log e) / S.
        entropy_sums = torch.special.entr(scores).sum(-1)
        key_probability = 1 if sinks is None else weight * scores.sum(-1)
        entropy += (weight * entropy_sums - key_probability * weight.log()).double().sum()
    return float(entropy) / (rows * heads * group)


def top_mass(
    query: Tensor,
    key: Tensor,
    scaling: float,
    rows: Sequence[int],
    top: int,
    sinks: Tensor | None = None,
    reach: Tensor | None = None,
) -> Tensor:
    """Return the mean attention mass of a row's ``top`` largest keys: HybridKV's sparsity score (equation 3).

    Row i attends to keys 0..i, or up to its reach. Its mass is the sum of its ``top`` largest probabilities: exactly 1
    if it sees at most ``top`` keys and there are no sinks.

    Args:
        rows: ascending indices of the query rows that count, at least one.
        top: keys per row, 1 or more.

    Returns:
        float64 ``[Hkv]`` on the CPU: mean over the rows and over the g query heads of a KV head, in (0, 1].
    """
    heads, dim = key.shape[0], key.shape[2]
    group = query.shape[0] // heads
    keys = key.float().transpose(1, 2)
    total = torch.zeros(heads, dtype=torch.float64, device=key.device)
    last_keys = torch.arange(query.shape[1]) if reach is None else reach  # key that each row sees
    for start, end in row_blocks(len(rows), query.shape[0] * (int(last_keys[rows[-1]]) + 1), key.device):
        block, n = torch.tensor(rows[start:end]), end - start
        visible_ends = last_keys[block]
        seen = int(visible_ends[-1]) + 1
        states = query[:, block.to(key.device)].float().mul_(scaling).view(heads, group * n, dim)
        scores = torch.bmm(states, keys[:, :, :seen])
        hide(scores.view(heads, group, n, seen), visible_ends)
        weight = exponentials(scores, masked=True, sinks=by_row(None if sinks is None else sinks.view(heads, group), n))
        largest_probabilities = scores.topk(min(top, seen), sorted=False).values
        mass = (largest_probabilities.sum(-1) * weight).double().view(heads, group, n)
        if sinks is None:
            mass.masked_fill_(visible_ends.to(key.device) < top, 1.0)  # exactly 1, so that heads tie
        total += mass.sum((1, 2))
    return (total / (len(rows) * group)).cpu()
