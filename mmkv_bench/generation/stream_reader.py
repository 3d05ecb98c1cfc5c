"""Divide a prompt into chunks (protocol=stream), and slice the model's inputs of each chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.observation import Frames
from mmkv_bench.compression.positions import last_positions, positions_after
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.facts import ModelFacts
from mmkv_bench.families.registry import check_chunks
from mmkv_bench.generation.encode import EncodedPrompt, lengths_of
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.protocols import Lengths, protocol

VIDEO = ("pixel_values_videos", "video_grid_thw")
PICTURES = ("pixel_values", "image_grid_thw")
STACKED = ("pixel_values", "pixel_attention_mask")
"""Names of model inputs: pixels and grids of a video or of pictures; for `STACKED`, pixels of frames of one size,
`[1, frames, ...]`, and their mask."""
_ROUNDING = 1e-9


class Clip(NamedTuple):
    """One chunk of a prompt: tokens `start` to `end - 1`, with frames `first` to `last - 1` (none for a text).

    A frame here is a temporal patch of a video, a picture, or a tile.
    """

    start: int
    end: int
    first: int = 0
    last: int = 0


class Reader:
    """The chunks of a prompt, with the model's inputs for each chunk.

    Args:
        prompt: the whole prompt, with the pixels of all frames.
        cell: its `stream` settings give the chunk size, and the point of the context at which the question is asked.

    Attributes:
        prompt: the context before the question, and the question.
        length: number of context tokens before the question. If the question is asked before the context's end, `length` covers
            whole chunks, and a closing token of the last frame is fed with the question.
        lengths: lengths of the attribute `prompt` under the cell's protocol.
        asked: number of chat-template tokens that are fed after each chunk and then removed.
        compact: whether kept entries get consecutive positions.
        clips: the chunks.
        positions: position ids of the attribute `prompt`, `[3, 1, T]` or `[1, T]`.

    Raises:
        UnsupportedError: several videos, pictures of several sizes, text before the last of them, or a family whose media cannot
            be read in chunks; frames that share positions, with `compact`.
        ConfigError: a chunk is not a whole number of temporal patches, or the question comes before the first chunk's end.
    """

    def __init__(self, model: Any, family: ModelFacts, prompt: EncodedPrompt, cell: CellSpec):
        settings = cell.stream
        self.compact = settings.positions == "compact"
        _check_media(family, prompt)
        self.media = next((media for media in (VIDEO, PICTURES) if media[1] in prompt.inputs), None)
        if self.media is None and prompt.visual_tokens:
            self.media = STACKED
        self.patch = int(model.config.vision_config.temporal_patch_size) if self.media == VIDEO else 1
        if settings.every is not None and settings.every % self.patch:
            raise ConfigError(
                f"stream.every={settings.every} frames are not a whole number of temporal patches of {self.patch} "
                f"frames, which {family.name} reads at once; give a multiple of {self.patch}"
            )
        chunk_patches = None if settings.every is None else settings.every // self.patch
        self.prompt, end = self._until(prompt, family, cell, chunk_patches)
        full_lengths = lengths_of(protocol(cell.protocol), self.prompt, family)
        self.lengths = full_lengths if end is None else Lengths(self.prompt.length, end, end, end)
        self.length = self.lengths.reduced
        self.positions = _positions(model, self.prompt)
        self.clips = list(self._divided(chunk_patches))
        self.frames = self._frames() if self.media else None
        self.asked = self._asked(cell)
        if self.compact and self.media:
            self._check_advance(family)

    def inputs(self, clip: Clip) -> dict[str, Tensor]:
        """Return the model's inputs for one chunk, followed by the chat template's tokens if the method needs them."""
        ids, positions = self.prompt.input_ids[:, clip.start : clip.end], self.positions[..., clip.start : clip.end]
        if self.asked:
            last_position = last_positions(self.positions[..., : clip.end], clip.end, ids.device)
            ids = torch.cat([ids, self.prompt.input_ids[:, -self.asked :]], 1)
            positions = torch.cat([positions, positions_after(last_position, 1, self.asked, 1)], -1)
        inputs = {"input_ids": ids, "position_ids": positions}
        return inputs | self._frames_of(self.prompt, clip.first, clip.last)

    def frames_left(self, cache: CompressedCache) -> str | None:
        """Return the numbers of the frames with an entry in any KV head, as text such as `0-3,8`; None for a text prompt."""
        if self.frames is None:
            return None
        stored_tokens = torch.cat([layer.slot_positions().flatten() for layer in cache.layers]).unique()
        patches = self.frames.number[stored_tokens].unique()
        frames = [int(one) * self.patch + part for one in patches if one >= 0 for part in range(self.patch)]
        return ranges(frames)

    def _asked(self, cell: CellSpec) -> int:
        """Return the number of chat-template tokens to feed after every chunk, because the scorer needs their queries."""
        scorer = cell.compressor.scorer
        if scorer is None or not scorer.asks_template:
            return 0
        if not 0 < self.prompt.template_tokens < self.prompt.length - self.length:
            raise UnsupportedError(
                f"{self.prompt.identity} has no chat template behind its question, but {cell.compressor.name} "
                "scores by the template's tokens; choose a model with a chat template, or another method"
            )
        return min(self.prompt.template_tokens, scorer.needs.tail_queries)

    def _frames_of(self, prompt: EncodedPrompt, first: int, last: int) -> dict[str, Tensor]:
        """Return the processor's tensors for frames `first` to `last - 1`: pixels and grids; {} if there are none."""
        if self.media is None or first == last:
            return {}
        pixels, name = self.media
        if self.media == STACKED:
            return {one: prompt.inputs[one][:, first:last] for one in STACKED if one in prompt.inputs}
        grid = prompt.inputs[name]
        rows = int(grid[0, 1:].prod())
        seen = grid[first:last] if self.media == PICTURES else grid.new_tensor([[last - first, *grid[0, 1:].tolist()]])
        return {pixels: prompt.inputs[pixels][first * rows : last * rows], name: seen}

    def _places(self, prompt: EncodedPrompt) -> Tensor:
        """Return the indices of the visual tokens in the prompt, int64 `[frames, tokens per frame]`."""
        assert self.media is not None, "a text has no visual tokens"
        stacked = self.media == STACKED
        count = prompt.inputs[STACKED[0]].shape[1] if stacked else int(prompt.inputs[self.media[1]][:, 0].sum())
        return (prompt.types[0] > 0).nonzero()[:, 0].view(count, -1)

    def _check_advance(self, family: ModelFacts) -> None:
        """Raise UnsupportedError unless all positions of each frame exceed those of the previous frame, on all axes."""
        token_positions = self.positions[..., 0, :].view(-1, self.prompt.length)[:, self._places(self.prompt)]
        if bool((token_positions[:, 1:].amin((0, 2)) <= token_positions[:, :-1].amax((0, 2))).any()):
            raise UnsupportedError(
                f"stream.positions=compact moves kept entries together, but the frames of {family.name}'s videos "
                "share the positions of their rows and columns; give pictures or a text, or stream.positions=kept"
            )

    def _until(
        self, prompt: EncodedPrompt, family: ModelFacts, cell: CellSpec, every: int | None
    ) -> tuple[EncodedPrompt, int | None]:
        """Return the prompt without the context that follows the question, and the number of context tokens before the question.

        The number is None if the question follows the whole context. every: frames (or tokens) of a chunk; None: one chunk.
        """
        share = cell.stream.ask_at
        visual_indices = self._places(prompt) if self.media else None
        context = lengths_of(protocol(cell.protocol), prompt, family).reduced
        total = context if visual_indices is None else len(visual_indices)
        read_units = int(total * share + _ROUNDING)  # .29 of 100 frames is 29 of them
        if read_units == total:
            return prompt, None
        read_units = 0 if every is None else read_units // every * every
        if read_units == 0:
            chunk_text = (
                "which is read all at once, as" if every is None else f"whose first chunk is {every} of {total}"
            )
            unit = "tokens" if visual_indices is None else "frames" if self.patch == 1 else "pairs of frames"
            raise ConfigError(
                f"stream.ask_at={share:g} is before the end of the first chunk of {prompt.identity}, {chunk_text} {unit}; give a "
                "larger share, or a smaller stream.every"
            )
        if visual_indices is None:
            return replace(_without(prompt, read_units, context), context_tokens=read_units), read_units
        ids, cut_start, end = (
            prompt.input_ids[0].tolist(),
            int(visual_indices[read_units - 1, -1]) + 1,
            int(visual_indices[-1, -1]) + 1,
        )
        closing = int(ids[cut_start] in family.closing_token_ids)  # 1 if every frame has its own marker
        shorter = _without(prompt, cut_start + closing, end + closing)
        return replace(shorter, inputs={**shorter.inputs, **self._frames_of(prompt, 0, read_units)}), cut_start

    def _divided(self, every: int | None) -> Iterator[Clip]:
        if self.media is None:
            step = every or self.length
            yield from (Clip(start, min(start + step, self.length)) for start in range(0, self.length, step))
            return
        visual_indices = self._places(self.prompt)
        step = every or len(visual_indices)
        firsts = [*range(0, len(visual_indices), step), len(visual_indices)]
        clip_ends = [*(int(visual_indices[first - 1, -1]) + 1 for first in firsts[1:-1]), self.length]
        for (first, last), (start, end) in zip(pairwise(firsts), pairwise([0, *clip_ends]), strict=True):
            yield Clip(start, end, first, last)

    def _frames(self) -> Frames:
        visual_indices = self._places(self.prompt)
        frame_by_token = torch.full((self.length,), -1, device=visual_indices.device)
        cell_by_token, (patches, cells) = torch.zeros_like(frame_by_token), visual_indices.shape
        frame_by_token[visual_indices] = torch.arange(patches, device=visual_indices.device)[:, None].expand(-1, cells)
        cell_by_token[visual_indices] = torch.arange(cells, device=visual_indices.device).expand(patches, -1)
        return Frames(frame_by_token, cell_by_token, cells)


def _check_media(family: ModelFacts, prompt: EncodedPrompt) -> None:
    """Raise UnsupportedError for media that cannot be prefilled in chunks."""
    if not prompt.visual_tokens:
        return
    check_chunks(family.rules)
    videos, pictures = (prompt.inputs.get(name, prompt.types[:0]) for _, name in (VIDEO, PICTURES))
    stacked = None if len(videos) or len(pictures) else prompt.inputs[STACKED[0]]
    uneven = stacked is not None and prompt.visual_tokens % stacked.shape[1] > 0
    if len(videos) > 1 or (len(videos) and len(pictures)) or len(pictures.unique(dim=0)) > 1 or uneven:
        raise UnsupportedError(
            f"{prompt.identity} has several videos, pictures beside a video, or pictures of several sizes; "
            "allowed for protocol=stream: one video, or pictures of one size; give such a prompt, or use "
            "protocol=query_agnostic"
        )
    if prompt.question_text_before_cut:
        raise UnsupportedError(
            f"{prompt.identity} has {prompt.question_text_before_cut} tokens of text before its last frame, but a "
            "stream's question comes after it; put the text after the video or the pictures, or use "
            "protocol=query_agnostic"
        )


def _without(prompt: EncodedPrompt, first: int, last: int) -> EncodedPrompt:
    """Return the prompt without tokens `first` to `last - 1`."""

    def cut(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:, :first], tensor[:, last:]], 1)

    shape = prompt.input_ids.shape
    inputs = {name: cut(one) if one.shape == shape else one for name, one in prompt.inputs.items()}
    return replace(prompt, inputs=inputs, types=cut(prompt.types))


def _positions(model: Any, prompt: EncodedPrompt) -> Tensor:
    if not prompt.visual_tokens or not hasattr(model.model, "get_rope_index"):
        return torch.arange(prompt.length, device=prompt.input_ids.device)[None]
    names = (VIDEO[1], PICTURES[1], "second_per_grid_ts")
    rope_inputs = {name: prompt.inputs[name] for name in names if name in prompt.inputs}
    positions: Tensor = model.model.get_rope_index(prompt.input_ids, mm_token_type_ids=prompt.types, **rope_inputs)[0]
    return positions


def ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text with ranges, such as `0-3,8`."""
    ranges_found: list[list[int]] = []
    for number in numbers:
        if ranges_found and number == ranges_found[-1][1] + 1:
            ranges_found[-1][1] = number
        else:
            ranges_found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges_found)
