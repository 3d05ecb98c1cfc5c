"""`masked`: entries that stay are made anew, by a prefill that sees nothing else; a diagnostic of `strict`."""

from __future__ import annotations

from mmkv_bench.protocols.base import Lengths, Protocol


class Masked(Protocol):
    """Score, allocate and select as `strict` does. Then the prompt is prefilled a second time, every token attending, in
    each layer and KV head, to what is kept there and to itself; the entries that stay are those of that pass, and the last
    prompt token is fed again on them. What is evicted everywhere leaves no trace but in the choice of what stays and in what
    the vision encoder mixed. The difference to `strict` is what kept entries remember of evicted ones."""

    name = "masked"
    about = "a diagnostic: strict, with entries from a second prefill that sees kept entries only"
    caveat = (
        "a diagnostic: kept entries were computed by a second prefill that sees kept entries only, so that what is evicted "
        "everywhere leaves no trace but in the choice of what stays."
    )
    diagnostic = True
    prefills_again = True

    def lengths(self, prompt: int, context: int | None = None) -> Lengths:
        return Lengths(prompt, prefilled=prompt, reduced=prompt, candidates=prompt - 1)
