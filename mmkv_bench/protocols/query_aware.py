"""`query_aware`: `query_agnostic` with scores that know the question; the difference of the two is what that is worth."""

from __future__ import annotations

from mmkv_bench.protocols.base import Lengths, Protocol


class QueryAware(Protocol):
    """The whole prompt is prefilled and scored, then the context alone is reduced; T, C and ratios mean the context, as do
    protected tokens and windows that a method always keeps. The question's entries are dropped and it is fed again on
    the reduced cache, kept whole and counted apart. Causal attention makes the context's own entries those of
    `query_agnostic`: which of them stay, and nothing else, is what knowing the question changes."""

    name = "query_aware"
    about = "as query_agnostic, but scored by a prefill of the whole prompt: what knowing the question is worth"
    cuts = True

    def lengths(self, prompt: int, context: int | None = None) -> Lengths:
        cut = self._cut(context)
        return Lengths(prompt, prefilled=prompt, reduced=cut, candidates=cut)
