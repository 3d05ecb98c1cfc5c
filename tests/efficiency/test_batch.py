"""Promise: several sequences at a time answer as each does alone, whichever way their batch is built; and the largest batch is
found from rows alone, up to the limit of memory."""

from __future__ import annotations

import copy
import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from mmkv_bench.compression.batched_layer import BatchedLayer, join
from mmkv_bench.compression.cache import CompressedCache, CompressedLayer
from mmkv_bench.compression.fixed_layer import pool_of
from mmkv_bench.compression.session import attach
from mmkv_bench.efficiency.measure import ROW_BY_ROW, Bench
from mmkv_bench.efficiency.plan import plan_passes
from mmkv_bench.efficiency.run import PREFILLED_PROMPTS, missing_passes, runnable_passes, stored_outcomes
from mmkv_bench.efficiency.search import PassOutcome, search_state
from mmkv_bench.generation.decode import CompiledStep
from mmkv_bench.models.load import LoadedModel
from mmkv_bench.store.store import Store
from mmkv_bench.tables.status import status
from tests import cover, zoo
from tests.cli.setting import verb
from tests.efficiency.test_scenario import composed
from tests.generation import common
from tests.run.setting import done, go
from tests.second_device import far, second_device, there
from tests.varlen_double import reading

ROWS = 3


def bench(name: str, **options) -> Bench:
    model = zoo.model(name)
    device = next(model.parameters()).device
    return Bench(LoadedModel("zoo", model, None, None, common.family(name), device, "float32"), 5, **options)


def prompts(name: str) -> list:
    """Of one length, with other pictures and words each."""
    made = [common.encoded(name, zoo.prompt(name, seed), f"zoo/{seed}") for seed in range(ROWS)]
    assert len({prompt.length for prompt in made}) == 1
    return made


def cells(name: str, methods, protocols=("paper", "strict")):
    registry = common.registry(model=name)
    made = [registry[one] for one in methods]
    return [common.cell(one, None if one.unbudgeted else 9, rule) for one in made for rule in protocols]


UNIFORM_RAGGED_FULL = ("full", "snapkv", "adakv", "random")


def answers_as_alone(name: str, methods, **options):
    made, asked = bench(name, **options), prompts(name)
    alone = bench(name)
    for cell in cells(name, methods):
        wanted = [alone.measure_times([prompt], cell) for prompt in asked]
        found = made.measure_times(asked, cell)
        assert found.answers == [one.answers[0] for one in wanted], cell.cell
        assert found.held.useful == sum(one.held.useful for one in wanted)
        assert found.held.useful <= found.held.read <= found.held.held or cell.compressor.decoding is not None
        yield cell, found, wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("llava_next", marks=pytest.mark.full)])
def test_each_sequence_of_a_batch_answers_as_it_does_alone(name):
    differ = 0
    for cell, found, _ in answers_as_alone(name, UNIFORM_RAGGED_FULL):
        differ += len({*map(tuple, found.answers)}) == ROWS
        assert ROW_BY_ROW not in found.held.fallback and found.seconds["join"] > 0, cell.cell
    assert differ, "prompts that are answered differently"


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.ALL)
def test_every_method_on_every_family_answers_in_a_batch_as_alone(name):
    registry = common.registry(model=name)
    registry = common.for_text(registry) if name in zoo.TEXT_ONLY else registry
    methods = [one for one, made in registry.items() if not made.needs.answer]
    methods = [one for one in methods if getattr(registry[one].decoding, "moves_queries", False) is False]
    assert len([*answers_as_alone(name, methods)]) == 2 * len(methods)


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.ALL)
def test_a_batch_that_is_prefilled_together_answers_alike(name):
    registry = common.registry(model=name)
    registry = common.for_text(registry) if name in zoo.TEXT_ONLY else registry
    methods = [one for one, made in registry.items() if not made.needs.answer and made.decoding is None]
    for _, found, _ in answers_as_alone(name, methods, together=True):
        assert "join" not in found.seconds


@pytest.mark.slow
def test_together_and_one_by_one_hold_the_same_entries():
    for _, found, _ in answers_as_alone("qwen2_5_vl", ("full", "adakv"), together=True):
        assert "join" not in found.seconds


def test_ragged_heads_that_stand_back_to_back_are_joined_without_padding():
    with reading():
        for _, found, wanted in answers_as_alone("qwen2_5_vl", ("adakv",)):
            assert found.held.read == found.held.useful == sum(one.held.read for one in wanted)


@pytest.mark.slow
def test_policies_that_act_while_decoding_stand_side_by_side_and_say_so():
    for cell, found, wanted in answers_as_alone("qwen2_5_vl", ("kivi", "h2o_decode")):
        assert found.held.fallback == [*wanted[0].held.fallback, ROW_BY_ROW], cell.cell
        assert found.held.held == sum(one.held.held for one in wanted)
        assert found.held.read == sum(one.held.read for one in wanted)


@pytest.fixture
def nothing_compiled():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_batch_in_storage_of_fixed_capacity_gives_the_same_tokens():
    for _ in answers_as_alone("qwen2_5_vl", ("full", "adakv"), step=zoo.model("qwen2_5_vl")):
        pass


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2_5_vl", "llama"])
def test_a_compiled_step_of_a_batch_gives_the_same_tokens(name, nothing_compiled):
    counter = CompileCounter()
    step = CompiledStep(zoo.model(name), counter)
    for _ in answers_as_alone(name, ("full", "adakv"), step=step):
        pass
    assert counter.frame_count == 2, "once with ragged heads and once without"
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_fixed_storage_is_read_by_lengths_where_there_is_such_a_kernel():
    name = "qwen2_5_vl"
    asked, config = prompts(name), zoo.model(name).config.text_config
    layers, entry = config.num_hidden_layers, 2 * 4 * config.hidden_size // config.num_attention_heads
    for cell in cells(name, ("full", "adakv", "random")):
        wanted = bench(name).measure_times(asked, cell)
        with reading() as kernel:
            found = bench(name, step=zoo.model(name)).measure_times(asked, cell)
        steps = [sum(kernel.read[at : at + layers]) for at in range(0, len(kernel.read), layers)]
        first = int(cell.protocol == "strict")  # the last token of the prompt was fed before
        assert found.answers == wanted.answers
        told = [{*kernel.widest[layer::layers]} for layer in range(layers)]
        assert all(len(one) == 1 for one in told), "every step is told a layer's capacity, and no other number"
        assert len(steps) == 4 + first and len({after - one for one, after in pairwise(steps)}) == 1
        assert steps[first] * entry == found.held.useful, "no padding and no free slot is read"


@pytest.mark.slow
@pytest.mark.parametrize("methods", [("full", "snapkv", "kivi"), pytest.param(None, marks=pytest.mark.full)])
def test_a_pass_of_copies_holds_what_one_of_prefills_holds(methods):
    name, more = "qwen2_5_vl", 8
    made = bench(name)
    asked = [common.encoded(name, zoo.prompt(name, seed % 3), f"zoo/{seed}") for seed in range(more)]
    registry = common.registry(model=name)
    methods = methods or [one for one in registry if not registry[one].needs.answer]
    for method in methods:
        if getattr(registry[method].decoding, "moves_queries", False):
            continue
        (cell,) = cells(name, [method], ("paper",))
        true, copied = made.measure_memory(asked, cell), made.measure_memory(asked, cell, distinct=2)
        same = (
            copied.held == true.held
        )  # else heads are padded to the longest of all sequences; copies have lengths of few
        assert same or method not in ("full", "snapkv", "kivi"), (method, copied.held, true.held)
        for phase, peak in true.peaks.items():
            ratio = copied.peaks[phase].allocated / peak.allocated
            assert abs(ratio - 1) <= (0.002 if same else 0.05), (method, phase, ratio)


@pytest.mark.slow
def test_passes_of_a_compiled_step_share_storages_that_are_counted():
    name = "qwen2_5_vl"
    step = common.Seen(zoo.model(name))
    plain, made, asked = bench(name), bench(name, step=step), prompts(name)
    for cell in cells(name, ("full", "adakv"), ("paper",)):
        pool_of(step.model).clear()
        step.addresses.clear()
        held = [made.measure_times(asked, cell).held for _ in range(2)]  # warm-up and timed pass
        assert len(step.addresses) == 1 and held[0] == held[1]
        eager, ready = plain.measure_memory(asked, cell), made.measure_memory(asked, cell)
        stored = sum(tensor.nbytes for tensor in pool_of(step.model).tensors())
        assert stored <= ready.held.held <= 1.3 * stored, "keys, values and, where something was evicted, positions"
        for phase in ("prefill", "join"):  # the storages stand ready while prompts are prefilled
            extra = ready.peaks[phase].allocated - eager.peaks[phase].allocated
            assert 0.6 * stored < extra < 1.4 * stored, (cell.cell, phase, extra, stored)


def test_joining_holds_no_more_than_one_layer_twice_and_leaves_nothing_behind():
    name, (first, *_) = "qwen2_5_vl", prompts("qwen2_5_vl")
    cell = cells(name, ["full"], ["paper"])[0]
    caches = []
    for prompt in prompts(name):
        with attach(zoo.model(name), cell.compressor, reserve=0) as session, torch.no_grad():
            session.model(**prompt.inputs, past_key_values=session.new_cache(), use_cache=True)
        caches.append(session.latest_cache)
    before = [copy.deepcopy(cache) for cache in caches]
    joined = join(caches, 4)
    assert all(not cache.layers for cache in caches)
    for number, layer in enumerate(joined.layers):
        assert layer.positions is None and layer.capacity == first.length + 4
        for row, cache in enumerate(before):
            assert torch.equal(layer.keys[row], cache.layers[number].keys[0])
            assert torch.equal(layer.values[row], cache.layers[number].values[0])


def test_shorter_rows_are_padded_on_the_left_and_see_themselves_alone():
    torch.manual_seed(0)
    layers = []
    for width in (3, 5):
        key, value = torch.randn(2, width, 4), torch.randn(2, width, 4)
        places = torch.arange(width).expand(2, -1) * 2
        layers.append(CompressedLayer.from_rows([(key, value, places)], 12, 0))
    joined = join([CompressedCache.of([layer]) for layer in layers], 2).layers[0]
    assert joined.positions.tolist()[0] == [[-1, -1, 0, 2, 4]] * 2
    assert joined.entries().tolist() == [[3, 3], [5, 5]]
    query, new = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4)
    key, value, mask = joined.attend(query, *joined.update(new, new), None)
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    for row, layer in enumerate(layers):
        alone = layer.update(new[row : row + 1], new[row : row + 1])
        wanted = torch.nn.functional.scaled_dot_product_attention(query[row : row + 1], *alone)
        torch.testing.assert_close(found[row : row + 1], wanted)


def test_rows_of_other_lengths_are_refused():
    torch.manual_seed(0)
    one = [
        CompressedLayer.from_rows([(torch.randn(1, 2, 4),) * 2 + (torch.arange(2)[None],)], seen, 0) for seen in (5, 6)
    ]
    with pytest.raises(AssertionError, match="the same number of tokens"):
        join([CompressedCache.of([layer]) for layer in one], 1)
    assert isinstance(
        join([CompressedCache.of([BatchedLayer([layer])]) for layer in one[:1]], 1).layers[0], BatchedLayer
    )


# ---------------------------------------------------------------------- the largest batch
def sizes_tried(peak, limit, known=True):
    """Of a search alone, over a made-up function of memory that never falls."""
    outcomes = {}
    while (size := search_state(outcomes, limit if known else None).next) is not None:
        assert size not in outcomes
        outcomes[size] = PassOutcome(
            "ok" if peak(size) <= limit else "oom", peak(size) if peak(size) <= limit else None
        )
    ended = search_state(outcomes, limit if known else None)
    assert (ended.stopped, ended.tried) == (False, [*outcomes])
    assert outcomes.get(ended.largest, "ok") == "ok" and outcomes[ended.largest + 1] == "oom"
    assert search_state(dict(reversed(outcomes.items())), limit).largest == ended.largest
    return ended.largest, [*outcomes]


@given(
    base=st.integers(0, 1000),
    slope=st.integers(1, 50),
    flat=st.integers(0, 5000),
    stair=st.integers(1, 40),
    bend=st.integers(0, 3),
    limit=st.integers(0, 20_000),
)
@settings(max_examples=cover.examples(150), deadline=None)
def test_the_search_ends_where_bisection_does_whatever_the_memory(base, slope, flat, stair, bend, limit):
    def peak(size):
        return max(flat, base + slope * (-(-size // stair) * stair) + bend * size * size // 50)

    largest, tried = sizes_tried(peak, limit)
    assert (largest, sizes_tried(peak, limit, known=False)[0]) == (largest, largest)
    assert len(tried) <= 4 * math.log2(largest + 1) + 6


def test_a_line_is_followed_to_the_limit_in_few_tries():
    for largest in (0, 1, 2, 3, 7, 8, 11, 100, 1000):
        assert sizes_tried(lambda size: 10 + 7 * size, 10 + 7 * largest)[0] == largest
    assert sizes_tried(lambda size: 10 + 7 * size, 10 + 7 * 11)[1] == [1, 4, 11, 12]
    # with the measured bytes of a further sequence; few sequences hold less than one prefill
    largest, tried = sizes_tried(lambda size: 3_400_000 + 190_321 * max(size, 16), 33_554_432)
    assert (largest, len(tried)) == (158, 6) and sum(tried) < 450, "1,632 by bisection"


def test_a_search_ends_at_another_failure():
    stopped = search_state({1: "ok", 2: "nan"})
    assert (stopped.largest, stopped.stopped, stopped.next) == (1, True, None)


LIMIT = 3_680_000  # bytes: weights, and two or three full sequences
ASKED = ["scenario=efficiency", "method=snapkv", "budget=8", "lengths=40", "repeats=1", "new_tokens=3", "batch=max"]
ASKED += [f"memory_limit={LIMIT}"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    root = tmp_path_factory.mktemp("batches")
    return root, done(root, *ASKED)


@pytest.mark.full
def test_the_largest_batch_fits_and_one_more_is_a_row_that_says_oom(ran):
    rows = [row for row in Store(ran[0]).timings().to_pylist() if row["phase"] == "total"]
    for cell in {row["cell"] for row in rows}:
        counted = {row["batch"]: row for row in rows if row["cell"] == cell and row["repeat"] is None}
        line = next(one for one in ran[1].document["efficiency"] if one["cell"] == cell)
        largest = line["largest_batch"]
        assert counted[largest]["status"] == "ok" and counted[largest]["peak_allocated"] <= LIMIT
        assert counted[largest + 1]["status"] == "oom" and "bytes are in use" in counted[largest + 1]["error"]
        assert {row["memory_limit"] for row in counted.values()} == {LIMIT}
        timed = {row["batch"] for row in rows if row["cell"] == cell and row["repeat"] is not None}
        assert timed == {largest}, "what was only tried is not timed"
    assert ran[1].document["failed"] == 0 and "40 prompt tokens, largest batch" in ran[1].out
    assert "oom" not in status(Store(ran[0])).passes


@pytest.mark.full
def test_ratios_of_the_largest_batch_are_to_fulls(ran):
    lines = ran[1].document["efficiency"]
    largest = {line["cell"]: line["largest_batch"] for line in lines}
    ratios = {line["cell"]: line["largest_ratio"] for line in lines}
    full, method = sorted(largest, key=largest.get)
    assert 2 <= largest[full] < largest[method]
    assert ratios == {full: 1.0, method: largest[method] / largest[full]}
    assert f"largest batch: {largest[method]} ({ratios[method]:.2f} x full's)" in ran[1].out


def test_memory_ends_on_the_host_where_it_is_told():
    made, asked = bench("qwen2_5_vl"), prompts("qwen2_5_vl")
    cell = cells("qwen2_5_vl", ["snapkv"], ["paper"])[0]
    peaks = made.measure_memory(asked, cell).peaks
    most = peaks["total"].allocated
    assert 0 < peaks["join"].allocated <= most and made.measure_memory(asked, cell, most).peaks == peaks
    with pytest.raises(torch.OutOfMemoryError, match=f"more than the limit of {most - 1}"):
        made.measure_memory(asked, cell, most - 1)


@pytest.mark.full
def test_a_finished_search_is_not_searched_again_and_an_interrupted_one_goes_on_from_its_rows(ran):
    plan = plan_passes(composed(ran[0], *ASKED))
    found = stored_outcomes(plan, Store(ran[0]).timings())
    assert runnable_passes(plan, found) == [] and done(ran[0], *ASKED).document["ran"] == 0
    order = sorted((unit for unit in found if unit.repeat is None), key=plan.passes(found).index)
    for count in range(len(order)):
        known = {unit: found[unit] for unit in order[:count]}
        while todo := [unit for unit in runnable_passes(plan, known) if unit.repeat is None]:
            known |= {unit: found[unit] for unit in todo}
        assert known == {unit: found[unit] for unit in order}, "the same sizes"


def test_a_plan_tells_of_what_waits_for_a_search(tmp_path):
    plan = plan_passes(composed(tmp_path, *ASKED, "batch=[1,2,max]", "repeats=3"))
    nothing = Store(tmp_path).timings()
    assert {unit.repeat for unit in missing_passes(plan, stored_outcomes(plan, nothing))} == {None, 0, 1, 2}
    assert {unit.repeat for unit in runnable_passes(plan, stored_outcomes(plan, nothing))} == {None}


@pytest.mark.parametrize("short", [0, 3])
def test_what_copies_found_is_counted_once_more_before_it_is_timed(tmp_path, short):
    """short: by so many sequences the copies' pass holds less than the true one."""
    plan = plan_passes(composed(tmp_path, *ASKED, "batch=[1,max]", "memory_limit=4000"))
    sizes = {cell.cell: 12 + 30 * number for number, cell in enumerate(plan.cells)}
    found, prefills, timed = {}, 0, []
    while todo := runnable_passes(plan, found):
        for unit in todo:
            if unit.shape in {one.shape for one, ended in found.items() if ended != "ok" and one != unit}:
                continue
            if unit.repeat is not None:
                timed.append(unit.batch)
                found[unit] = PassOutcome("ok")
                continue
            few = unit.batch > PREFILLED_PROMPTS + 1 and unit not in plan.unconfirmed(found)
            prefills += PREFILLED_PROMPTS + 1 if few else unit.batch
            most, each = sizes[unit.cell] + short * few, 4000 // (sizes[unit.cell] + short * few)
            found[unit] = PassOutcome("ok" if unit.batch <= most else "oom", each * unit.batch, few)
    answers = {cell.cell: plan.search(found, cell.cell, 40).largest for cell in plan.cells}
    assert answers == sizes
    assert not plan.unconfirmed(found) and sorted(timed) == sorted([*sizes.values(), 1, 1])
    assert prefills <= (6 * sum(sizes.values()) if short else 200)


@pytest.mark.full
def test_another_limit_counts_again_and_keeps_the_times(ran):
    plan = plan_passes(composed(ran[0], *ASKED, "memory_limit=1GiB"))
    found = stored_outcomes(plan, Store(ran[0]).timings())
    assert found and all(unit.repeat is not None for unit in found)
    assert {unit.batch for unit in runnable_passes(plan, found)} == {1}


def test_the_two_ways_of_building_a_batch_have_rows_of_their_own():
    plans = [
        plan_passes(composed("unused", "batch=[1,2]", f"batch_prefill={way}")) for way in ("one_by_one", "together")
    ]
    units = [{*plan.units} for plan in plans]
    assert {unit.batch for unit in units[0] & units[1]} == {1}
    assert {(unit.batch, unit.prefill) for unit in units[1]} == {(1, None), (2, "together")}


@pytest.mark.full
def test_a_timed_pass_that_runs_out_of_memory_ends_the_search_lower(tmp_path, monkeypatch):
    timed = Bench.measure_times

    def stops(bench, prompts, cell):
        if len(prompts) > 1 and cell.budget is None:
            raise torch.OutOfMemoryError("no more")
        return timed(bench, prompts, cell)

    monkeypatch.setattr(Bench, "measure_times", stops)
    outcome = go(tmp_path, *ASKED)
    lines = {line["cell"]: line for line in outcome.document["efficiency"] if line["batch"] == 1}
    assert min(line["largest_batch"] for line in lines.values()) == 1


# ---------------------------------------------------------------------- another device
@pytest.mark.full
def test_a_batch_on_another_device_is_the_hosts_and_its_memory_ends_where_it_is_told():
    name = "qwen2_5_vl"
    asked = prompts(name)
    cell = cells(name, ["snapkv"], ["paper"])[0]
    here = bench(name).measure_times(asked, cell)
    with second_device():
        model = there(zoo.model(name))
        made = Bench(
            LoadedModel("zoo", model, None, None, common.family(name), next(model.parameters()).device, "float32"), 5
        )
        given = [far(prompt) for prompt in asked]
        found, counted = made.measure_times(given, cell), made.measure_memory(given, cell)
        assert (found.answers, found.held) == (here.answers, here.held)
        assert counted.peaks["join"].allocated > 0
        with pytest.raises(torch.OutOfMemoryError):
            made.measure_memory(given, cell, counted.peaks["total"].allocated - 1)
        assert made.measure_memory(given, cell, counted.peaks["total"].allocated).peaks == counted.peaks


@pytest.mark.full
def test_a_plan_prints_the_largest_batches_that_were_measured(ran, capsys):
    full, few = sorted({line["cell"]: line["largest_batch"] for line in ran[1].document["efficiency"]}.values())
    assert verb("plan")([*ASKED, "model.device=cpu", f"out={ran[0]}", "--json"]) == 0
    options = json.loads(capsys.readouterr().out.splitlines()[-1])["deployment"]
    told = {
        (one["method"], one["budget"]): (one["value"], one["source"]) for one in options if one["name"] == "largest"
    }
    assert told == {("full", "all"): (full, "measured"), ("snapkv", "8"): (few, "measured")}
