"""Questions at several places of one stream: it is read once, and neither questions nor other places change any of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmkv_bench.compression.session import Session
from mmkv_bench.compression.streaming import StreamListener
from mmkv_bench.devices import device as clocks
from mmkv_bench.generation import decode, stream, stream_reader, stream_reading
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.stream_reader import Reader
from mmkv_bench.generation.stream_reading import read
from tests import zoo
from tests.each import each
from tests.generation import common, faulty
from tests.generation.test_questions import document
from tests.generation.test_stream import VIDEOS, answer, cell, text, video
from tests.generation.test_stream_positions import compact, pictures

PROMPTS = {
    **{name: (name, lambda name=name: video(name), 2) for name in VIDEOS},
    "pictures": ("qwen2_5_vl", lambda: pictures("qwen2_5_vl", 6), 1),
    "smolvlm": ("smolvlm", lambda: common.encoded("smolvlm"), 2),
    "text": ("llama", lambda: text(60, 50), 8),
}
PLACES = (0.4, 0.7, 1.0)
METHODS = ("full", "h2o", "keydiff", "random", "reservoir")


def stopping(name: str, every: int, **more) -> list:
    """Cells of every method for a text, of `full` and one other in turn elsewhere; moved entries with two of them."""
    methods = METHODS if name == "text" else ("full", METHODS[1 + sorted(PROMPTS).index(name) % 4])
    made = [cell(method, every=every, ask_at=place, **more) for method in methods for place in PLACES]
    return made + [compact(one) for one in made[: 2 * len(PLACES)] if name in ("pictures", "text")]


def long_forwards(model) -> tuple[list[int], object]:
    """Tokens of every forward of more than one, from now on, and the hook that counts them."""
    lengths: list[int] = []

    def before(module, args, kwargs):
        lengths.append(kwargs["inputs_embeds" if kwargs.get("input_ids") is None else "input_ids"].shape[1])

    return lengths, model.get_decoder().register_forward_pre_hook(before, with_kwargs=True)


@pytest.mark.slow
@each("kind", PROMPTS, keep=3)
def test_places_share_one_reading_and_have_the_rows_of_a_stream_that_ends_there(kind):
    name, prompt, every = PROMPTS[kind][0], PROMPTS[kind][1](), PROMPTS[kind][2]
    model, cells = zoo.model(name), stopping(kind, every)
    lengths, hook = long_forwards(model)
    together = answer(name, prompt, *cells)
    hook.remove()
    whole = Reader(model, common.family(name), prompt, cells[len(PLACES) - 1])
    readings = len(cells) // len(PLACES)
    fed = [row.prompt_tokens - row.context_tokens for row in together]
    assert sum(length for length in lengths if length > 1) == readings * whole.length + sum(fed)
    alone = [common.together(model, name, prompt, [one])[0] for one in cells]
    common.assert_same(together, alone)
    common.assert_same(together, common.alone(model, name, prompt, cells), ignore=common.PATH)
    shares = [row.context_tokens / whole.length for row in together[: len(PLACES)]]
    assert [row.ask_at for row in together[: len(PLACES)]] == [*PLACES] and shares[2] == 1
    lead = 0.05  # places count frames, and text before the first of them is read as well
    assert (
        all(0 < share <= place + lead for share, place in zip(shares[:2], PLACES, strict=False))
        and shares[0] < shares[1]
    )


@pytest.mark.slow
@each("kind", sorted(PROMPTS))
def test_an_early_question_is_answered_as_by_a_stock_model_that_has_read_no_more(kind):
    """The unlimited cache, against the model's own prefill and steps over the shorter prompt."""
    name, prompt, every = PROMPTS[kind][0], PROMPTS[kind][1](), PROMPTS[kind][2]
    model = zoo.model(name)
    for place in PLACES[:2]:
        (row,) = answer(name, prompt, cell("full", every=every, ask_at=place))
        shorter = Reader(model, common.family(name), prompt, cell("full", every=every, ask_at=place)).prompt
        inputs = {**shorter.inputs, "attention_mask": torch.ones_like(shorter.input_ids)}
        expected = model.generate(**inputs, max_new_tokens=len(row.token_ids), do_sample=False)
        assert row.token_ids == expected[0, shorter.length :].tolist()


@pytest.mark.slow
def test_questions_leave_every_copy_of_the_cache_as_it_was_read_bit_for_bit():
    name, prompts = "llama", document("llama")
    model, family = zoo.model(name), common.family(name)
    for method in METHODS[::2]:
        cells = [cell(method, 8, every=3, ask_at=place) for place in PLACES]
        reader, kept = Reader(model, family, prompts[0], cells[-1]), {}

        def keep(end, cache, logits, kept=kept):
            kept[end] = [(layer.keys.clone(), layer.values.clone(), layer.slot_positions()) for layer in cache.layers]

        cap = None if method == "full" else 8
        listener = StreamListener(cells[0].compressor, cap, 0, None, 40)
        with Session(model) as session:
            read(session, reader, listener, Meter(model.device), None, prompts[0].document.identity, keep)
        with Engine(model, family, common.rules(model), common.tokenizer()) as engine:
            for number in (2, 0, 1, 0):
                rows = engine.answer(prompts[number], cells)
                assert {row.status for row in rows} == {"ok"}
            assert [row.compression_reused for row in rows] == [True] * 3
            (held,) = engine._streams.values()
            assert len(held.stops) == 3
            for end, stop in held.stops.items():
                for layer, (keys, values, places) in zip(stop.cache.layers, kept[end], strict=True):
                    assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
                    assert torch.equal(layer.slot_positions(), places)
            storages = {layer._key_storage.data_ptr() for stop in held.stops.values() for layer in stop.cache.layers}
            assert len(storages) == 3 * zoo.LAYERS


def test_a_place_that_was_reached_in_time_is_answered_and_a_later_one_is_not(monkeypatch):
    for module in (stream, stream_reading, decode, clocks):
        monkeypatch.setattr(module, "time", faulty.CLOCK)
    name = "qwen2_5_vl_video"
    model, cells = zoo.model(name), [cell("keydiff", every=4, ask_at=place) for place in (0.4, 0.7, 1.0)]

    def slow(kwargs) -> bool:
        faulty.CLOCK.now += 20.0 * (faulty.tokens(kwargs) > 10)  # the three chunks of 4 frames
        return False

    for limit, statuses in ((70, ["ok", "ok", "ok"]), (30, ["ok", "timeout", "timeout"]), (15, ["timeout"] * 3)):
        with faulty.failing(model, slow, faulty.oom):
            rows = common.together(model, name, video(name), cells, timeout_s=limit)
        assert [row.status for row in rows] == statuses
    assert "timeout_s" in rows[-1].error


@each("ask_at", [0.1, 0.3])
def test_a_question_before_the_first_chunk_has_ended_is_refused(ask_at):
    for name, prompt, words in (
        ("llama", text(60, 50), "whose first chunk is 20 of 50 tokens"),
        ("qwen2_5_vl_video", video("qwen2_5_vl_video"), "whose first chunk is 4 of 6 pairs of frames"),
        ("qwen2_vl", pictures("qwen2_vl", 6), "whose first chunk is 3 of 6 frames"),
    ):
        every = {"llama": 20, "qwen2_5_vl_video": 8, "qwen2_vl": 3}[name]
        (row,) = common.together(zoo.model(name), name, prompt, [cell(every=every, ask_at=ask_at)])
        assert row.status == "error" and words in row.error and ". " not in row.error
    (row,) = common.together(zoo.model("llama"), "llama", text(60, 50), [cell(every=None, ask_at=0.5)])
    assert row.status == "error" and "which is read all at once" in row.error


def test_shares_of_frames_are_those_that_a_person_computes():
    assert stream_reader._ROUNDING < 1e-6
    for share, tokens in ((0.29, 29), (0.57, 57), (0.58, 58), (1.0, 100)):
        reader = Reader(zoo.model("llama"), common.family("llama"), text(110, 100), cell(every=1, ask_at=share))
        assert reader.length == tokens and reader.prompt.length == tokens + 10
    made = Reader(zoo.model("llama"), common.family("llama"), text(110, 100), replace(cell(every=30, ask_at=0.95)))
    assert made.length == 90
