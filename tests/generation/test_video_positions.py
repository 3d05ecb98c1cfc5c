"""Positions of tokens that are fed behind a video, against those of the stock model's own `generate`."""

from __future__ import annotations

from dataclasses import replace

import torch

from mmkv_bench.compression.compressor import full
from mmkv_bench.generation.encode import from_tensors
from mmkv_bench.protocols import StreamSettings
from tests import zoo
from tests.each import each
from tests.generation import common

NAME = "qwen2_5_vl_video"
PROTOCOLS = ("paper", "strict", "query_agnostic", "query_aware", "stream", "masked")


def prompt(patches: int, question: int):
    """A video of `patches` pairs of frames, 8 tokens each, and a question; its time goes 4 positions further with each pair."""
    segments, tensors = zoo._grid(14, zoo.VIDEO, [[patches, 4, 8]])(torch.Generator().manual_seed(patches))
    ids = zoo.text(5, 1) + [one for segment in segments for one in segment] + zoo.text(question, 3)
    return from_tensors(f"video/{patches}", zoo.inputs_of(NAME, ids, tensors), common.family(NAME))


def stock(model, asked, tokens: int):
    """The answer of `generate`, and the position of each token that it was fed, `[3, n]`."""
    seen = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"][-3:, 0]), with_kwargs=True
    )
    try:
        inputs = {**asked.inputs, "attention_mask": torch.ones_like(asked.input_ids)}
        made = model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    finally:
        handle.remove()
    return made[0, asked.length :].tolist(), torch.cat(seen, -1)


@each("patches, question", [(6, 3), (6, 30), (2, 5)])  # time ends behind the question, inside it, before it
def test_whatever_is_fed_again_behind_a_video_stands_where_generate_puts_it(patches, question):
    model, asked = zoo.model(NAME), prompt(patches, question)
    rules = replace(common.rules(model), eos=())
    expected, positions = stock(model, asked, rules.max_new_tokens)
    late = int(positions[0, : asked.length].max()) - int(positions[0, asked.length - 1])
    assert (late > 0) == (question == 3), "else the first case tests nothing"
    for name in PROTOCOLS:
        fed = []
        handle = model.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs, fed=fed: fed.append(kwargs["position_ids"][-3:, 0]), with_kwargs=True
        )
        try:
            spec = replace(common.cell(full(), None, name), stream=StreamSettings(4) if name == "stream" else None)
            (row,) = common.together(model, NAME, asked, [spec], decode_rules=rules)
        finally:
            handle.remove()
        assert (row.status, row.error) == ("ok", None) and row.token_ids == expected
        end = slice(-rules.max_new_tokens, None)  # the prompt's last token, and the answer's but its last
        assert torch.equal(torch.cat(fed, -1)[:, end], positions[:, end])
