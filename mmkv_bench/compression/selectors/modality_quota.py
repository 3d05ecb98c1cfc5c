"""MadaKV: every KV head divides its entries between visual and text tokens in proportion to its attention."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.errors import UnsupportedError


@dataclass(frozen=True)
class ModalityQuota(TopK):
    """MadaKV's modality preference (arXiv 2506.15724).

    A head that was granted phi entries sums its scores over visual tokens (``w_v``) and over text (``w_t``). It keeps
    the ``phi_v = phi * w_v / (w_v + w_t)`` best visual tokens and the ``phi - phi_v`` best text tokens; images and
    videos are one modality. Shares are rounded to the nearest whole entry, halves in favour of visual tokens. A quota
    larger than its modality is cut and the other modality gets the excess, so that exactly phi entries stay. In a
    prompt with one modality (or unknown types) this modality gets everything (fallback ``single_modality``). If all
    scores are 0, the modalities share in proportion to their numbers of tokens. Protected tokens count towards their
    own modality's quota, which is never below their number.

    Args:
        sinks, recents, window: see ``TopK``; none by default, because the paper names none.
    """

    streams = False
    recents: float = 0

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        has_one_modality = types is None or not bool((types != 0).any()) or bool((types != 0).all())
        return (*super().fallbacks(budget, length, types), *(("single_modality",) if has_one_modality else ()))

    def quotas(self, scores: Tensor, caps: Tensor, visual: Tensor, protected: Tensor) -> Tensor:
        """Return the number of visual entries of each head, int64 ``[Hkv]``.

        Args:
            scores: float32 ``[Hkv, n]``, 0 or more.
            caps: int64 ``[Hkv]``, at most n.
            visual, protected: bool ``[n]`` and ``[Hkv, n]``.

        Raises:
            UnsupportedError: negative scores.
        """
        if bool((scores < 0).any()):
            raise UnsupportedError(
                "modality quotas are shares of sums of scores, but this scorer gives negative scores; allowed: "
                "scorers of attention mass (tail_mass, window, column_sums)"
            )
        visual_mass = (scores * visual).sum(-1, dtype=torch.float64)
        text_mass = (scores * ~visual).sum(-1, dtype=torch.float64)
        has_no_mass = visual_mass + text_mass == 0
        visual_mass = torch.where(has_no_mass, visual.sum().double(), visual_mass)
        text_mass = torch.where(has_no_mass, (~visual).sum().double(), text_mass)
        share = (caps * visual_mass / (visual_mass + text_mass) + 0.5).floor().long()
        kept_visual, kept_text = (protected & visual).sum(-1), (protected & ~visual).sum(-1)
        share = torch.minimum(torch.maximum(share, kept_visual), caps - kept_text)
        return torch.minimum(torch.maximum(share, caps - (~visual).sum()), visual.sum())

    def select(
        self, scores: Tensor, caps: Tensor, protected: Tensor, order: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        order = self.order(scores) if order is None else order
        if types is None or scores.shape[1] == 0:
            return super().select(scores, caps, protected, order)
        caps = caps.clamp_max(scores.shape[1]).to(scores.device)
        visual = (types != 0).to(scores.device)
        forced = protected.to(scores.device).expand_as(scores)
        quota = self.quotas(scores, caps, visual, forced)
        forced_counts = torch.stack([forced & visual, forced & ~visual], -1).sum(1)
        free_quota = torch.stack([quota, caps - quota], -1) - forced_counts
        # In each row's order of scores: the first `free_quota` unprotected tokens of either modality come first.
        is_free = ~forced.gather(-1, order)
        is_visual = visual[order]
        rank = torch.where(is_visual, (is_free & is_visual).cumsum(-1), (is_free & ~is_visual).cumsum(-1))
        fills_quota = is_free & (rank <= torch.where(is_visual, free_quota[:, :1], free_quota[:, 1:]))
        return super().select(
            scores, caps, protected, order.gather(-1, (~fills_quota).byte().sort(dim=-1, stable=True).indices)
        )
