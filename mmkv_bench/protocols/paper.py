"""`paper`: the first token comes from the full prefill, as in the papers."""

from __future__ import annotations

from mmkv_bench.protocols.base import Lengths, Protocol


class Paper(Protocol):
    """Prefill, score, reduce; nothing is fed again. One-letter answers cannot tell methods apart."""

    name = "paper"
    about = "the first token comes from the full prefill, as in the papers: what later tokens lose"
    from_prefill = 1

    def lengths(self, prompt: int, context: int | None = None) -> Lengths:
        return Lengths(prompt, prefilled=prompt, reduced=prompt, candidates=prompt)
