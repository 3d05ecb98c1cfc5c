"""protocol=stream: equal to a prefill of the same chunks, never above the cap, and refused in one sentence elsewhere."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch

from mmkv_bench import attach
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.compressor import full
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.positions import last_positions
from mmkv_bench.compression.session import Session
from mmkv_bench.compression.streaming import StreamListener
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation.encode import EncodedPrompt, from_tensors
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.generation.stream_reader import Clip, Reader, ranges
from mmkv_bench.generation.stream_reading import read
from mmkv_bench.methods.build import build_compressor
from mmkv_bench.protocols import StreamSettings
from tests import cover, zoo
from tests.each import each
from tests.generation import common
from tests.second_device import far, second_device, there

VIDEOS = ("qwen2_vl", "qwen2_5_vl_video", "qwen3_vl_video")
STREAMED = (
    "even_frames",
    "expected_attention",
    "h2o",
    "infinipot_v",
    "keydiff",
    "last_query",
    "mmshift",
    "random",
    "reservoir",
    "streamingllm",
)


@functools.cache
def video(name: str, patches: int = 6, seed: int = 0, before: int = 5) -> EncodedPrompt:
    """A prompt with one video of `patches` pairs of frames, 8 tokens each."""
    drawn, qwen3 = torch.Generator().manual_seed(seed), name.startswith("qwen3")
    segments, tensors = zoo._grid(16 if qwen3 else 14, zoo.VIDEO, [[patches, 4, 8]])(drawn)
    if qwen3:  # a time and markers around each pair
        pair = [zoo.VISION_START, *[zoo.VIDEO] * 8, zoo.VISION_END]
        segments = [zoo.text(2, 90 + place) + pair for place in range(patches)]
    ids = zoo.text(before, 1) + [one for segment in segments for one in segment] + zoo.text(9, 3)
    return from_tensors(f"zoo/{seed}", zoo.inputs_of(name, ids, tensors), common.family(name))


def text(length: int, context: int, seed: int = 0) -> EncodedPrompt:
    made = from_tensors(f"text/{seed}", zoo.inputs_of("llama", zoo.text(length, seed)), common.family("llama"))
    return replace(made, context_tokens=context)


def cell(method="keydiff", cap: int | None = 20, protocol: str = "stream", every=4, ask_at=1.0, seed=0) -> CellSpec:
    made = full() if method == "full" else common.registry()[method]
    spec = common.cell(made, None if method == "full" else cap, protocol, seed, f"{method}/{protocol}/{every}/{ask_at}")
    return replace(spec, keep_indices=True, stream=StreamSettings(every, ask_at))


def answer(name: str, prompt: EncodedPrompt, *cells: CellSpec):
    results = common.together(zoo.model(name), name, prompt, cells)
    assert [one.status for one in results] == ["ok"] * len(cells), [one.error for one in results]
    return results


def cache_of(name: str, prompt: EncodedPrompt, spec: CellSpec):
    """Cache and logits of a stream, and its reader."""
    model = zoo.model(name)
    reader = Reader(model, common.family(name), prompt, spec)
    cap = None if spec.budget is None else spec.entries(prompt.length)
    listener = StreamListener(spec.compressor, cap, spec.seed, reader.frames, 16, reader.asked)
    with Session(model) as session:
        return *read(session, reader, listener, Meter(model.device)), reader


# ---------------------------------------------------------------------- equal to a prefill
@each("name", VIDEOS)
def test_a_cap_that_is_never_reached_equals_a_prefill_of_the_same_chunks_bit_for_bit(name):
    model, prompt = zoo.model(name), video(name)
    cache, logits, reader = cache_of(name, prompt, cell(cap=prompt.length))
    assert [clip.last - clip.first for clip in reader.clips] == [2, 2, 2]
    with Session(model) as session, torch.no_grad():
        stock = session.new_cache()
        for clip in reader.clips:
            output = model(**reader.inputs(clip), past_key_values=stock, use_cache=True, logits_to_keep=1)
    assert type(stock) is CompressedCache and torch.equal(output.logits[0, -1], logits)
    for one, other in zip(cache.layers, stock.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


@each("name", VIDEOS)
def test_chunks_change_no_logit_and_no_position_of_a_prefill_at_once(name):
    model, prompt = zoo.model(name), video(name)
    cache, logits, reader = cache_of(name, prompt, cell(cap=prompt.length))
    with Session(model) as session, torch.no_grad():
        whole = prompt.context(reader.length)
        output = model(**whole.inputs, past_key_values=session.new_cache(), use_cache=True, logits_to_keep=1)
        positions = session.position_ids
    assert (output.logits[0, -1] - logits).abs().max() < 1e-4
    assert torch.equal(positions[-3:], reader.positions[..., : reader.length])
    last = last_positions(positions, whole.length, logits.device)
    assert torch.equal(last[-3:], last_positions(reader.positions[..., : reader.length], whole.length, logits.device))


@cover.shares(3)
@each("place, name", enumerate(VIDEOS))
def test_one_chunk_keeps_and_answers_what_query_agnostic_does(place, name, share):
    of_a_stream = {"even_frames", "infinipot_v"}  # which are told the frames by a stream alone
    for method in cover.turn([one for one in STREAMED if one not in of_a_stream], place, share):
        once, agnostic = cell(method, every=None), cell(method, protocol="query_agnostic")
        one, other = answer(name, video(name), once, agnostic)
        same = (
            "token_ids",
            "kept_digest",
            "kept_indices",
            "kept",
            "entries_end",
            "bytes_device",
            "context_tokens",
            "fallback",
        )
        assert {key: getattr(one, key) for key in same} == {key: getattr(other, key) for key in same}, method
        assert (one.entries_max, one.entries_peak, one.eviction_rounds) == (20, one.context_tokens, 1)


def test_one_eviction_after_several_chunks_keeps_what_query_agnostic_keeps():
    prompt = video("qwen2_5_vl_video")
    cap = prompt.length - 9 - 2  # two entries below the context: only the last chunk is over it
    for method in ("keydiff", "h2o", "expected_attention", "last_query", "streamingllm"):
        one, other = answer("qwen2_5_vl_video", prompt, cell(method, cap), cell(method, cap, "query_agnostic"))
        assert one.kept_indices == other.kept_indices and one.eviction_rounds == 1, method


@each("name", VIDEOS)
def test_full_answers_as_under_query_agnostic(name):
    one, other = answer(name, video(name), cell("full"), cell("full", protocol="query_agnostic"))
    assert one.token_ids == other.token_ids and one.entries_evicted == 0 and one.frames_left == "0-11"


@each("name", VIDEOS, keep=1)
def test_both_paths_and_every_order_give_the_same_rows(name):
    cells, prompt = [cell(method) for method in STREAMED], video(name)
    results = answer(name, prompt, *cells)
    again = answer(name, prompt, *reversed(cells))[::-1]
    common.assert_same(results, again)
    common.assert_same(results, common.alone(zoo.model(name), name, prompt, cells), ignore=common.PATH)
    mixed = answer(name, prompt, cell("keydiff", protocol="paper"), cells[2], cell("full", protocol="query_agnostic"))
    common.assert_same([mixed[1]], [results[2]])


@pytest.mark.slow
@cover.shares(5)
def test_streams_are_read_on_a_second_device_as_on_the_cpu(share):
    methods = cover.turn(STREAMED, 0, share)
    name, cells = "qwen3_vl_video", [cell("full"), *(cell(method, ask_at=0.7) for method in methods)]
    expected = answer(name, video(name), *cells)
    with second_device():
        found = common.together(there(zoo.model(name)), name, far(video(name)), cells)
    common.assert_same(found, expected)


# ---------------------------------------------------------------------- the cap
@pytest.mark.slow
@each("number", range(300), keep=25)
def test_the_cap_holds_in_every_step_of_300_random_streams(number):
    drawn, methods = random.Random(f"stream {number}"), list(STREAMED)
    model, family = zoo.model("llama"), common.family("llama")

    class Watched(StreamListener):
        def layer_full(self, prompt, layer, observation):
            before = prompt.cache.layers[layer].entries()
            super().layer_full(prompt, layer, observation)
            after = prompt.cache.layers[layer]
            assert int(after.entries().max()) == self.cap and int(before.max()) <= self.cap + self.chunk
            places = after.slot_positions()
            assert bool((places[..., 1:] > places[..., :-1]).all()) and int(places.max()) < after.seen

    with Session(model) as session:
        every, context = drawn.randint(1, 24), drawn.randint(2, 90)
        spec = cell(drawn.choice(methods), drawn.randint(8, 40), every=every, seed=number)
        prompt = text(context + 3, context, number)
        reader = Reader(model, family, prompt, spec)
        listener = Watched(spec.compressor, spec.entries(context), number, None, every)
        listener.chunk = every
        cache, _ = read(session, reader, listener, Meter(model.device))
        assert {layer.stored for layer in cache.layers} == {min(context, spec.entries(context))}
        assert listener.entries_max <= spec.entries(context) and {layer.seen for layer in cache.layers} == {context}


def built(name: str, **parameters):
    """A shipped method with other parameters."""
    (node,) = method_defaults([name]).values()
    return build_compressor(name, {**node, **parameters}, "paper")


@each("every", [3, 8, 20])
def test_an_observation_window_is_that_of_the_last_tokens_however_small_the_chunks(every):
    windows = []

    class Watched(StreamListener):
        def layer_full(self, prompt, layer, observation):
            last = torch.arange(prompt.cache.layers[layer].seen)[-8:]
            view = observation.stream_view(prompt.cache.layers[layer].slot_positions()[0], None)
            assert bool((view.tokens[:, -8:] == last).all())
            assert torch.allclose(view.window_mass(8).sum(-1), torch.ones(2), atol=1e-5)
            windows.append(view.tail(8).shape[1])
            super().layer_full(prompt, layer, observation)

    model, prompt = zoo.model("llama"), text(80, 70)
    spec = replace(cell(every=every), compressor=built("snapkv", window=8))
    reader = Reader(model, common.family("llama"), prompt, spec)
    with Session(model) as session:
        read(session, reader, Watched(spec.compressor, 20, 0, None, every), Meter(model.device))
    assert set(windows) == {8}


def test_without_sinks_and_with_the_budget_of_a_chunk_streamingllm_is_the_last_chunk_alone():
    prompt = video("qwen2_5_vl_video")
    spec = replace(cell("streamingllm", cap=17), compressor=built("streamingllm", sinks=0))
    (one,) = answer("qwen2_5_vl_video", prompt, spec)
    assert one.frames_left == "8-11" and one.entries_max == 17  # two pairs of 8 tokens and the closing marker


def test_rows_count_what_was_evicted():
    (one,) = answer("qwen2_5_vl_video", video("qwen2_5_vl_video"), cell("streamingllm", every=2))
    heads = zoo.LAYERS * 2
    assert one.entries_max == 20 and one.entries_peak <= 20 + 14 and one.eviction_rounds == 5
    assert one.entries_evicted == (one.context_tokens - 20) * heads and one.entries_resident == 20 * heads
    assert one.frames_left == "8-11"  # 4 sinks are text, then the closing marker and 15 tokens of two pairs
    assert ranges([]) == "" and ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_repeated_draws_of_a_stream_differ_from_round_to_round():
    (one,) = answer("qwen2_5_vl_video", video("qwen2_5_vl_video"), cell("random", every=2))
    (other,) = answer("qwen2_5_vl_video", video("qwen2_5_vl_video"), cell("random", every=2, seed=1))
    assert one.kept_digest != other.kept_digest


# ---------------------------------------------------------------------- the template's tokens
class Scored:
    """A listener that scores every layer by its last four queries and compresses nothing."""

    needs = Needs(tail_queries=4)

    def __init__(self):
        self.scores = []

    def layer_done(self, prompt, layer, observations):
        self.scores.append(observations[0].window_mass(4))

    def prompt_done(self, prompt):
        pass


@each("name", ["llama", "qwen2_5_vl_video"])
def test_the_templates_tokens_are_asked_behind_the_context_and_forgotten(name):
    prompt = replace(text(50, 40) if name == "llama" else video(name), template_tokens=4)
    spec = cell("generic_query", every=None)
    cache, _, reader = cache_of(name, prompt, spec)
    assert reader.asked == 4 and {layer.seen for layer in cache.layers} == {reader.length}
    model, scored = zoo.model(name), Scored()
    with Session(model, scored) as session, torch.no_grad():  # the context, then the template in the question's place
        model(**reader.inputs(reader.clips[0]), past_key_values=session.new_cache(), use_cache=True)
    for layer, score in zip(cache.layers, scored.scores, strict=True):
        (wanted,) = spec.compressor.select([score[:, : reader.length]], 20, None, [0], 1)
        assert torch.equal(layer.slot_positions()[0], wanted)


def test_asking_the_template_changes_no_entry_of_the_stream():
    prompt = replace(video("qwen2_5_vl_video"), template_tokens=4)
    asked, _, _ = cache_of("qwen2_5_vl_video", prompt, cell("generic_query", prompt.length))
    plain, _, _ = cache_of("qwen2_5_vl_video", prompt, cell("keydiff", prompt.length))
    for one, other in zip(asked.layers, plain.layers, strict=True):
        assert one.stored == other.stored and (one.keys - other.keys).abs().max() < 1e-4
    (row,) = answer("qwen2_5_vl_video", prompt, cell("generic_query"))
    assert row.entries_max == 20 and row.entries_peak <= 20 + 22 + 4 and row.eviction_rounds == 3


def test_a_text_is_read_in_chunks_of_tokens():
    prompt = text(60, 50)
    reader = Reader(zoo.model("llama"), common.family("llama"), prompt, cell(every=16))
    assert reader.clips == [Clip(0, 16), Clip(16, 32), Clip(32, 48), Clip(48, 50)] and reader.prompt.length == 60
    one, other = answer("llama", prompt, cell(every=None), cell(protocol="query_agnostic"))
    assert (one.token_ids, one.kept_digest, one.frames_left) == (other.token_ids, other.kept_digest, None)


# ---------------------------------------------------------------------- bad input
BAD = {
    "pictures": ("qwen2_5_vl", lambda: common.encoded("qwen2_5_vl"), {}, "or pictures of several sizes"),
    "text first": (
        "qwen2_5_vl_video",
        lambda: replace(video("qwen2_5_vl_video"), question_text_before_cut=4),
        {},
        "4 tokens of text before its last frame",
    ),
    "odd frames": ("qwen2_5_vl_video", lambda: video("qwen2_5_vl_video"), {"every": 3}, "give a multiple of 2"),
    "another family": ("llava_onevision_video", lambda: common.encoded("llava_onevision_video"), {}, "Qwen2-VL"),
    "a fraction": ("llama", lambda: text(40, 30), {"cap": "20%"}, "whose length is unknown"),
    "a small cap": ("llama", lambda: text(40, 30), {"method": "snapkv"}, "budget=64 or more"),
    "sinks": ("llama", lambda: text(40, 30), {"method": "streamingllm", "cap": 4}, "budget=5 or more"),
    "no template": ("llama", lambda: text(40, 30), {"method": "generic_query"}, "no chat template behind its question"),
    "no question": ("llama", lambda: text(30, 30), {}, "needs a question after it"),
    "decode policy": ("llama", lambda: text(40, 30), {"method": "local"}, "acts while the answer is decoded"),
    "the answer": ("llama", lambda: text(40, 30), {"method": "oracle"}, "scores by the answer"),
    "heads": ("llama", lambda: text(40, 30), {"method": "adakv"}, "gives some layers or heads more"),
    "merging": ("llama", lambda: text(40, 30), {"method": "look_m"}, "merges evicted entries"),
    "types": ("llama", lambda: text(40, 30), {"method": "madakv"}, "the types of its tokens"),
    "all queries": ("llama", lambda: text(40, 30), {"method": "meda"}, "all queries of the prompt"),
}


@each("case", BAD)
def test_what_is_no_stream_is_refused_in_one_sentence(case):
    name, prompt, settings, words = BAD[case]
    (one,) = common.together(zoo.model(name), name, prompt(), [cell(**settings)])
    assert one.status == "error" and words in one.error and ". " not in one.error


def test_attach_refuses_a_stream():
    with pytest.raises(UnsupportedError, match="attach cannot run protocol"):
        attach(zoo.model("llama"), "keydiff", 20, protocol="stream")
