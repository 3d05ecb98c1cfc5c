"""Promise: what a stream takes is planned as the engine takes it: readings, work by chunk, and memory of the cap and a chunk."""

from __future__ import annotations

import pytest
import torch

from mmkv_bench.compression.budget import Budget
from mmkv_bench.config.compose import compose
from mmkv_bench.devices.live_storages import LiveStorages
from mmkv_bench.forecast import roofline
from mmkv_bench.forecast.dry_run import DryModel, without_numbers
from mmkv_bench.forecast.forecast import Assumptions, Workload, forecast, prefills, stream_bytes, workloads_of
from mmkv_bench.forecast.prompt_length import PromptLength
from mmkv_bench.forecast.roofline import ModelBytes
from mmkv_bench.generation import one_pass, stream, stream_pass
from mmkv_bench.generation.stream_reading import read
from mmkv_bench.models.shape import Decoder, decoder_of
from mmkv_bench.plan.planner import outline
from mmkv_bench.store.store import Store
from tests.each import each
from tests.forecast.test_dry_run import CPU, compressor, config, model
from tests.run.setting import done, responses

TOKENS, CHUNK, CAP = 760, 190, 96
COMMAND = ("dataset=stream_facts", "method=[keydiff,reservoir]", "budget=38", "protocol=stream", "stream.every=1")


@pytest.mark.slow
def test_a_plan_counts_the_readings_work_and_bytes_that_a_run_has(tmp_path, monkeypatch):
    """Two streams of eight questions, three methods, two places: six readings, of 25 to 66 tokens a chunk."""
    readings: list[tuple[int | None, list[int], int]] = []

    def counted(session, reader, listener, *rest, **more):
        fed: list[int] = []
        hook = session.text.register_forward_pre_hook(
            lambda module, args, kwargs: fed.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
        )
        cache, logits = read(session, reader, listener, *rest, **more)
        hook.remove()
        held = sum(tensor.nbytes for layer in cache.layers for tensor in layer.buffers())
        readings.append((listener.cap, fed, held))
        return cache, logits

    monkeypatch.setattr(stream, "read", counted)
    words = (*COMMAND, "stream.ask_at=[0.5,1]", "limit=16", "model.device=cpu", f"out={tmp_path}/rows")
    plan = outline(compose(list(words)))
    store = Store(plan.out)
    assert prefills(plan, plan.coverage(store)) == 6
    (unknown,) = workloads_of(plan, plan.coverage(store), store, Assumptions())
    assert unknown.chunk == unknown.length.tokens and dict(unknown.streams) == {None: 2, 38: 4}
    told = forecast(plan, [unknown], Assumptions())
    assert any("stream_facts: the tokens of a frame" in sentence for sentence in told.missing)

    done(tmp_path / "rows", *words, "stage=generate")
    rows = responses(tmp_path / "rows")
    assert len(readings) == 6 and len(rows) == 16 * 6 and {row["ask_at"] for row in rows.values()} == {0.5, 1.0}
    store, plan = Store(plan.out), outline(compose(list(words)))  # which knows the data by their stored rows
    assert prefills(plan, plan.coverage(store)) == 0
    longer = outline(compose([*words, "limit=32"]))
    (work,) = workloads_of(longer, longer.coverage(store), store, Assumptions())
    assert (work.length.source, work.length.frames, work.ask_at) == ("stored", 6, [0.5, 1.0]) and work.chunk == 64
    assert dict(work.streams) == {None: 2, 38: 4}, "the other two streams"
    for cap, fed, held in readings:
        size = max(fed)
        before = [sum(fed[:number]) if cap is None else min(cap, sum(fed[:number])) for number in range(len(fed))]
        pairs = sum(count * stored + count * (count + 1) // 2 for count, stored in zip(fed, before, strict=True))
        assert roofline.stream_pairs(sum(fed), cap or sum(fed), size) == pytest.approx(pairs, rel=0.05)
        entry = 2 * 2 * 32 * 4  # K and V of two heads of 32 numbers
        assert held == pytest.approx(
            4 * ((cap or sum(fed)) + size * (cap is not None)) * entry, rel=0.35 if cap is None else 0.1
        )


def test_what_follows_the_last_question_and_places_of_other_protocols_are_not_counted(tmp_path):
    """Asked at half of it, a stream is read by half: fewer operations and bytes, and one cache alone waits for questions."""
    plans = {}
    for ask_at in ("1", "0.5", "[0.25,0.5]"):
        words = (*COMMAND[:-2], "protocol=[paper,stream]", "stream.every=null" if ask_at == "1" else "stream.every=1")
        plan = outline(compose([*words, f"stream.ask_at={ask_at}", "limit=8", f"out={tmp_path}"]))
        given = Assumptions(prompt_tokens=[TOKENS], bandwidth=1e9, rate=1e9)
        (work,) = workloads_of(plan, plan.coverage(Store(plan.out)), Store(plan.out), given)
        (told,) = forecast(plan, [work], given).datasets
        (line,) = (line for line in told.lines if line.scope == "stream" and line.label == "full")
        plans[ask_at] = (work, told, line)
        unknown = any("stream_facts: " in sentence for sentence in forecast(plan, [work], given).missing)
        assert unknown == (ask_at != "1"), "the whole stream is one chunk where stream.every=null"
    (end, whole, all_of), (half, short, part), (two, both, copies) = plans.values()
    assert (list(end.ask_at), list(half.ask_at), list(two.ask_at)) == ([1.0], [0.5], [0.25, 0.5])
    assert short.prefill_hours < whole.prefill_hours and both.prefill_hours == short.prefill_hours
    assert short.decode_hours < whole.decode_hours
    entry = 4 * 2 * 2 * 32 * 4  # K and V of two heads of 32 numbers in four layers
    assert all_of.needs - part.needs == TOKENS // 2 * entry and copies.needs - part.needs == TOKENS // 4 * entry


def decoder() -> Decoder:
    made = decoder_of(config())
    assert made is not None and (made.layers, made.kv_heads, made.head_dim) == (3, 2, 32)
    return made


@pytest.mark.slow
@each("cap", [CAP, None])
def test_dry_runs_and_forecasts_hold_what_a_real_stream_holds(cap):
    for name in ("h2o", "generic_query") if cap else ("full",):
        method, budget, of = compressor(name), None if cap is None else Budget.parse(cap), model()
        ids = torch.randint(0, 999, (1, TOKENS), generator=torch.Generator().manual_seed(1))
        types = torch.zeros_like(ids)
        weights = [*of.parameters(), *of.buffers()]
        tally = LiveStorages(CPU, [*weights, ids, types])
        with tally:
            peaks = one_pass.Peaks(tally)
            cache = stream_pass.run(of, ids, types, method, budget, peaks, CHUNK)
        held = {phase: peak.allocated for phase, peak in peaks.of.items()}
        counter = LiveStorages(CPU)
        with without_numbers(counter) as numbers:
            dry = DryModel(config(), torch.float32, "sdpa", counter, numbers)
            told = dry.peaks(method, budget, types, chunk=CHUNK)
        assert set(told) == set(held) >= {one_pass.PREFILL, one_pass.FIRST}
        assert {phase: told[phase] / held[phase] for phase in held} == pytest.approx(dict.fromkeys(held, 1.0), abs=0.15)
        assert max(layer.stored for layer in cache.layers) == (cap or TOKENS - 9) + 9

        sizes = ModelBytes(decoder(), 4, None, 0, 2 * 3 * 2 * 32 * 4)
        work = Workload("d", PromptLength(TOKENS, "given"), 8, [], {}, None, None, chunk=CHUNK)
        least = stream_bytes(work, sizes, cap or TOKENS)
        most = max(held.values()) - held[one_pass.LOAD]
        assert 0.4 * most < least < most, (name, least, most)
    whole = roofline.prefill_operations(decoder(), TOKENS)
    assert roofline.prefill_operations(decoder(), TOKENS, None, CHUNK) == whole
    assert roofline.prefill_operations(decoder(), TOKENS, TOKENS, CHUNK) == whole
    assert roofline.prefill_operations(decoder(), TOKENS, CAP, CHUNK) < whole
    assert roofline.stream_pairs(10, 3, 4) == (1 + 2 + 3 + 4) + (4 * 3 + 10) + (2 * 3 + 3)
