"""Compressor = Scorer x Allocator x Selector x Reducer (x DecodePolicy): which entries of a prefilled prompt stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from mmkv_bench.compression.allocators.base import Allocator
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.base import DecodePolicy
from mmkv_bench.compression.lazy_torch import Tensor, torch
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.reducers.base import Reducer
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.compression.selectors.base import Selector
from mmkv_bench.errors import MMKVError, UnsupportedError
from mmkv_bench.protocols import Protocol

SCORE_DTYPES = ("torch.float32", "torch.float64")


class NonFiniteScoreError(MMKVError):
    """A scorer produced NaN or infinity. The result gets status `nan`."""


class ScoreError(MMKVError):
    """A scorer returned something other than one number per KV head and token."""


class OverBudgetError(MMKVError):
    """An allocation or selection above the budget, outside of `reading=released`."""


class Eviction(NamedTuple):
    """The four parts that a method needs to evict."""

    scorer: Scorer
    allocator: Allocator
    selector: Selector
    reducer: Reducer


@dataclass(frozen=True)
class Compressor:
    """One composed method. Without a scorer nothing is evicted and no budget applies: the method is `full`, or only quantises.

    Attributes:
        name: the name that tables show.
        reading: `paper`, or `released` for what the released code does. Under `paper`, keeping more than the budget is an
            error unless the paper's own formula does so.
        decoding: the policy for the kept entries while the answer is decoded; None: they stay, and new entries are appended.
    """

    name: str
    scorer: Scorer | None = None
    allocator: Allocator | None = None
    selector: Selector | None = None
    reducer: Reducer | None = None
    reading: str = "paper"
    decoding: DecodePolicy | None = None

    def __post_init__(self) -> None:
        if self.decoding is not None and self.decoding.idle:
            object.__setattr__(self, "decoding", None)

    @property
    def eviction(self) -> Eviction:
        """The parts of a method that evicts. Raises ValueError if a part is missing."""
        scorer, allocator, selector, reducer = self.scorer, self.allocator, self.selector, self.reducer
        if scorer is None or allocator is None or selector is None or reducer is None:
            raise ValueError(
                f"{self.name} evicts nothing; to evict, a method needs a scorer, an allocator, a selector and a reducer"
            )
        return Eviction(scorer, allocator, selector, reducer)

    @property
    def unbudgeted(self) -> bool:
        """True if nothing is evicted, so that no budget applies."""
        return self.scorer is None

    @property
    def is_full(self) -> bool:
        """True for the full cache, unchanged."""
        return self.scorer is None and self.decoding is None

    @property
    def quantises(self) -> bool:
        return self.decoding is not None and self.decoding.quantises

    @property
    def stochastic(self) -> bool:
        return self.scorer is not None and self.scorer.stochastic

    @property
    def needs(self) -> Needs:
        """Statistics to gather in every layer during the prefill."""
        return Needs() if self.unbudgeted else self.eviction.scorer.needs | self.eviction.allocator.needs

    @property
    def resamples(self) -> bool:
        """True if the answer comes from the full cache of a smaller prompt (`generation/smaller_prompts.py`)."""
        return self.scorer is not None and self.scorer.resamples

    @property
    def needs_visual(self) -> bool:
        return any(part.needs_visual for part in (self.scorer, self.allocator, self.selector) if part is not None)

    @property
    def exceeds(self) -> bool:
        """True if more than the budget may be kept, by a released code or by a paper's own formula (`exceeds_as_printed`)."""
        return any(part.exceeds for part in (self.allocator, self.selector) if part is not None)

    @property
    def exceeds_as_printed(self) -> bool:
        """True if the paper's own formula may keep more than the budget, and nothing else does."""
        exceeding_parts = [part for part in (self.allocator, self.selector) if part is not None and part.exceeds]
        return bool(exceeding_parts) and all(part.printed for part in exceeding_parts)

    @property
    def falls_short(self) -> bool:
        """True if fewer entries than the budget may be kept, although the prompt is longer."""
        return self.resamples or any(part.falls_short for part in (self.allocator, self.selector) if part is not None)

    def check_no_answer(self, protocol: str) -> None:
        """Raise UnsupportedError if scores need the full cache's answer. Under this protocol a document has several answers."""
        if self.needs.answer:
            raise UnsupportedError(
                f"protocol={protocol} compresses a document for other questions than the answered one, but "
                f"{self.name} scores by the answer; leave the method out, or use protocol=query_aware"
            )

    def check_only_evicts(self, protocol: str) -> None:
        """Raise UnsupportedError if the method changes kept entries: a second prefill can repeat evictions only."""
        decoding, reducer, objection = self.decoding, self.reducer, None
        if self.resamples:
            objection = "evicts nothing"
        elif reducer is not None and reducer.merges:
            objection = "merges evicted entries into kept ones"
        elif decoding is not None and decoding.quantises:
            objection = "stores entries in fewer bits"
        elif decoding is not None and decoding.retrieves:
            objection = "reads entries again that it took off the device"
        elif decoding is not None and decoding.tokens_from_full:
            objection = "decodes from the full cache first"
        if objection is not None:
            raise UnsupportedError(
                f"protocol={protocol} prefills a second time with kept entries alone, but {self.name} {objection}; "
                "allowed: methods that only evict; leave the method out, or use protocol=strict"
            )

    def check_beside_states(self, owner: str, rule: Protocol, read: bool = False) -> None:
        """Raise UnsupportedError if method or protocol cannot run on a model with sliding or recurrent layers.

        Args:
            owner: name of the model or family, for messages.
            rule: the protocol.
            read: whether later layers read the keys of compressed layers.
        """
        if read and self.decoding is not None:
            raise UnsupportedError(
                f"method {self.name} changes entries during decoding, but later layers of {owner} read these entries in the "
                "same step; choose a method that compresses only the prompt"
            )
        if rule.prefills_again:
            raise UnsupportedError(
                f"protocol={rule.name} hides evicted tokens from a second prefill, but the sliding or linear "
                f"layers of {owner} would still see them; allowed: every protocol but masked, stream and turns; "
                "use protocol=strict"
            )
        if rule.converses:
            raise UnsupportedError(
                f"protocol={rule.name} feeds a turn again behind what stays, but the sliding or linear layers of "
                f"{owner} have moved on; allowed: every protocol but masked, stream and turns; use "
                "protocol=query_aware"
            )
        if self.needs.replay:
            raise UnsupportedError(
                f"method {self.name} appends the context a second time, but the sliding or linear layers of "
                f"{owner} cannot return to their earlier state; choose another method or model"
            )
        if self.decoding is not None and self.decoding.moves_queries:
            raise UnsupportedError(
                f"method {self.name} decodes at the positions of cached entries, but the sliding or linear layers "
                f"of {owner} count all tokens; set the method's positions=own, or choose another method"
            )

    @property
    def version(self) -> int:
        """Version of the method's results: 1, plus one for each change of a part's results (`Scorer.method_version`)."""
        all_parts = (self.scorer, self.allocator, self.selector, self.reducer, self.decoding)
        return 1 + sum(part.method_version(self) - 1 for part in all_parts if part is not None)

    def version_at(self, budget: Budget | None) -> int:
        """Return `version`, plus one if the budget is a fraction and the allocator reads the fraction."""
        fraction = budget is not None and budget.asked is not None
        return self.version + (fraction and self.allocator is not None and self.allocator.reads_fraction)

    @property
    def scope(self) -> str:
        """`layer` if each layer can be reduced as soon as it is prefilled; `model` if the method needs all layers first."""
        if self.needs.replay:  # a prompt is fed again once all layers are prefilled
            return "model"
        return "layer" if self.allocator is None else self.allocator.scope

    def fallbacks(self, budget: int, length: int, types: Tensor | None = None) -> tuple[str, ...]:
        """Return the names of what cannot be done as configured for this prompt, as rows store them.

        budget: entries per KV head. length: tokens of the prompt. types: token types.
        """
        decoding = () if self.decoding is None else self.decoding.fallbacks(min(budget, length))
        if self.unbudgeted:
            return decoding
        if length <= budget:
            return ("prompt_within_budget", *decoding)
        names = [name for part in self.eviction for name in part.fallbacks(budget, length, types)]
        return tuple(dict.fromkeys([*names, *decoding]))

    def outcome(self, context: Context) -> tuple[str, ...]:
        """Return further fallbacks, which are known only after the budget was divided among layers and heads."""
        return () if self.unbudgeted or context.length <= context.budget else self.eviction.allocator.outcome(context)

    def score(self, observation: Observation, entries: int, seed: int) -> Tensor:
        """Return the scores `[Hkv, T]` of one layer for a budget of `entries` per KV head.

        The dtype is float32, float64, or the model's half precision if the scorer rounds to it.

        Raises:
            ScoreError: the scorer returned another shape or dtype.
        """
        score = self.eviction.scorer.score(self._scorer_view(observation, entries, seed), entries, seed)
        expected_shape = tuple(observation.key.shape[:2])
        allowed = (*SCORE_DTYPES, str(observation.key.dtype)) if self.eviction.scorer.halves else SCORE_DTYPES
        if (
            not isinstance(score, torch.Tensor)
            or tuple(score.shape) != expected_shape
            or str(score.dtype) not in allowed
        ):
            description = (
                f"{score.dtype} {list(score.shape)}" if isinstance(score, torch.Tensor) else type(score).__name__
            )
            raise ScoreError(
                f"{type(self.scorer).__name__} of {self.name} gave {description} in layer {observation.layer}; a score is "
                f"torch.float32 or torch.float64 {list(expected_shape)}, KV heads by tokens"
            )
        return score

    def observed_fallbacks(self, observation: Observation, entries: int, seed: int) -> tuple[str, ...]:
        """Return further fallbacks of one layer, which are known only from its scores."""
        return self.eviction.scorer.observed_fallbacks(self._scorer_view(observation, entries, seed), entries, seed)

    def summary(self, observation: Observation, entries: int, seed: int) -> Tensor | None:
        """Return the allocator's summary of one layer; None if it makes none at this budget."""
        allocator = self.eviction.allocator
        key = allocator.summary_key(entries, observation.length)
        if key is None:
            return None
        return allocator.summary(observation.seen_by(allocator, allocator.needs, key, seed), entries, seed)

    def _scorer_view(self, observation: Observation, entries: int, seed: int) -> Observation:
        scorer = self.eviction.scorer
        return observation.seen_by(scorer, scorer.needs, scorer.key(entries, observation.length), seed)

    def answer_fallbacks(self, steps: int) -> tuple[str, ...]:
        """Return further fallbacks, which are known only after the full cache has answered.

        steps: number of tokens fed after the prefill.
        """
        return self.eviction.scorer.answer_fallbacks(steps) if self.needs.answer else ()

    def select(
        self,
        scores: Sequence[Tensor],
        budget: int,
        token_types: Tensor | None,
        layers: Sequence[int],
        n_layers: int,
        refed: int = 0,
        order: Tensor | None = None,
        summaries: Mapping[int, Tensor] | None = None,
        length: int | None = None,
        asked: Fraction | None = None,
    ) -> list[Tensor]:
        """Select the entries to keep of a prompt longer than its budget.

        Args:
            scores: per layer float32 or float64 `[Hkv, prefilled]`, at least T columns.
            budget: C, entries per KV head averaged over the model, `C < T`.
            token_types: int `[T]` (0 text, 1 image, 2 video) or None.
            layers: the layers that `scores` belong to.
            n_layers: number of layers of the model.
            refed: number of last tokens that will be fed again (1 under `strict`). They are no candidates, and their entries
                are reserved: C - 1 entries per head are chosen from T - 1.
            order: `selector.order` of the candidates, the layers' heads stacked: int64 `[len(scores) * Hkv, T - refed]`;
                None: sort here.
            summaries: layer -> result of the allocator's `summary` (see `Context`).
            length: T, the number of tokens that the budget applies to; None: as many as were scored.
            asked: the fraction of T that was requested as budget; None for a budget in entries.

        Returns:
            Per layer int64 `[Hkv, m]` kept token indices, ascending, padded on the left with -1.

        Raises:
            NonFiniteScoreError, OverBudgetError.
        """
        length = scores[0].shape[-1] if length is None else length
        context = Context(budget, length, refed, token_types, summaries or {}, asked)
        candidates = context.candidates
        granted = budget - refed
        # Selectors treat every head by itself, so the heads of all layers go through in one call.
        rows = stack_scores(scores)
        finite = torch.isfinite(rows).all(-1)
        if not bool(finite.all()):
            layer = layers[int((~finite).int().argmax()) // scores[0].shape[0]]
            raise NonFiniteScoreError(f"{self.name} gave non-finite scores in layer {layer}")
        _, allocator, selector, _ = self.eviction
        protected = selector.protected(length, budget, token_types)[..., :candidates].to(rows.device)
        caps = allocator.caps([score[:, :candidates] for score in scores], granted, layers, n_layers, context)
        index_rows = selector.select(rows[:, :candidates], torch.cat(caps), protected, order, context.candidate_types)
        counts = (index_rows >= 0).sum(-1).tolist()
        if self.reading != "released" and not self.exceeds_as_printed:
            kept_count = sum(counts)
            allowed = scores[0].shape[0] * self._allowance(granted, candidates, layers, n_layers)
            if kept_count > allowed:
                raise OverBudgetError(f"{self.name} kept {kept_count} entries, but the budget allows {allowed}")
        index_by_layer, first_row = [], 0
        for score, cap in zip(scores, caps, strict=True):
            end_row = first_row + len(cap)
            width = max(counts[first_row:end_row])  # not the caps: a released selector may exceed them
            index_by_layer.append(index_rows[first_row:end_row, index_rows.shape[1] - width :].to(score.device))
            first_row = end_row
        return index_by_layer

    def _allowance(self, granted: int, candidates: int, layers: Sequence[int], n_layers: int) -> int:
        """Return how many entries per KV head these layers may keep together (`Allocator.allowance`).

        Raises OverBudgetError: all layers of the model together would exceed the budget.
        """
        allocator = self.eviction.allocator
        total = allocator.allowance(granted, candidates, range(n_layers), n_layers)
        if total > granted * n_layers:
            raise OverBudgetError(
                f"{self.name} divides {total} entries per KV head among {n_layers} layers, but the budget allows "
                f"{granted * n_layers}"
            )
        return allocator.allowance(granted, candidates, layers, n_layers)


def stack_scores(scores: Sequence[Tensor]) -> Tensor:
    """Stack the scores of several layers, `[Hkv, n]` each, on the first one's device: `[layers * Hkv, n]`."""
    return torch.cat([score.to(scores[0].device) for score in scores])


def full() -> Compressor:
    """Return the full cache, the baseline without compression."""
    return Compressor("full")
