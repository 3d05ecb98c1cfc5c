"""Replay: feed the context of a prefilled prompt a second time, after the prompt and against its full cache, then drop it.

The cache is not written to: each layer reads the stored entries and, during one forward, the fed tokens' entries.
Pictures are fed as the embeddings that the text model received, so the vision tower does not run again. All fed tokens,
pictures included, get the positions of an answer: text positions on all axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mmkv_bench.compression.cache import CompressedCache, CompressedLayer
from mmkv_bench.compression.observation import PromptBatch
from mmkv_bench.compression.positions import last_positions, positions_after
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.protocols import Lengths, Protocol

OVERLAP = 8
"""Tokens before a chunk that are repeated at the end of its instruction."""

Read: TypeAlias = Callable[[int, int, int, Tensor, Tensor, float], None]
"""Called with (layer, first, last, query `[Hq, n, D]`, key `[Hkv, S + n, D]`, scaling) when tokens `first` to `last` are
fed again, rotated; S are the context's keys."""


@dataclass(frozen=True)
class ReplayText:
    """Token ids of the chat template and of instructions that surround the context when it is fed again."""

    prefix: int = 0  # tokens of the chat template before the user's first text or picture, which are not fed again
    whole: tuple[int, ...] = ()  # instruction to repeat the context; empty for a prompt made from tokens
    part: tuple[int, ...] = ()  # instruction to repeat the part that begins with the tokens after the instruction
    tail: tuple[int, ...] = ()  # tokens that the chat template puts after a user's text


NO_WORDS = ReplayText()


class Replay:
    """A context that can be fed again.

    Args:
        text: the text model, with a session attached.
        words: token ids that surround the context.
        prompt: the prefilled prompt, with its full cache.
        rule: the prompt's protocol.
        lengths: the prompt's lengths under this protocol.

    Attributes:
        end: number of tokens from the prompt's start to the context's end: the candidates, less the tokens that the
            template puts after a question.

    Raises:
        UnsupportedError: several prompts at once.
    """

    def __init__(self, text: Any, words: ReplayText, prompt: PromptBatch, rule: Protocol, lengths: Lengths):
        if len(prompt.pads) > 1:
            raise UnsupportedError(
                f"a context is fed again for one prompt at a time, but the batch has {len(prompt.pads)}; use one prompt"
            )
        self.text, self.words, self.prompt, self.lengths = text, words, prompt, lengths
        tail = 0 if rule.cuts else len(words.tail)
        self.end = min(lengths.candidates, lengths.prompt - tail)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        return () if self.words.whole else ("no_instruction",)

    @property
    def layers(self) -> list[CompressedLayer]:
        return self.prompt.cache.compressed

    @torch.no_grad()
    def feed(self, chunk: int, read: Read) -> None:
        """Feed the context to the model again, `chunk` tokens at a time.

        Before each chunk come an instruction, the last tokens before the chunk, and the end of the user's turn.
        read: function that is called for every layer and chunk with queries and keys.
        """
        start, received = self.words.prefix, self.prompt.received
        assert received is not None, "the session keeps it where `needs.replay` is set"
        embed = self.text.get_input_embeddings()
        positions = None if received.position_ids is None else received.position_ids[..., : self.end]
        last_position = last_positions(positions, self.end, received.embeds.device)

        def embedded(ids: tuple[int, ...]) -> Tensor:
            embeds: Tensor = embed(torch.tensor([ids], dtype=torch.int64, device=received.embeds.device))
            return embeds

        for first in range(start, self.end, chunk):
            stop, context_before = min(first + chunk, self.end), slice(max(start, first - OVERLAP), first)
            fed_slices = [context_before, slice(first, stop)]
            embedded_parts = [
                embedded(self.words.whole if first == start else self.words.part),
                received.embeds[:, context_before],
                embedded(self.words.tail),
                received.embeds[:, first:stop],
            ]
            fed = torch.cat(embedded_parts, 1)
            layers = [
                _ReplayLayer(layer, self.end, partial(read, number, first, stop))
                for number, layer in enumerate(self.layers)
            ]
            self.text(
                inputs_embeds=fed,
                position_ids=positions_after(last_position, 1, fed.shape[1], 1),
                past_key_values=CompressedCache.of(layers),
                use_cache=True,
                **self._deepstack_arguments(fed_slices, [part.shape[1] for part in embedded_parts]),
            )

    def _deepstack_arguments(self, again: list[slice], widths: list[int]) -> dict[str, Any]:
        """Return the features that the text model adds to visual tokens in its first layers (Qwen3-VL), as arguments.

        again: slices of the prompt that are fed again. widths: number of tokens of each fed piece.
        """
        received = self.prompt.received
        if received is None or received.visual is None or received.deepstack is None:
            return {}
        visual = received.visual[0]
        number = visual.cumsum(0) - 1
        feature_rows = torch.cat([number[one][visual[one]] for one in again])
        none = [visual.new_zeros(widths[0]), visual.new_zeros(widths[2])]
        mask = torch.cat([none[0], visual[again[0]], none[1], visual[again[1]]])[None]
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": [one[feature_rows] for one in received.deepstack]}


class _ReplayLayer(CompressedLayer):
    """A layer that attends to the first `length` entries of `source` and to the fed tokens, and stores neither.

    read: function that is called with queries, keys and the scaling factor.
    """

    def __init__(self, source: CompressedLayer, length: int, read: Callable[[Tensor, Tensor, float], None]):
        super().__init__(reserve=0)
        self.source, self.read = source, read
        self.dtype, self.device, self.is_initialized = source.dtype, source.device, True
        self.stored = self.seen = length
        self._all: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._all = torch.cat([self.source.keys[:, :, : self.stored], key_states], 2)
        return self._all, torch.cat([self.source.values[:, :, : self.stored], value_states], 2)

    def attended(self, query: Tensor, scaling: float) -> None:
        assert self._all is not None, "attention follows the update"
        self.read(query[0], self._all[0], scaling)
        self._all = None
