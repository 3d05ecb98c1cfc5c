"""What every protocol promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """One prompt under one protocol, in tokens from its beginning: `candidates <= reduced <= prefilled <= prompt`.

    Attributes:
        prompt: all of it.
        prefilled: pass the model, and are scored, before anything is evicted.
        reduced: T, what C counts and ratios mean.
        candidates: n, what can be kept. All that follows is fed again on the reduced cache, whole, at its true position.
    """

    prompt: int
    prefilled: int
    reduced: int
    candidates: int

    @property
    def fed(self) -> int:
        """Prompt tokens that are fed on the reduced cache, before the answer's."""
        return self.prompt - self.candidates

    @property
    def refed(self) -> int:
        """Those of them whose entries are part of C."""
        return self.reduced - self.candidates

    @property
    def appended(self) -> int:
        """Those of them whose entries are counted apart."""
        return self.prompt - self.reduced

    @property
    def forgotten(self) -> int:
        """Prefilled tokens whose entries go before anything is fed."""
        return self.prefilled - self.candidates


class Protocol(ABC):
    """Says what of a prompt is prefilled, reduced and fed again, and where the first token comes from.

    Class attributes:
        name: as `protocol=` takes it. about: one line for help and tables of protocols.
        cuts: the prompt is cut behind its visual tokens; without such, or without text after them, it is refused.
        from_prefill: so many first tokens of an answer come from the full prefill, whatever a method keeps.
        caveat: what a table says of every score of compressed cells; None: nothing beyond the share of free tokens.
        prefills_again: kept entries come from a second prefill that sees nothing else; for methods that only evict.
        diagnostic: says something about the other protocols; no score of a method's own.
    """

    name: str
    about: str
    cuts: bool = False
    from_prefill: int = 0
    caveat: str | None = None
    prefills_again: bool = False
    diagnostic: bool = False

    @property
    def feeds_once(self) -> bool:
        """Whether each prompt token passes the model once, so that stock `generate()` on the reduced cache follows it."""
        return not self.prefills_again and self.lengths(3, 2).forgotten == 0

    def _cut(self, context: int | None) -> int:
        """`context`. Raises ValueError where there is none."""
        if context is None:
            raise ValueError(f"protocol={self.name} cuts the prompt; say behind how many tokens")
        return context

    @abstractmethod
    def lengths(self, prompt: int, context: int | None = None) -> Lengths:
        """A prompt of `prompt` tokens, of which the first `context` are cut off where the protocol cuts."""
