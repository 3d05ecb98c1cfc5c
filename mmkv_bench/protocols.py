"""Protocols: which part of a prompt is prefilled, reduced and fed again, and where the first answer token comes from.

Each protocol is a subclass of `Protocol` in this file. All other code calls its methods and names no protocol.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from mmkv_bench.errors import ConfigError, nearest

DEFAULT = "paper"


@dataclass(frozen=True)
class Lengths:
    """Token counts of one prompt under one protocol, from its beginning: `candidates <= reduced <= prefilled`.

    `prefilled` is at most `prompt`, except where scores know other questions (`Protocol.needs_questions`). Tokens after the
    candidates are fed again on the reduced cache, at their true positions.
    """

    prompt: int  # tokens of the whole prompt
    prefilled: int  # tokens that pass the model, and are scored, before anything is evicted
    reduced: int  # T, the tokens that the budget C and all ratios refer to
    candidates: int  # n, the tokens that can be kept

    @property
    def fed(self) -> int:
        """Number of prompt tokens that are fed on the reduced cache, before the answer's tokens."""
        return self.prompt - self.candidates

    @property
    def refed(self) -> int:
        """Number of fed prompt tokens whose cache entries count against the budget C."""
        return self.reduced - self.candidates

    @property
    def appended(self) -> int:
        """Number of fed prompt tokens whose cache entries do not count against the budget C."""
        return self.prompt - self.reduced

    @property
    def forgotten(self) -> int:
        """Number of prefilled tokens whose cache entries are dropped before anything is fed."""
        return self.prefilled - self.candidates


class Protocol(ABC):
    """A rule that splits a prompt into parts that are prefilled, reduced and fed again.

    Class attributes:
        name: value of `protocol=`.
        about: one line for help and tables of protocols.
        cuts: the prompt is cut after its visual tokens, or after the document that its dataset names (`context_key`); a prompt
            without either, or without text after it, is refused.
        from_prefill: number of first answer tokens that come from the full prefill, whatever a method keeps.
        caveat: table note on scores of methods other than `full`; None: the note only states the share of tokens from the
            full prefill.
        prefills_again: kept entries come from a second prefill that sees kept entries only; for methods that only evict.
        streams: the context arrives in chunks, and no KV head has more entries than the budget after any of them.
        converses: a document's questions are asked in turn, in one conversation.
        diagnostic: explains the other protocols; its scores do not rank methods.
        knows: questions of the document that the scores know: `own`, `none`, or one of `OF_THE_DOCUMENT`, which needs a
            dataset with several questions per document (`questions_key`).
    """

    name: str
    about: str
    cuts: bool = False
    from_prefill: int = 0
    caveat: str | None = None
    prefills_again: bool = False
    streams: bool = False
    converses: bool = False
    diagnostic: bool = False
    knows: str = "own"

    @property
    def needs_questions(self) -> bool:
        """Tell whether scores know questions about the document other than the answered one."""
        return self.knows in OF_THE_DOCUMENT

    @property
    def apart(self) -> bool:
        """Tell whether each (method, budget) needs its own prefill, because evictions change the states of later tokens."""
        return self.streams or self.converses

    def serves_all_questions(self, reads_answer: bool) -> bool:
        """Tell whether one compressed cache of a document serves all questions about it.

        reads_answer: whether the method's scores use the full cache's answer.
        """
        return not self.apart and (self.needs_questions or (self.knows == "none" and not reads_answer))

    @property
    def feeds_once(self) -> bool:
        """Tell whether each prompt token passes the model once, so that `generate()` on the reduced cache does the same."""
        return not (self.prefills_again or self.streams) and self.lengths(3, 2).forgotten == 0

    def _cut(self, context: int | None) -> int:
        if context is None:
            raise ValueError(f"protocol={self.name} cuts the prompt but got no context length; give `context`")
        return context

    @abstractmethod
    def lengths(self, prompt: int, context: int | None = None) -> Lengths:
        """Return the token counts of a prompt under this protocol.

        prompt: tokens of the whole prompt.
        context: tokens before the question, where protocols that cut the prompt split it.

        Raises ValueError: the protocol cuts the prompt, but `context` is None.
        """


OF_THE_DOCUMENT = ("first", "joint", "generic", "paraphrase", "turns")
"""Values of `Protocol.knows` for which a prompt's document must have several questions."""


class Paper(Protocol):
    """The papers' protocol: prefill, score, reduce; nothing is fed again.

    The first answer token comes from the full prefill, so a one-token answer is the full cache's under every method.
    """

    name = "paper"
    about = "the first token comes from the full prefill, as in the papers: what later tokens lose"
    from_prefill = 1

    def lengths(self, prompt: int, context: int | None = None) -> Lengths:
        return Lengths(prompt, prefilled=prompt, reduced=prompt, candidates=prompt)


class QueryAgnostic(Protocol):
    """A protocol that compresses the context before the question is known.

    Only the context is prefilled, scored and reduced: the prompt up to its last visual token and that token's closing
    marker, or up to the end of a text prompt's document. T, C and ratios refer to the context. The question is fed on the
    reduced cache, kept whole and counted separately.
    """

    name = "query_agnostic"
    about = "the context is compressed before the question is fed, which is kept whole and counted apart"
    cuts = True
    knows = "none"

    def lengths(self, prompt: int, context: int | None = None) -> Lengths:
        cut = self._cut(context)
        return Lengths(prompt, prefilled=cut, reduced=cut, candidates=cut)


class QueryAware(Protocol):
    """`query_agnostic` with scores that know the question; the difference between the two is the value of knowing it.

    The whole prompt is prefilled and scored, then the context alone is reduced. T, C, ratios, protected tokens and windows
    refer to the context. The question's entries are dropped, and the question is fed again on the reduced cache, kept whole
    and counted separately. Attention is causal, so the context's entries equal those of `query_agnostic`: knowing the
    question changes only which of them stay.
    """

    name = "query_aware"
    about = "as query_agnostic, but scored by a prefill of the whole prompt: what knowing the question is worth"
    cuts = True

    def lengths(self, prompt: int, context: int | None = None) -> Lengths:
        cut = self._cut(context)
        return Lengths(prompt, prefilled=prompt, reduced=cut, candidates=cut)


class Stream(QueryAgnostic):
    """A protocol that reads a video in chunks under a hard cap, then asks the question.

    The budget is the cap: after every chunk no KV head of any layer has more entries. Unlike under `query_agnostic`, later
    chunks do not see evicted entries. Entries that stay keep their positions, unless `StreamSettings.positions` moves them
    together. The question is fed at the end, kept whole and counted separately.
    """

    name = "stream"
    about = (
        "what is read arrives in chunks; after each no KV head holds more than the budget, and then the question is fed"
    )
    streams = True


@dataclass(frozen=True)
class StreamSettings:
    """Settings of `protocol=stream`."""

    every: int | None = 8  # frames per chunk (tokens, for a text); None: everything in one chunk
    ask_at: float = 1.0  # share of the stream after which the question is asked, in whole chunks; the rest is not read
    positions: str = "kept"  # of entries that stay: `kept`, or `compact` (consecutive, up to the newest token's)


READ_AS_ASKED = StreamSettings()


class Strict(Protocol):
    """A protocol that feeds the last prompt token again, so that every answer token is decoded from C entries.

    Scores are those of `paper`. The last prompt token's slot is dropped in every layer and head, the other T - 1 tokens
    are reduced to C - 1 entries per head, and the last token is fed again: the cache then has exactly C entries. This token
    is never ranked, merged or quantised. What earlier tokens absorbed in the full prefill stays: see `masked`.
    """

    name = "strict"
    about = "the last prompt token is fed again on the compressed cache: every answer token is decoded from C entries"
    caveat = (
        "every answer token is decoded from the compressed cache, whose entries were computed by the full prefill: what "
        "they took up from evicted entries stays (protocol=masked leaves it out)."
    )

    def lengths(self, prompt: int, context: int | None = None) -> Lengths:
        return Lengths(prompt, prefilled=prompt, reduced=prompt, candidates=prompt - 1)


class Masked(Strict):
    """A diagnostic variant of `strict`: a second prefill recomputes the kept entries without attention to evicted tokens.

    Scoring and selection are those of `strict`. Then the prompt is prefilled a second time: in each layer and KV head,
    every token attends only to kept entries and to itself. The cache then holds the entries of the second prefill, and the
    last prompt token is run once more against it. A token that every head evicted still has an effect in two ways: it
    took part in choosing the kept tokens, and the vision encoder mixed it into other visual tokens. The difference between the
    scores of `strict` and `masked` shows how much the kept entries carry of the evicted ones.
    """

    name = "masked"
    about = "a diagnostic: strict, with entries from a second prefill that sees kept entries only"
    caveat = (
        "a diagnostic: kept entries were computed by a second prefill that sees kept entries only, so that what is evicted "
        "everywhere leaves no trace but in the choice of what stays."
    )
    diagnostic = True
    prefills_again = True


class QueryFirst(QueryAware):
    """A protocol that compresses a document for its first question, then asks all of its questions.

    Which question comes first changes from document to document, so that every ordered pair of questions is equally frequent.
    The row of the first question itself is the control: it equals the row under `query_aware`.
    """

    name = "query_first"
    about = "the context is compressed once for a document's first question, then all of its questions are asked"
    caveat = (
        "one question of each document is the one that its cache was compressed for; `mmkv-bench tables <rows> --questions` "
        "reports it apart from the others."
    )
    diagnostic = True
    knows = "first"


class QueryJoint(QueryAware):
    """A protocol that compresses a document once for all questions. A score is the mean of the scores for each question."""

    name = "query_joint"
    about = "the context is compressed once for all questions of its document: what the room costs when all are known"
    diagnostic = True
    knows = "joint"


class QueryGeneric(QueryAware):
    """A protocol that compresses a document once, knowing a fixed instruction of its dataset instead of a question."""

    name = "query_generic"
    about = "the context is compressed once, for a fixed instruction in place of the question"
    diagnostic = True
    knows = "generic"


class QueryParaphrase(QueryAware):
    """A protocol that compresses a document for a paraphrase of the question, then asks the question."""

    name = "query_paraphrase"
    about = "the context is compressed for the same question in other words"
    diagnostic = True
    knows = "paraphrase"


class Turns(QueryAware):
    """A protocol that asks the questions of a document in turn, in one conversation with the model's own answers.

    The first turn equals `query_aware`. After each answer every KV head is cut back to the budget: the entries of the
    document, of earlier questions and of earlier answers compete, scored by the queries of the turn that has ended. The next
    question is fed on the kept entries, kept whole and counted separately. Which question comes first changes from document
    to document.
    """

    name = "turns"
    about = "the questions of a document are turns of one conversation, cut back to the budget after each answer"
    caveat = "a question comes after others of its document and the model's own answers to them."
    diagnostic = True
    converses = True
    knows = "turns"


_KINDS = (
    Paper,
    QueryAgnostic,
    QueryAware,
    Stream,
    Strict,
    Masked,
    QueryFirst,
    QueryGeneric,
    QueryJoint,
    QueryParaphrase,
    Turns,
)
_PROTOCOLS = {kind.name: kind() for kind in _KINDS}
"""Protocols by name, in alphabetical order, diagnostics last."""
NAMES = tuple(_PROTOCOLS)
SINGLE = tuple(name for name, one in _PROTOCOLS.items() if not one.needs_questions)
"""Protocols that need only the prompt's own question."""
CUTTING = tuple(name for name, one in _PROTOCOLS.items() if one.cuts)
"""Protocols that cut the prompt after its context; `WHOLE` are the others."""
WHOLE = tuple(name for name in NAMES if name not in CUTTING)
FED_ONCE = tuple(name for name, one in _PROTOCOLS.items() if one.feeds_once)
"""Protocols in which no token passes the model twice."""


def protocol(name: str) -> Protocol:
    """Return the protocol of that name; raise ConfigError if there is none."""
    if name not in _PROTOCOLS:
        raise ConfigError(f"protocol={name!r} is unknown; {nearest(str(name), NAMES)}")
    return _PROTOCOLS[name]
