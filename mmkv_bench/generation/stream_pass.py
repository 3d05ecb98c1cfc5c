"""One prefill in chunks (protocol=stream) with one method, to record memory peaks; `forecast/dry_run.py` simulates it."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.positions import last_positions, positions_after
from mmkv_bench.compression.session import Session
from mmkv_bench.compression.streaming import StreamListener, check_streams
from mmkv_bench.families.facts import model_facts
from mmkv_bench.generation.encode import EncodedPrompt
from mmkv_bench.generation.one_pass import FIRST, SELECT, Peaks
from mmkv_bench.generation.prefill import slack
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.generation.stream_reader import Reader
from mmkv_bench.generation.stream_reading import read
from mmkv_bench.protocols import StreamSettings

_QUESTION, _TEMPLATE = 9, 8
"""Assumed number of question tokens at the prompt's end, and how many of these belong to the chat template."""


@torch.no_grad()
def run(
    model: PreTrainedModel,
    ids: Tensor,
    types: Tensor,
    compressor: Compressor,
    budget: Budget | None,
    peaks: Peaks,
    chunk: int,
    reserve: int = 32,
) -> CompressedCache:
    """Prefill a text prompt in chunks of `chunk` tokens, feed the question, and record memory peaks per phase in `peaks`.

    Args:
        ids, types: int `[1, T]`; `types` are all 0.
        reserve: spare slots for the answer's tokens.

    Returns:
        The cache after the question. Raises the errors of `check_streams`.
    """
    check_streams(compressor, budget)
    context = ids.shape[1] - _QUESTION
    prompt = EncodedPrompt("phases", {"input_ids": ids}, types, context_tokens=context, template_tokens=_TEMPLATE)
    cell = CellSpec("phases", compressor, budget, "stream", stream=StreamSettings(chunk))
    reader = Reader(model, model_facts(model.config), prompt, cell)
    reserve_slots = reader.asked + max(chunk, slack(reserve, _QUESTION))
    cap = None if budget is None else cell.entries(context)

    def phases(name: str) -> AbstractContextManager[None]:
        return peaks.phase(SELECT if name == "compress" else name)

    with Session(model) as session:
        cache, _ = read(
            session, reader, StreamListener(compressor, cap, 0, None, reserve_slots, reader.asked, phases), peaks
        )
        last_position = last_positions(reader.positions[..., :context], context, ids.device)
        question_inputs = {
            "input_ids": ids[:, context:],
            "position_ids": positions_after(last_position, 1, _QUESTION, 1).contiguous(),
        }
        with peaks.phase(FIRST):
            model(**question_inputs, past_key_values=cache, use_cache=True, logits_to_keep=1, return_dict=True)
    return cache
