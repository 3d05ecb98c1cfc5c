"""Interface of scorers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from mmkv_bench.compression.context import Composed
from mmkv_bench.compression.lazy_torch import Tensor
from mmkv_bench.compression.observation import Needs, Observation

if TYPE_CHECKING:
    from mmkv_bench.compression.replay import Replay


class Scorer(ABC):
    """Ranks the entries of one layer of one sequence.

    A scorer keeps no state: all it may use is its parameters, the observation, the budget and the seed, so that sample
    order, method order and what ran before change nothing. Subclasses are frozen dataclasses; their docstring names
    the idea, the paper, every parameter with its unit, and where paper and released code part ways.

    Class attributes:
        needs: what the session must gather during prefill.
        stochastic: the score depends on ``seed``; a cell of a deterministic method has none.
        needs_visual: prompts without visual tokens cannot be scored.
        negative: scores may be below 0, so that their sums are no shares.
        resamples: nothing is scored; a run answers from the full cache of a prompt with smaller pictures (``pixels``) or a
            shorter text (``cut_prompt``); alone: the sentence where no run makes it; over_budget: the fallback of a row whose
            smallest prompt exceeds the budget.
        streams: it scores what is stored of a stream: no types of tokens are read, and nothing that only the whole prompt has.
        asks_template: of a stream it scores by queries of the chat template's own tokens, fed behind every chunk.
        comparable: scores of different KV heads of a layer lie on one scale and say which head needs more entries; not
            so for scores that follow from a token's place alone or are the same in every head.
        later: names of parameters that came after cells of the method were stored. Each is a parameter of the method under
            its own name; at its default it stands in no row and no cell's identity, so that older cells stay what they are.
        halves: those of ``later`` that models in half precision alone read: of other models they stand in no row either.

    A subclass sets them in its class, or as properties where they depend on its parameters.
    """

    streams: bool = True
    asks_template: bool = False
    comparable: bool = True
    later: ClassVar[tuple[str, ...]] = ()
    halves: ClassVar[tuple[str, ...]] = ()
    resamples: bool = False
    alone: ClassVar[str] = ""
    over_budget: ClassVar[str] = ""

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def stochastic(self) -> bool:
        return False

    @property
    def needs_visual(self) -> bool:
        return False

    @property
    def negative(self) -> bool:
        return False

    @abstractmethod
    def key(self, budget: int, length: int) -> tuple[object, ...]:
        """Effective parameters at this budget [entries per KV head] and prompt length [tokens].

        Cells whose scorers have the same type, the same key (and, when ``stochastic``, the same seed) share one score.
        The key therefore holds every parameter that changes a score, and the budget only where it does.
        """

    @abstractmethod
    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        """Float32 ``[Hkv, T]`` on the observation's device, finite, higher = keep. Protection is the selector's.

        Equal scores go to the lower index. Where a smaller number shall break ties, float64 is allowed
        (``numerics/ordering.py``); a scorer that rounds as a release does returns the model's half precision.
        """

    def method_version(self, method: Composed) -> int:
        """Version of this part's numbers, from 1, with these parameters beside the other parts of ``method``.

        A mend that changes what a part gives raises this for the parameters that it concerns, and for them alone: their
        cells get new hashes and run again, every other cell keeps its rows.
        """
        return 1

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        """Names of what could not be done as configured; the row holds them.

        Args:
            types: int ``[T]``, 0 text, 1 image, 2 video; None when unknown.
        """
        return ()

    def observed_fallbacks(self, obs: Observation, budget: int, seed: int) -> tuple[str, ...]:
        """Further fallbacks of one layer of a prompt longer than the budget, known from its scores."""
        return ()

    def check_layers(self, layers: int) -> None:  # noqa: B027 - most parameters fit every model
        """Raise ConfigError when the parameters do not fit a model of so many layers; asked before any work."""

    def with_answer(self, score: Tensor, mass: Tensor | None) -> Tensor:
        """The score of one layer once the full cache's own answer is known; called when ``needs.answer`` is set.

        Args:
            score: what ``score`` gave during the prefill; mass: float32 ``[Hkv, T]``, what the answer paid to each
                entry (``compression/listeners.py``), None when nothing was fed after the prefill.
        """
        return score

    def answer_fallbacks(self, steps: int) -> tuple[str, ...]:
        """Further fallbacks, known once `steps` tokens were fed after the prefill (``needs.answer``)."""
        return ()

    def from_replay(self, replay: Replay) -> list[Tensor]:
        """Scores of all layers, ``[Hkv, T]`` each, in place of what ``score`` gave; called after the prefill when
        ``needs.replay`` is set.

        Args:
            replay: feeds tokens behind the prompt, against its full cache, and drops them (``compression/replay.py``).
        """
        raise NotImplementedError(f"{type(self).__name__} declares needs.replay and makes nothing of it")

    def window_effective(self, budget: int, length: int) -> int | None:
        """Rows of the observation window really used; None for methods that have none."""
        return None
