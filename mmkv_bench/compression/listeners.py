"""Listeners of a session: `PrefillListener` compresses each layer of a prompt, `AnswerAttention` sums an answer's attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn

from mmkv_bench.compression import states
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.cache import CompressedLayer, Reduce
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.base import DecodePolicy, Start
from mmkv_bench.compression.entry_counts import LayerAccount, account, accounts
from mmkv_bench.compression.numerics.attention import column_sums
from mmkv_bench.compression.observation import Observation, PromptBatch
from mmkv_bench.compression.replay import Replay
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.protocols import Lengths, Protocol

Phases: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""A clock's phases: called with `score`, `select`, `reduce` or `account` (our own counting), returns a block that is
timed."""


def untimed(name: str) -> AbstractContextManager[None]:
    """Return a context manager that does nothing, in place of a clock's phase."""
    return nullcontext()


class PrefillListener:
    """The listener of `attach`: reduces each layer during the prefill, or all layers at its end (scope `model`).

    Attributes:
        accounts: layer -> counts of each stored row, taken from the tensors after the reduction and before anything is fed.
        slot_nbytes: bytes of one head's key and value in the full cache.
        state_nbytes: bytes of layers that are not compressed.
        fallbacks: for each row, names of what could not be done as configured.
        observed: for each row, the fallbacks that only the layers' scores show.
    """

    def __init__(
        self,
        compressor: Compressor,
        budget: Budget | None,
        protocol: Protocol,
        seed: int,
        prompt_tokens: int | None,
        context: int | None,
        answer: AnswerAttention | None,
        phases: Phases = untimed,
    ):
        self.phases = phases
        self.compressor, self.budget, self.protocol, self.seed = compressor, budget, protocol, seed
        self.prompt_tokens, self.context, self.answer = prompt_tokens, context, answer
        self.answer_steps = 0 if answer is None else answer.steps
        self.replay: Callable[[PromptBatch, Protocol, Lengths], Replay] | None = None  # of a session
        self.needs = compressor.needs
        self.fallbacks: list[tuple[str, ...]] = []
        self._reset()

    def _reset(self) -> None:
        self.scores: dict[int, list[Tensor | None]] = {}
        self.summaries: list[dict[int, Tensor]] = []
        self.observed: list[list[str]] = []
        self.fallbacks = []
        self._kept: dict[int, Tensor] = {}
        self._softmax: dict[int, tuple[float, Tensor | None]] = {}
        self.accounts: dict[int, list[LayerAccount]] = {}
        self.slot_nbytes = self.state_nbytes = 0

    def _lengths(self, prompt: PromptBatch, row: int) -> Lengths:
        length = prompt.length(row)
        return self.protocol.lengths(length, length if self.context is None else self.context)

    def _entries(self, length: int) -> int:
        if self.compressor.unbudgeted:
            return length
        assert self.budget is not None, "attach refuses a method that evicts without a budget"
        return min(length, self.budget.entries_for(length))

    def layer_done(self, prompt: PromptBatch, layer: int, observations: list[Observation]) -> None:
        if layer == 0:
            self._reset()
            self.summaries, self.observed = [{} for _ in observations], [[] for _ in observations]
        scores: list[Tensor | None] = []
        for row, observation in enumerate(observations):
            length = self._lengths(prompt, row).reduced
            entries = self._entries(length)
            if layer == 0:
                requested = length if self.budget is None else self.budget.entries_for(length)
                answer_fallbacks = () if entries >= length else self.compressor.answer_fallbacks(self.answer_steps)
                self.fallbacks.append(
                    self.compressor.fallbacks(requested, length, self._types(prompt, row)) + answer_fallbacks
                )
            if entries >= length:
                scores.append(None)
                continue
            scorer = self.compressor.eviction.scorer
            with self.phases("score"):
                score = self.compressor.score(observation, entries, self.seed)
                self.observed[row] += self.compressor.observed_fallbacks(observation, entries, self.seed)
                if self.needs.answer:
                    score = scorer.with_answer(score, None if self.answer is None else self.answer.mass(layer))
                scores.append(score)
                summary = self.compressor.summary(observation, entries, self.seed)
                if summary is not None:
                    self.summaries[row][layer] = summary
        self.scores[layer] = scores
        self._softmax[layer] = observations[0].scaling, observations[0].sinks
        if self.compressor.scope == "layer":
            self._reduce(prompt, [layer])

    def prompt_done(self, prompt: PromptBatch) -> None:
        if self.needs.replay and any(score is not None for score in self.scores[0]):
            self._score_again(prompt)
        prompt.received = None
        if self.compressor.scope != "layer":
            self._reduce(prompt, sorted(self.scores))
        with self.phases("account"):
            compressed, self.state_nbytes = prompt.cache.compressed, states.nbytes([*prompt.cache.states.values()])
            self.accounts = {layer: self._accounts(prompt, compressed[layer]) for layer in self._kept}

    def _score_again(self, prompt: PromptBatch) -> None:
        """Replace the scores by those that the scorer computes while the context is fed a second time."""
        if self.replay is None:
            raise UnsupportedError(
                f"method {self.compressor.name} feeds the prompt again with an instruction, but here the "
                "instruction's tokens are unknown; use the method in a run, or choose another one"
            )
        lengths, scorer = self._lengths(prompt, 0), self.compressor.eviction.scorer
        with self.phases("score"):
            replay = self.replay(prompt, self.protocol, lengths)
            self.scores = {layer: [score] for layer, score in enumerate(scorer.from_replay(replay))}
            self.observed[0] += replay.fallbacks

    def _reduce(self, prompt: PromptBatch, layers: list[int]) -> None:
        # If nothing is evicted, only our own list of kept slots is made; the full cache is not touched.
        with self.phases("account" if self.compressor.unbudgeted else "select"):
            kept_by_layer, all_kept = self._select(prompt, layers)
        for layer in layers:
            with self.phases("account" if self.compressor.is_full else "reduce"):
                width = max(kept.shape[1] for kept in kept_by_layer[layer])
                stored = torch.stack(
                    [nn.functional.pad(k, (width - k.shape[1], 0), value=-1) for k in kept_by_layer[layer]]
                )
                self._store(prompt, layer, stored, all_kept)
            self._kept[layer] = stored
            self.scores.pop(layer, None)

    def _select(self, prompt: PromptBatch, layers: list[int]) -> tuple[dict[int, list[Tensor]], bool]:
        """Return (layer -> slots to keep in each row, int64 `[Hkv, m]` on the CPU; whether all slots are kept)."""
        kept_by_layer: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        complete = []
        for row, pad in enumerate(prompt.pads):
            lengths = self._lengths(prompt, row)
            entries = self._entries(lengths.reduced)
            complete.append(entries >= lengths.reduced)
            if complete[-1]:
                heads = prompt.cache.compressed[layers[0]].keys.shape[1]
                all_indices = torch.arange(lengths.candidates).expand(heads, -1)
                index = [all_indices] * len(layers)
            else:
                scores = [self.scores[layer][row] for layer in layers]
                index = self.compressor.select(
                    [score for score in scores if score is not None],
                    entries,
                    self._types(prompt, row),
                    layers,
                    prompt.n_layers,
                    lengths.refed,
                    summaries=self.summaries[row],
                    length=lengths.reduced,
                    asked=None if self.budget is None else self.budget.asked,
                )
            for layer, kept in zip(layers, index, strict=True):
                kept_by_layer[layer].append(kept.cpu().masked_fill(kept.cpu() < 0, -1 - pad) + pad)
        return kept_by_layer, all(complete)

    def _store(self, prompt: PromptBatch, layer: int, index: Tensor, all_kept: bool) -> None:
        target = prompt.cache.compressed[layer]
        index, forgotten = index.to(target.device), self._lengths(prompt, 0).forgotten
        self.slot_nbytes = target.slot_nbytes
        if self.compressor.decoding is not None and (not all_kept or self.compressor.quantises):
            prompt.cache.put(layer, self._decoding_layer(prompt, layer, target, index, self.compressor.decoding))
            if self.compressor.decoding.moves_queries:
                prompt.cache.query_positions = self.compressor.decoding.query_positions
        elif not all_kept:
            rows = [self._reduce_row(prompt, row) for row in range(len(prompt.pads))]
            target.retain(index, rows, target.reserve + forgotten, forgotten)
        else:
            target.forget(forgotten)

    def _accounts(self, prompt: PromptBatch, layer: CompressedLayer) -> list[LayerAccount]:
        """Return byte and entry counts of each row as if it were stored alone, without the batch's padding."""
        rows = len(prompt.pads)
        fed = [
            max(self.prompt_tokens or 0, prompt.total) - pad - self._lengths(prompt, row).candidates
            for row, pad in enumerate(prompt.pads)
        ]
        if rows == 1:
            return [account(layer, fed[0])]
        return accounts(layer, layer.capacity - layer.stored, fed)

    def _types(self, prompt: PromptBatch, row: int) -> Tensor | None:
        """Return the types of the tokens that the budget applies to, int `[T]`."""
        if prompt.token_types is None:
            return None
        return prompt.token_types[row, prompt.pads[row] :][: self._lengths(prompt, row).reduced]

    def _context(self, prompt: PromptBatch, row: int) -> Context:
        lengths, summaries = self._lengths(prompt, row), self.summaries[row] if self.summaries else {}
        entries = self._entries(lengths.reduced)
        return Context(entries, lengths.reduced, lengths.refed, self._types(prompt, row), summaries)

    def _reduce_row(self, prompt: PromptBatch, row: int) -> Reduce:
        """Return the method's reducer for one row's candidates: without padding and tokens that will be fed again."""
        context, pad = self._context(prompt, row), prompt.pads[row]
        end, reducer = pad + context.candidates, self.compressor.reducer

        def reduce(key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
            assert reducer is not None, "what is reduced has a reducer"
            index = (index - pad).masked_fill(index < 0, -1)
            return reducer.reduce(key[:, pad:end], value[:, pad:end], index, context.candidate_types)

        return reduce

    def _decoding_layer(
        self, prompt: PromptBatch, layer: int, target: CompressedLayer, index: Tensor, policy: DecodePolicy
    ) -> CompressedLayer:
        if len(prompt.pads) > 1:
            raise UnsupportedError(
                f"the decode policy of {self.compressor.name} takes one sequence, but the batch has "
                f"{len(prompt.pads)}; generate prompt by prompt"
            )
        context, pad = self._context(prompt, 0), prompt.pads[0]
        end = pad + context.candidates
        kept_key, kept_value = self._reduce_row(prompt, 0)(target.keys[0], target.values[0], index[0])
        scores, (scaling, sinks) = self.scores.get(layer, [None])[0], self._softmax[layer]
        return policy.layer(
            Start(
                layer=layer,
                n_layers=prompt.n_layers,
                key=target.keys[0, :, pad:end],
                value=target.values[0, :, pad:end],
                index=(index[0] - pad).masked_fill(index[0] < 0, -1),
                kept_key=kept_key,
                kept_value=kept_value,
                scores=scores,
                context=context,
                pad=pad,
                seen=end,
                acts_from=max(pad + prompt.length(0), self.prompt_tokens or 0),
                scaling=scaling,
                sinks=sinks,
                reserve=target.reserve + self._lengths(prompt, 0).forgotten,
            )
        )

    def kept(self) -> list[Tensor]:
        return [self._kept[layer] for layer in sorted(self._kept)]


class AnswerAttention:
    """The attention that the full cache's answer pays to each entry of the prompt, collected by a session.

    Per layer the attention is summed over all tokens fed after the prefill, and averaged over the g query heads of a KV
    head. Each token's softmax runs over all entries that the token sees; only the prompt's columns are kept.

    The fed tokens are those that would read a compressed cache: the prompt's last token under `strict`, the question under
    `query_agnostic`, and the answer's tokens except the last, which is never fed.

    Args:
        length: T, tokens of the prompt (of the context under `query_agnostic`).

    Attributes:
        steps: number of tokens fed; 0 for an answer of one token under `paper`.
    """

    def __init__(self, length: int):
        self.length, self.steps = length, 0
        self._mass: dict[int, Tensor] = {}

    def add(self, layer: int, query: Tensor, key: Tensor, scaling: float, sinks: Tensor | None) -> None:
        """Add the attention of one forward of the answer.

        Args:
            query: `[1,Hq,n,D]`, rotated, of the last n of S tokens.
            key: `[1,Hkv,S,D]` of all S tokens.
            sinks: `[Hq]`, see `Observation`.

        Raises:
            UnsupportedError: a batch of several sequences, whose answers end at different times.
        """
        if query.shape[0] != 1:
            raise UnsupportedError(
                f"answers are collected one by one, but the batch has {query.shape[0]} sequences; use one prompt"
            )
        rows = query.shape[2]
        mass = column_sums(query[0], key[0], scaling, key.shape[2] - rows, sinks)[:, : self.length].double()
        mass = mass / (query.shape[1] // key.shape[1])
        self._mass[layer] = self._mass[layer] + mass if layer in self._mass else mass
        self.steps += rows if layer == 0 else 0

    def mass(self, layer: int) -> Tensor | None:
        """Return the attention of one layer, float32 `[Hkv,T]`; None when nothing was fed."""
        return self._mass[layer].to(torch.float32) if self.steps else None
