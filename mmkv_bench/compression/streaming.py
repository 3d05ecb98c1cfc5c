"""Streams with a hard cap: after every chunk of a prompt each layer is scored and cut back to the cap."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.compression.compaction import Compaction
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.listeners import Phases, untimed
from mmkv_bench.compression.observation import Frames, Observation, PromptBatch
from mmkv_bench.errors import ConfigError, UnsupportedError

_SEARCHED = 4096  # largest budget tried in the search for one that holds a method's protected tokens


class StreamLayer(CompressedLayer):
    """A compressed layer of a prompt that is read chunk by chunk (a stream). All heads have the same number of entries.

    Masks cover stored slots, not all tokens read, because every stored slot is older than the current chunk. So a mask's
    size grows with the number of stored entries and with the chunk, not with the stream's length.
    """

    def clone(self) -> Self:
        layer_copy = copy.copy(self)
        layer_copy._key_storage, layer_copy._value_storage = self._key_storage.clone(), self._value_storage.clone()
        if self._position_storage is not None:
            layer_copy._position_storage = self._position_storage.clone()
        return layer_copy

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.stored + query_length, self.seen - self.stored

    def visible(self, query: Tensor, mask: Tensor | None) -> Tensor | None:
        return mask


class StreamListener:
    """A listener that keeps at most `cap` entries in every KV head of every layer.

    Scores are computed over the stored entries: those that stayed so far, and the newest chunk's. Statistics of queries
    continue from chunk to chunk.

    Attributes:
        cap: entries per KV head; None: nothing is evicted.
        asked: number of chat-template tokens that are fed after every chunk for their queries; each layer drops their
            entries at once.
        compaction: moves the entries that stay; None: they keep their positions.
        entries_max, entries_peak: most entries of a KV head after and before an eviction, over all chunks and layers.
        rounds: number of chunks after which entries were evicted.
        evicted: number of evicted entries of all layers and heads.
        fallbacks: names of what could not be done as configured, as the layers' scores showed.
    """

    def __init__(
        self,
        compressor: Compressor,
        cap: int | None,
        seed: int,
        frames: Frames | None = None,
        reserve: int = 0,
        asked: int = 0,
        phases: Phases = untimed,
    ):
        self.compressor, self.cap, self.seed = compressor, cap, seed
        self.frames, self.reserve, self.asked, self.phases = frames, reserve, asked, phases
        self.needs = compressor.needs
        self.compaction: Compaction | None = None
        self.entries_max = self.entries_peak = self.rounds = self.evicted = 0
        self.fallbacks: dict[str, None] = {}

    def is_full(self, layer: CompressedLayer) -> bool:
        """Tell whether a layer has more entries than are allowed after a chunk."""
        return self.asked > 0 or (self.cap is not None and layer.stored > self.cap)

    def layer_full(self, prompt: PromptBatch, layer: int, observation: Observation) -> None:
        """Evict entries of a layer down to the cap, and drop the entries of the template's tokens."""
        target, compressor, cap = prompt.cache.layers[layer], self.compressor, self.cap
        stored = target.stored - self.asked
        self.entries_peak = max(self.entries_peak, target.stored)
        if cap is None or stored <= cap:
            index = torch.arange(stored, device=target.device).expand(target.keys.shape[1], -1)
            target.forget(self.asked)
        else:
            seen = observation.stream_view(target.slot_positions()[0], self.frames, self.asked)
            with self.phases("compress"):
                score = compressor.score(seen, cap, self.seed)[:, :stored]
                self.fallbacks |= dict.fromkeys(compressor.observed_fallbacks(seen, cap, self.seed))
                (index,) = compressor.select([score], cap, None, [layer], prompt.n_layers, length=stored)
                index, tokens = index.to(target.device), target.slot_positions()[0][:, :stored]
                target.retain(index[None], self._reduce, self.reserve, self.asked)
                if self.compaction is not None:
                    rotations = self.compaction.moves(layer, tokens, index)
                    target.replace(self.compaction.rotate_keys(target.keys[0], rotations)[None], target.values)
            self.rounds += layer == 0
            self.evicted += (stored - target.stored) * index.shape[0]
        observation.retain(index)
        if target.ragged:
            raise UnsupportedError(
                f"{compressor.name} keeps different numbers of entries in the heads of a layer, which "
                "protocol=stream does not support; choose another method"
            )
        self.entries_max = max(self.entries_max, target.stored)

    def _reduce(self, key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.compressor.eviction.reducer.reduce(key, value, index, None)

    def layer_done(self, prompt: PromptBatch, layer: int, observations: Sequence[Observation]) -> None:
        stored = prompt.cache.layers[layer].stored
        self.entries_max, self.entries_peak = max(self.entries_max, stored), max(self.entries_peak, stored)

    def prompt_done(self, prompt: PromptBatch) -> None:
        """Do nothing: `layer_full` has reduced every layer."""

    def kept(self) -> list[Tensor]:
        return []


def check_streams(compressor: Compressor, budget: Budget | None) -> None:
    """Raise an error for methods that cannot run on a stream, and for caps below what a method protects.

    Raises:
        UnsupportedError: the method needs the whole prompt or later tokens, or may keep more than the cap in a KV head.
        ConfigError: a fraction of an unknown length, or a cap that is too small.
    """
    reason = _unfit(compressor)
    if reason is not None:
        raise UnsupportedError(
            f"protocol=stream keeps at most the budget in every KV head after each chunk, but {compressor.name} "
            f"{reason}; leave the method out, or use protocol=query_agnostic"
        )
    if compressor.unbudgeted or budget is None:
        return
    if budget.entries is None:
        raise ConfigError(
            f"budget={budget} is a share of a stream, whose length is unknown while it runs; give protocol=stream "
            "a whole number of entries, as budget=256"
        )
    if not compressor.resamples and _reduced(compressor, budget.entries):
        smallest_cap = next(
            (cap for cap in range(budget.entries, _SEARCHED) if not _reduced(compressor, cap)), _SEARCHED
        )
        raise ConfigError(
            f"budget={budget} is below the {smallest_cap} entries that {compressor.name} needs for its protected tokens "
            f"and its observation window, and a stream's cap is never exceeded; give budget={smallest_cap} or more"
        )


def check_turns(compressor: Compressor) -> None:
    """Raise UnsupportedError for methods that cannot run in a conversation."""
    reason = "evicts nothing" if compressor.resamples else _unfit(compressor)
    if reason is not None:
        raise UnsupportedError(
            f"protocol=turns cuts every KV head back to the budget after each answer, but {compressor.name} "
            f"{reason}; leave the method out, or use protocol=query_aware"
        )


def _unfit(compressor: Compressor) -> str | None:
    """Return why a method cannot run on a stream, as the end of a sentence; None if it can."""
    decoding, needs = compressor.decoding, compressor.needs
    if compressor.resamples:  # the smaller prompt fits into the cap
        return None
    if decoding is not None:
        return "acts while the answer is decoded"
    if compressor.unbudgeted:
        return None
    scorer, allocator, selector, reducer = compressor.eviction
    if needs.answer:
        return "scores by the answer, which comes later"
    if needs.replay:
        return "scores by feeding the whole context again"
    if needs.queries or needs.states:
        return "scores by all queries of the prompt, which are gone by then"
    if reducer.merges:
        return "merges evicted entries into kept ones"
    if not scorer.streams or compressor.needs_visual or not selector.streams:
        return "needs the whole prompt at once, or the types of its tokens"
    if not allocator.streams:
        return "gives some layers or heads more entries than others, or not the budget"
    return None


def _reduced(compressor: Compressor, cap: int) -> bool:
    """Tell whether a cap is too small for the method's protected tokens or observation window."""
    return bool({"window_reduced", "protected_reduced"} & {*compressor.fallbacks(cap, _SEARCHED + 1)})
