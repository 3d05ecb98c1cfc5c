"""Prefill a context chunk by chunk with a limited cache, and store the states from which questions are answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.compaction import Compaction, check_rope
from mmkv_bench.compression.session import Session
from mmkv_bench.compression.streaming import StreamLayer, StreamListener
from mmkv_bench.generation.meter import vision_clock
from mmkv_bench.generation.result import GenerationTimeout, NonFiniteLogitsError
from mmkv_bench.generation.stream_reader import Reader


class Phased(Protocol):
    """Interface of an object that measures phases."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure the `with` block as this phase."""


@torch.no_grad()
def read(
    session: Session,
    reader: Reader,
    listener: StreamListener,
    meter: Phased,
    deadline: float | None = None,
    identity: str | None = None,
    after: Callable[[int, CompressedCache, Tensor], None] = lambda end, cache, logits: None,
) -> tuple[CompressedCache, Tensor]:
    """Prefill all chunks of a context; return the cache, and the logits `[V]` of the last token before the question.

    Args:
        session: an open session of the model; after the call, the session observes nothing.
        listener: evicts entries after each chunk.
        deadline: `time.monotonic()` after which no further chunk is prefilled.
        identity: seeds random draws; None: the prompt's identity.
        after: function that is called after every chunk with the number of prefilled tokens, the cache and the last logits.

    Raises:
        GenerationTimeout: the deadline has passed.
        NonFiniteLogitsError: the logits are NaN.
    """
    prompt, length = reader.prompt, reader.length
    cache = CompressedCache.of([StreamLayer(listener.reserve) for _ in session.attentions])
    session.expect(listener, prompt.types[:, :length], identity or prompt.identity)
    if reader.compact:
        check_rope(session.text.config)
        listener.compaction = Compaction(reader.positions[..., 0, :length].view(-1, length), session.rope)
    session.prompt_length, logits = length + reader.asked, torch.empty(0)
    try:
        with vision_clock(session.model, meter.phase):
            for clip in reader.clips:
                if deadline is not None and time.monotonic() > deadline:
                    raise GenerationTimeout("reading the stream ran past timeout_s")
                with meter.phase("prefill"):
                    inputs = reader.inputs(clip)
                    output = session.model(
                        **inputs, past_key_values=cache, use_cache=True, logits_to_keep=1, return_dict=True
                    )
                    logits = output.logits[0, -1].float()
                if bool(logits.isnan().any()):
                    raise NonFiniteLogitsError("the stream gave NaN logits")
                after(clip.end, cache, logits)
    finally:
        session.prompt_length = None
        session.expect(None, None, prompt.identity)
    return cache, logits


def copied(cache: CompressedCache) -> CompressedCache:
    return CompressedCache.of([layer.clone() for layer in cache.layers if isinstance(layer, StreamLayer)])


@dataclass(frozen=True)
class Stop:
    """State after the chunks before a question.

    Attributes:
        logits: logits `[V]` of the last prefilled token.
        counts: column -> value, for the row's columns about evictions so far.
        fallbacks: the layers' fallbacks so far.
        seconds: phase -> seconds so far.
    """

    cache: CompressedCache
    logits: Tensor
    counts: dict[str, int]
    fallbacks: tuple[str, ...]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Held:
    """A document's context that was prefilled once for all questions.

    stops: number of prefilled tokens -> the state after them, or the error that ended the prefill before.
    """

    document: Hashable
    stops: dict[int, Stop | Exception]
