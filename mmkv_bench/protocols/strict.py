"""`strict`: the last prompt token is fed again, so that every answer token comes from C entries."""

from __future__ import annotations

from mmkv_bench.protocols.base import Lengths, Protocol


class Strict(Protocol):
    """Score as `paper` does; then the last prompt token's slot goes in every layer and head, the other T - 1 tokens are
    reduced to C - 1 entries per head, and that token is fed again, so that the cache holds exactly C. It is never
    ranked, merged or quantised. What earlier tokens absorbed from the full prefill stays: see `masked`."""

    name = "strict"
    about = "the last prompt token is fed again on the compressed cache: every answer token is decoded from C entries"
    caveat = (
        "every answer token is decoded from the compressed cache, whose entries were computed by the full prefill: what "
        "they took up from evicted entries stays (protocol=masked leaves it out)."
    )

    def lengths(self, prompt: int, context: int | None = None) -> Lengths:
        return Lengths(prompt, prefilled=prompt, reduced=prompt, candidates=prompt - 1)
