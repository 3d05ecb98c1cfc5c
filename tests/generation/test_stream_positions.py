"""Promise: stream.positions=compact gives what a cache of unrotated keys gives, rotated at consecutive positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmkv_bench.compression.compaction import check_rope
from mmkv_bench.compression.session import Session
from mmkv_bench.compression.streaming import StreamListener
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation.encode import from_tensors
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.stream_reader import Reader
from mmkv_bench.generation.stream_reading import read
from tests import cover, zoo
from tests.each import each
from tests.generation import common
from tests.generation.test_questions import asked, document
from tests.generation.test_stream import answer, cell, text, video

CAP, EVERY = 20, 7


def compact(spec):
    return replace(spec, cell=spec.cell + "/compact", stream=replace(spec.stream, positions="compact"))


class Watched(StreamListener):
    """Listener that writes down which tokens stay: chunk by chunk, layer by layer, int64 `[Hkv, m]`."""

    def layer_full(self, prompt, layer, observation):
        super().layer_full(prompt, layer, observation)
        self.__dict__.setdefault("kept", {})[prompt.cache.layers[layer].seen, layer] = prompt.cache.layers[
            layer
        ].slot_positions()[0]


def stream(name: str, prompt, spec):
    """The cache, the logits behind the stream, the kept tokens by chunk and layer, and the reader."""
    model = zoo.model(name)
    reader = Reader(model, common.family(name), prompt, spec)
    listener = Watched(spec.compressor, spec.entries(prompt.length), spec.seed, reader.frames, 40)
    with Session(model) as session:
        cache, logits = read(session, reader, listener, Meter(model.device))
    return cache, logits, listener.kept, reader


# ---------------------------------------------------------------------- text: a model written again
def turned(x: Tensor, places: Tensor) -> Tensor:
    """Rotate `[..., D]` at real positions `[...]`, as complex numbers of pairs i and i + D/2."""
    half = x.shape[-1] // 2
    angle = places[..., None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1)


def rewritten(model, ids: list[int], ends: list[int], kept: dict, numbered: bool) -> Tensor:
    """Logits of the last token of a llama in float64 that caches unrotated keys.

    numbered: the entries of a head are numbered from 0 in every forward, and the newest tokens follow them, as StreamingLLM
    does; else they are rotated at their places in the stream.
    """
    config, stored = model.config, {}
    with torch.no_grad():
        weight = {name: tensor.double() for name, tensor in model.named_parameters()}

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight[name]

    for start, end in zip([0, *ends], ends, strict=False):
        x = weight["model.embed_tokens.weight"][ids[start:end]]
        for layer in range(config.num_hidden_layers):
            part = f"model.layers.{layer}."
            y = norm(x, part + "input_layernorm.weight")
            query, key, value = (
                (y @ weight[part + f"self_attn.{one}_proj.weight"].T).view(end - start, -1, config.head_dim)
                for one in "qkv"
            )
            outs, group = [], query.shape[1] // key.shape[1]
            for head in range(key.shape[1]):
                keys, values, tokens = stored.get((layer, head), (key[:0, head], value[:0, head], torch.empty(0)))
                keys, values = torch.cat([keys, key[:, head]]), torch.cat([values, value[:, head]])
                tokens = torch.cat([tokens, torch.arange(start, end)])
                places = torch.arange(len(keys)) if numbered else tokens
                seen = tokens[None] <= torch.arange(start, end)[:, None]
                for number in range(head * group, (head + 1) * group):
                    scores = turned(query[:, number], places[-(end - start) :]) @ turned(keys, places).T
                    scores = (scores / config.head_dim**0.5).masked_fill(~seen, -torch.inf)
                    outs.append(scores.softmax(-1) @ values)
                if (end, layer) in kept:
                    stays = torch.isin(tokens, kept[end, layer][head])
                    keys, values, tokens = keys[stays], values[stays], tokens[stays]
                stored[layer, head] = keys, values, tokens
            x = x + torch.cat(outs, -1) @ weight[part + "self_attn.o_proj.weight"].T
            y = norm(x, part + "post_attention_layernorm.weight")
            gate, up, down = (weight[part + f"mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
            x = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return norm(x[-1], "model.norm.weight") @ weight["lm_head.weight"].T


@pytest.mark.slow
@each("method", ["streamingllm", "reservoir", "keydiff", "h2o"], keep=2)
def test_a_text_answers_as_from_unrotated_keys_numbered_in_the_cache(method):
    model, prompt = zoo.model("llama"), text(90, 80, 3)
    ids = prompt.input_ids[0].tolist()
    for positions in ("kept", "compact"):
        spec = cell(method, CAP, every=EVERY)
        spec = compact(spec) if positions == "compact" else spec
        _, logits, kept, reader = stream("llama", prompt, spec)
        ends = [clip.end for clip in reader.clips]
        wanted = [rewritten(model, ids, ends, kept, numbered) for numbered in (False, True)]
        same, other = wanted if positions == "kept" else wanted[::-1]
        assert (logits.double() - same).abs().max() < 2e-4, positions
        assert (logits.double() - other).abs().max() > 1e-2, positions


@pytest.mark.slow
def test_a_questions_answer_and_every_path_follow_the_moved_entries():
    prompt, cells = text(90, 80, 3), [compact(cell(method, CAP, every=EVERY)) for method in ("reservoir", "keydiff")]
    model, results = zoo.model("llama"), answer("llama", prompt, *cells)
    common.assert_same(results, common.alone(model, "llama", prompt, cells), ignore=common.PATH)
    for spec, result in zip(cells, results, strict=True):
        _, _, kept, reader = stream("llama", prompt, spec)
        ends, ids = [clip.end for clip in reader.clips], prompt.input_ids[0].tolist()
        for place, token in enumerate(result.token_ids):
            given = ids + result.token_ids[:place]
            assert int(rewritten(model, given, [*ends, len(given)], kept, True).argmax()) == token


# ---------------------------------------------------------------------- frames: three axes
def pictures(name: str, count: int, seed: int = 0):
    """A prompt with `count` pictures of 2 x 4 tokens."""
    drawn = torch.Generator().manual_seed(seed)
    size = 16 if name.startswith("qwen3") else 14
    segments, tensors = zoo._grid(size, zoo.IMAGE, [[1, 4, 8]] * count)(drawn)
    ids = zoo.text(5, 1) + [one for segment in segments for one in segment] + zoo.text(9, 3)
    return from_tensors(f"pictures/{seed}", zoo.inputs_of(name, ids, tensors), common.family(name))


PROMPTS = {
    "qwen2_5_vl": lambda: pictures("qwen2_5_vl", 6),
    "qwen3_vl": lambda: pictures("qwen3_vl", 6),
    "qwen3_vl_video": lambda: video("qwen3_vl_video"),
}


@each("name", PROMPTS)
def test_first_layer_keys_of_frames_are_those_of_the_positions_that_are_left(name):
    model, prompt, first = zoo.model(name), PROMPTS[name](), []
    attention = model.get_decoder().layers[0].self_attn
    proj = attention.k_norm if hasattr(attention, "k_norm") else attention.k_proj
    hook = proj.register_forward_hook(lambda _, args, output: first.append(output[0].detach()))
    with hook:
        cache, _, _, reader = stream(name, prompt, compact(cell("reservoir", CAP, every=2)))
    heads, width = 2, attention.head_dim
    keys = torch.cat(first).view(-1, heads, width).transpose(0, 1)
    positions, newest = reader.positions[:, 0, : reader.length], int(reader.positions[..., : reader.length].max())
    moved = 0
    for head, tokens in enumerate(cache.layers[0].slot_positions()[0]):
        at = [tuple(positions[:, token].tolist()) for token in tokens]
        values = sorted({one for place in at for one in place})
        at = torch.tensor([[newest - len(values) + 1 + values.index(one) for one in place] for place in at]).T
        cos, sin = model.get_decoder().rotary_emb(torch.zeros(1), at[:, None])
        key = keys[head, tokens]
        half = torch.cat([-key[:, width // 2 :], key[:, : width // 2]], -1)
        assert (key * cos[0] + half * sin[0] - cache.layers[0].keys[0, head]).abs().max() < 1e-4
        moved += int((at != positions[:, tokens]).sum())
        for axis in range(3):  # neighbours of a picture stay neighbours
            steps = positions[axis, tokens].diff()
            assert bool((at[axis].diff()[(steps == 1) | (steps == 0)] == steps[(steps == 1) | (steps == 0)]).all())
    assert moved > 0


def test_what_does_not_move_stays_bit_for_bit():
    prompt = text(90, 80, 3)
    spec = cell("streamingllm", CAP, every=EVERY)
    one, _, _, _ = stream("llama", prompt, spec)
    other, _, _, _ = stream("llama", prompt, compact(spec))
    assert torch.equal(one.layers[0].keys[:, :, -1], other.layers[0].keys[:, :, -1])
    assert not torch.equal(one.layers[0].keys[:, :, 0], other.layers[0].keys[:, :, 0])  # a sink comes nearer
    full = [cell("full", protocol="stream"), compact(cell("full"))]
    common.assert_same(*([one] for one in answer("llama", prompt, *full)), ignore={"cell"})


@each("name", ["qwen2_vl", "qwen2_5_vl_video"])
def test_frames_that_share_positions_are_refused(name):
    (one,) = common.together(zoo.model(name), name, video(name), [compact(cell("reservoir"))])
    assert (
        one.status == "error" and "share the positions of their rows and columns" in one.error and ". " not in one.error
    )


def test_frequencies_that_follow_the_length_are_refused():
    config = zoo.model("llama").config
    check_rope(config)
    changed = type(config)(
        **{**config.to_dict(), "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    )
    with pytest.raises(UnsupportedError, match="rope_type=dynamic.*positions=kept"):
        check_rope(changed)


# ---------------------------------------------------------------------- pictures
@pytest.mark.slow
@each("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_prompts_one_size_are_read_one_by_one(name):
    prompt = pictures(name, 6)
    reader = Reader(zoo.model(name), common.family(name), prompt, cell(every=2))
    assert [(clip.first, clip.last) for clip in reader.clips] == [(0, 2), (2, 4), (4, 6)]
    one, other = answer(name, prompt, cell("full", every=2), cell("full", protocol="query_agnostic"))
    assert one.token_ids == other.token_ids and one.frames_left == "0-5"
    one, other = answer(name, prompt, cell("keydiff", every=None), cell("keydiff", protocol="query_agnostic"))
    assert (one.token_ids, one.kept_digest) == (other.token_ids, other.kept_digest)
    (early,) = answer(name, prompt, cell("full", every=1, ask_at=0.5))
    (short,) = answer(name, pictures(name, 3), cell("full", every=1))
    assert early.context_tokens == short.context_tokens - 1, "what closes the last picture is fed with the question"
    assert early.prompt_tokens == short.prompt_tokens and early.frames_left == "0-2"


# ---------------------------------------------------------------------- several questions about a stream
@pytest.mark.slow
@cover.shares(3)
def test_the_questions_about_a_stream_are_asked_of_one_reading_of_it(share):
    """Streams of one document are read once; no row depends on which questions were asked before."""
    name, prompts = "llama", document("llama")
    cells = [cell("full"), *(cell(method, 8, every=3) for method in ("reservoir", "h2o"))]
    cells.append(compact(cells[2]))
    forward = asked(name, prompts, cells)
    for spec in cells:
        rows = [forward[number, spec.cell] for number in range(4)]
        assert [row.compression_reused for row in rows] == [False, True, True, True]
        assert len({row.kept_digest for row in rows}) == 1 and {row.question_known for row in rows} == {"none"}
        assert len({tuple(row.token_ids) for row in rows}) > 1
    for key, one in asked(name, prompts, cells, (3, 0, 2, 1)).items():
        common.assert_same([one], [forward[key]], ignore=common.PATH | {"compression_reused"})
    # sharing=off reads it for each question, with the document's random stream
    for number, prompt in cover.turn(enumerate(prompts), 1, share):
        alone = common.alone(zoo.model(name), name, prompt, cells)
        shared = [forward[number, spec.cell] for spec in cells]
        common.assert_same(shared, alone, ignore=common.PATH | {"compression_reused"})
