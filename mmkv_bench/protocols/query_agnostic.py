"""`query_agnostic`: the context is compressed before the question is known."""

from __future__ import annotations

from mmkv_bench.protocols.base import Lengths, Protocol


class QueryAgnostic(Protocol):
    """Only the context, the prompt up to its last visual token and that one's closing marker, is prefilled, scored and
    reduced; T, C and ratios mean it. The rest, the question, is fed on the reduced cache, kept whole and counted apart."""

    name = "query_agnostic"
    about = "the context is compressed before the question is fed, which is kept whole and counted apart"
    cuts = True

    def lengths(self, prompt: int, context: int | None = None) -> Lengths:
        cut = self._cut(context)
        return Lengths(prompt, prefilled=cut, reduced=cut, candidates=cut)
