"""Merging of LOOK-M and MEDA: an evicted entry is merged into the most similar kept one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmkv_bench import devices
from mmkv_bench.compression.context import Composed
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.numerics.ordering import at_slots
from mmkv_bench.compression.numerics.tiles import head_blocks, row_blocks
from mmkv_bench.compression.parameter_checks import check_words
from mmkv_bench.compression.reducers.base import Reducer
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.errors import UnsupportedError


@dataclass(frozen=True)
class LookMMerge(Reducer):
    """LOOK-M (arXiv 2406.18139, section 3.3) and MEDA (arXiv 2502.17599, eq. 11 and 12).

    In each KV head, every evicted candidate i, text as well as visual, goes to the kept entry c whose key has the
    largest cosine with its key (both as stored, rotated; equal cosines: the lower slot). Values follow the same
    assignment. With n tokens assigned to c, for keys and values alike:

        average   (k_c + sum k_i) / (n + 1)
        pivot     (k_c + sum (k_i + k_c) / 2) / (n + 1)
        weighted  (k_c + sum cos_i k_i) / (n + 1)        the divisor is n + 1, not the weights' sum
        none      k_c

    A prompt without visual tokens is reduced as by H2O: evicted entries are lost (fallback ``nothing_merged``; the
    releases leave the prompt whole). Entries that nothing is assigned to come back bit for bit. Cosines and sums are
    float32. Extra memory: float32 copies of the kept entries, and one tile of (evicted block) x (kept).

    Args:
        merge: how evicted tokens join the kept entry nearest to them: average (MEDA, LOOK-M's A-merge), pivot (LOOK-M's
            best), weighted, or none (ablation without merging).
        sources: "aligned": every token joins the entry nearest to it; "misaligned": filtered as in the releases, see
            below.

    Paper and code: the released pivot class computes the above. The other two merge only tokens whose cosine, averaged
    over heads, is at least the mean of all cosines; so does ``sources=misaligned`` for "weighted". For "average" the
    release filters the destinations but not the sources: its r-th evicted token is merged into the entry nearest to the
    r-th token that PASSED, which ``sources=misaligned`` reproduces as well. "pivot" and "none" are not filtered. The
    filter needs the same number of evicted tokens in every head. The releases keep all text, so they merge visual
    tokens only. Not reproduced: sums in bfloat16.

    Raises:
        UnsupportedError: from ``reduce``, ``misaligned`` with heads that evict different numbers of tokens.
    """

    merge: Literal["average", "pivot", "weighted", "none"] = "average"
    sources: Literal["aligned", "misaligned"] = "aligned"

    def __post_init__(self) -> None:
        check_words(self)

    @property
    def merges(self) -> bool:
        return self.merge != "none"

    def method_version(self, method: Composed) -> int:
        """Return 2 if evicted text is merged too, else 1: a selector that keeps all text, as released, evicts none."""
        return 2 if self.merges and not getattr(method.selector, "keeps_text", False) else 1

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        has_no_visual = types is None or not bool((types > 0).any())
        return ("nothing_merged",) if self.merges and has_no_visual else ()

    def reduce(self, key: Tensor, value: Tensor, index: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept_entries = Evict().reduce(key, value, index)
        is_entry = index >= 0
        if not self.merges or types is None or not bool((types > 0).any()) or not bool(is_entry.any()):
            return kept_entries
        rows, valid = _evicted_positions(index, is_entry, len(types))
        if rows.shape[1] == 0:
            return kept_entries
        cosine, slot = _nearest_kept(key, rows, kept_entries[0], is_entry)
        plain = self.merge != "weighted" and bool(valid.all())  # every weight is 1
        weight = cosine if self.merge == "weighted" else torch.ones_like(cosine)
        if self.sources == "misaligned" and self.merge != "pivot":
            rows, slot, weight = self._filter_as_released(rows, valid, cosine, slot, weight)
            valid = torch.ones_like(rows, dtype=torch.bool)
        weight = weight * valid
        count = torch.zeros(index.shape, device=key.device).scatter_add_(1, slot, valid.float())
        merged_key, merged_value = (
            self._merge_entries(old, new, rows, slot, None if plain else weight, count)
            for old, new in zip((key, value), kept_entries, strict=True)
        )
        return merged_key, merged_value

    def _filter_as_released(
        self, rows: Tensor, valid: Tensor, cosine: Tensor, slot: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the evicted positions to merge, the kept slots they merge into and the weights, ``[Hkv, f]`` each.

        rows, valid: as of `_evicted_positions`. cosine, slot, weight: ``[Hkv, e]``, of the nearest kept key.
        """
        if not bool(valid.all()):
            counts = valid.sum(-1).tolist()
            raise UnsupportedError(
                f"sources=misaligned compares evicted tokens over heads, but these heads evict {counts}; allowed: "
                "equal numbers in all heads; use an allocator with equal caps, or sources=aligned"
            )
        passed = (cosine.mean(0) >= cosine.mean()).nonzero().flatten()
        taken = passed if self.merge == "weighted" else passed.new_tensor(range(len(passed)))
        return rows[:, taken], slot[:, passed], weight[:, passed]

    def _merge_entries(
        self, old: Tensor, kept: Tensor, rows: Tensor, slot: Tensor, weight: Tensor | None, count: Tensor
    ) -> Tensor:
        """Return the ``kept`` entries, ``[Hkv, m, D]``, after entries of ``old`` were merged into them.

        rows: ``[Hkv, e]``, indices of the entries to merge. slot, weight: the kept entry into which each is merged, and
        the factor of each (None: 1). count: number of entries merged into each kept entry.
        """
        heads, slots, dim = kept.shape
        in_order = devices.at(kept.device).adds_in_order
        total = torch.zeros(kept.shape, dtype=torch.float32, device=kept.device)
        for start, end in row_blocks(rows.shape[1], heads * (dim if in_order else slots), kept.device):
            source = at_slots(old, rows[:, start:end]).float()
            target = slot[:, start:end]
            if in_order:
                target = target + torch.arange(heads, device=kept.device)[:, None] * slots
                source = source if weight is None else source.mul_(weight[:, start:end, None])
                total.view(-1, dim).index_add_(0, target.flatten(), source.flatten(0, 1))
                continue
            share = torch.ones_like(target, dtype=torch.float32) if weight is None else weight[:, start:end]
            # A product with the assignment matrix: unlike scattered additions, equal on every run.
            assigned = torch.zeros(heads, end - start, slots, device=kept.device)
            total += torch.bmm(assigned.scatter_(2, target[..., None], share[..., None]).transpose(1, 2), source)
        kept_float, count = kept.float(), count[..., None]
        merged_sum = kept_float * (1 + count / 2) + total / 2 if self.merge == "pivot" else total.add_(kept_float)
        return torch.where(count > 0, merged_sum.div_(count + 1), kept_float).to(kept.dtype)


def _evicted_positions(index: Tensor, real: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the evicted positions below n, int64 ``[Hkv, e]`` ascending, and which are valid, bool ``[Hkv, e]``.

    A head that evicts fewer than e has invalid positions at its end. A head that keeps nothing has only invalid ones.
    index: kept positions, int64 ``[Hkv, C]``. real: bool ``[Hkv, C]``, False at padding.
    """
    is_kept = torch.zeros(len(index), n + 1, dtype=torch.bool, device=index.device)
    is_kept.scatter_(1, index.masked_fill(~real, n), True)  # padding marks a column of its own
    # A head that keeps nothing has nowhere to merge to.
    lost = ~is_kept[:, :n] & real.any(-1, keepdim=True)
    counts = lost.sum(-1, keepdim=True)
    rows = lost.sort(dim=-1, descending=True, stable=True).indices[:, : int(counts.max())]
    return rows, torch.arange(rows.shape[1], device=rows.device) < counts


def _nearest_kept(key: Tensor, rows: Tensor, kept: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return each candidate's largest cosine with a kept key, float32 ``[Hkv, e]``, and the slot of this key.

    rows: int64 ``[Hkv, e]``, the candidates. kept: ``[Hkv, m, D]``. real: bool ``[Hkv, m]``, which slots of ``kept``
    are entries and not padding.
    """
    units, padded = torch.nn.functional.normalize(kept.float(), dim=-1).transpose(1, 2), not bool(real.all())
    cosine = torch.empty(rows.shape, dtype=torch.float32, device=key.device)
    slot = torch.empty_like(rows)
    for first, last in head_blocks(len(key), kept.shape[1], key.device):
        block = slice(first, last)
        for start, end in row_blocks(rows.shape[1], (last - first) * kept.shape[1], key.device):
            evicted = torch.nn.functional.normalize(at_slots(key[block], rows[block, start:end]).float(), dim=-1)
            similarity = torch.bmm(evicted, units[block])
            if padded:
                similarity.masked_fill_(~real[block, None], -torch.inf)
            cosine[block, start:end], slot[block, start:end] = similarity.max(-1)
    return cosine, slot
