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
    """A rule that ranks the entries of one layer of one sequence.

    A scorer keeps no state: scores depend on its parameters, the observation, the budget and the seed alone. Subclasses
    are frozen dataclasses; their docstring names the idea, the paper, every parameter with its unit, and where paper
    and released code differ.

    Class attributes:
        needs: statistics that the session must gather during prefill.
        stochastic: the score depends on ``seed``; results of other methods have no seed.
        needs_visual: prompts without visual tokens are refused.
        negative: scores may be below 0, so that they cannot be used as shares of a sum.
        resamples: nothing is scored; a run answers from the full cache of a prompt with smaller pictures (``pixels``)
            or a shorter text (``cut_prompt``).
        alone: error message if a method that resamples is used outside of a run.
        over_budget: fallback of a method that resamples, if even the smallest prompt exceeds the budget.
        streams: allowed under ``protocol=stream``: scores need no token types, and nothing that needs the whole prompt.
        asks_template: under ``protocol=stream``, scores use queries of the chat template's own tokens, fed after every
            chunk.
        comparable: scores of different KV heads of a layer have one scale and show which head needs more entries. False
            for scores that depend on a token's position alone or are equal in every head.
        later: names of parameters added after results of the method were stored. Each is also a parameter of the
            method, under the same name. At its default it is in no result row and no hash, so that older results stay
            valid.
        halves: the names in ``later`` of parameters that have an effect in half precision only; rows of other models do
            not include them.

    A subclass sets these attributes, or defines properties if they depend on its parameters.
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
        """Return the parameters on which scores depend, at this budget [entries per KV head] and length [tokens].

        Methods whose scorers have equal type and key (and, when ``stochastic``, equal seed) share one score. So the key
        includes every parameter that changes a score, and the budget only if it does.
        """

    @abstractmethod
    def score(self, obs: Observation, budget: int, seed: int) -> Tensor:
        """Return a finite score per entry, float32 ``[Hkv, T]`` on the observation's device; higher scores are kept.

        Of equal scores the selector, which also protects tokens, keeps the lower index. float64 is allowed for scores
        whose ties are broken by a second, smaller number (``numerics/ordering.py``). A scorer that rounds as a release
        does returns the model's half precision.
        """

    def method_version(self, method: Composed) -> int:
        """Return the version of this part's results, from 1, with these parameters and the other parts of ``method``.

        A fix raises the version for the parameters whose results it changes. These results get new hashes and are
        computed again; all other stored rows stay valid.
        """
        return 1

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        """Return names of what cannot be done as configured, such as ``window_reduced``. Result rows store these names.

        Args:
            budget: C [entries per KV head].
            length: T [tokens].
            types: int ``[T]``, 0 text, 1 image, 2 video; None when unknown.
        """
        return ()

    def observed_fallbacks(self, obs: Observation, budget: int, seed: int) -> tuple[str, ...]:
        """Return the fallbacks that are known only from a layer's scores; called for prompts longer than the budget."""
        return ()

    def check_layers(self, layers: int) -> None:  # noqa: B027 - most parameters fit every model
        """Raise ConfigError if the parameters do not fit a model with this number of layers; called before any work."""

    def with_answer(self, score: Tensor, mass: Tensor | None) -> Tensor:
        """Return the final scores of one layer after the full cache has answered, if ``needs.answer`` is set.

        Args:
            score: the result of ``score`` during the prefill.
            mass: float32 ``[Hkv, T]``, the answer's attention to each entry (``compression/listeners.py``); None when
                nothing was fed after the prefill.
        """
        return score

    def answer_fallbacks(self, steps: int) -> tuple[str, ...]:
        """Return the fallbacks that are known after the full cache's answer (``needs.answer``).

        steps: number of tokens fed after the prefill.
        """
        return ()

    def from_replay(self, replay: Replay) -> list[Tensor]:
        """Return scores of all layers, ``[Hkv, T]`` each, which replace those of ``score``.

        Called after the prefill, if ``needs.replay`` is set.

        Args:
            replay: feeds tokens after the prompt, against its full cache, and drops them (``compression/replay.py``).
        """
        raise NotImplementedError(f"{type(self).__name__} declares needs.replay but does not override from_replay")

    def window_effective(self, budget: int, length: int) -> int | None:
        """Return the number of queries of the observation window that are used; None for methods without a window."""
        return None
