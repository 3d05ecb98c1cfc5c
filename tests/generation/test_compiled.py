"""Promise: a compiled decode step gives eager's tokens, is one graph, and is traced once for all prompts."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from mmkv_bench import attach
from mmkv_bench.compression import varlen_layer
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.compression.compressor import full
from mmkv_bench.compression.fixed_layer import (
    FixedLayer,
    LayerBuffers,
    Pool,
    StorageShape,
    bucket,
    fix,
    fixed_view,
    pool_of,
)
from mmkv_bench.compression.session import attach as attached
from mmkv_bench.devices.requirements import check_compiler
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.generation import decode as compiled
from mmkv_bench.generation.decode import EAGER_DECODE, CompiledStep, config_of
from tests import zoo
from tests.core import parts
from tests.each import each
from tests.generation import common

CPU = torch.device("cpu")
SHAPES = ("paper", "strict")
ACTING = ("h2o_decode", "prefixkv", "kivi", "hybridkv")


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Each test begins without programs of others, and with counters at zero; a log of every traced line is not kept."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trace = logging.getLogger("torch.__trace")
    told, trace.propagate = trace.propagate, False
    yield
    trace.propagate = told
    torch._dynamo.reset()


class Counter(CompileCounter):
    """`CompileCounter` that stays itself in the copy that a `CompileConfig` makes."""

    def __deepcopy__(self, memo):
        return self


def cells(methods, budget=12, protocols=SHAPES):
    return [common.cell(one, None if one.unbudgeted else budget, protocol) for one in methods for protocol in protocols]


def some_methods(name):
    """Uniform, ragged by heads and ragged by layers, and no eviction."""
    registry = common.registry(model=name)
    return [registry[one] for one in ("full", "adakv", "pyramidkv")]


def same_tokens(ours, eager):
    assert [one.status for one in ours] == ["ok"] * len(ours), [one.error for one in ours]
    assert {a.cell: a.token_ids for a in ours} == {b.cell: b.token_ids for b in eager}


def prompts_of_two_capacities(name):
    """Three prompts: the cache of the second and the third one has a larger capacity than that of the first."""
    first = zoo.prompt(name, 0)
    more = bucket(first["input_ids"].shape[1]) - first["input_ids"].shape[1]
    return [
        common.encoded(name, zoo.prompt(name, seed, after=9 + more))
        for seed, more in enumerate((0, more + 1, more + 5))
    ]


def compiled_equals_eager(name, methods, programs):
    model, counter = zoo.model(name), Counter()
    step = CompiledStep(model, counter)
    for prompt in prompts_of_two_capacities(name)[:2]:
        eager = common.together(model, name, prompt, cells(methods))
        ours = common.together(model, name, prompt, cells(methods), step=step)
        same_tokens(ours, eager)
        assert counter.frame_count == programs, "traced once for one row and once for several"
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_tokens_are_eagers_in_one_graph_that_further_prompts_use_again():
    compiled_equals_eager("qwen2_5_vl", some_methods("qwen2_5_vl"), 2)


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.ALL)
def test_every_one_shot_method_on_every_family_compiles(name):
    registry = common.registry(model=name)
    registry = common.for_text(registry) if name in zoo.TEXT_ONLY else registry
    compiled_equals_eager(name, [one for one in registry.values() if one.decoding is None], 2)


@pytest.mark.full
@each("name, method", [("qwen2_5_vl", "full"), ("qwen3_vl", "snapkv"), ("llava_next", "adakv")])
def test_inductor_gives_eagers_tokens(name, method):
    model, prompt = zoo.model(name), common.encoded(name)
    asked = cells([common.registry(model=name)[method]], protocols=("paper",))
    same_tokens(
        common.together(model, name, prompt, asked, step=CompiledStep(model)),
        common.together(model, name, prompt, asked),
    )


def stock_equals_eager(name, asked, most):
    """`sharing=off`: stock generate() compiles by its own rule, because of the cache that it is given. A second length of a
    prompt tells the compiler that lengths change (`generate` makes masks of it); a third finds everything made."""
    model, counter = zoo.model(name), Counter()
    found = []
    for prompt in prompts_of_two_capacities(name):
        ours = common.alone(model, name, prompt, asked, compile_config=config_of(CPU, counter))
        common.assert_same(ours, common.alone(model, name, prompt, asked))
        found.append(counter.frame_count)
    assert 0 < found[0] <= found[1] == found[2] <= most, found
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.full
def test_stock_generate_compiles_its_decode_step_by_itself():
    stock_equals_eager("llama", cells([common.registry(model="llama")["adakv"]], protocols=("paper",)), 2)


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.FEW)
def test_stock_generate_compiles_every_one_shot_method(name):
    registry = common.registry(model=name)
    registry = common.for_text(registry) if name in zoo.TEXT_ONLY else registry
    methods = [one for one in registry.values() if one.decoding is None and not one.needs.answer]
    # with and without ragged heads, with and without the arguments that generate() has for a new prompt only, two lengths
    stock_equals_eager(name, cells(methods), 8)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("full", "sdpa"),
        pytest.param("uniform", "sdpa", marks=pytest.mark.full),
        pytest.param("all_ragged", "sdpa", marks=pytest.mark.full),
        pytest.param("all_ragged", "eager", marks=pytest.mark.full),
    ],
)
def test_a_left_padded_batch_is_answered_as_eagerly(kind, attention):
    name, counter = "qwen2_5_vl", Counter()
    model = zoo.model(name, attention)
    inputs = zoo.batch([zoo.prompt(name, 0), zoo.prompt(name, 1, before=2, after=3), zoo.prompt(name, 2, before=9)])
    one, budget = (full(), None) if kind == "full" else (parts.compressor(kind), Budget.parse(11))
    told = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with attached(model, one, budget):
        eager = model.generate(**inputs, **told)
    with attached(model, one, budget, fixed=True) as session:
        ours = model.generate(
            **inputs, **told, past_key_values=session.new_cache(), compile_config=config_of(CPU, counter)
        )
    assert counter.frame_count == 1
    assert torch.equal(ours.sequences, eager.sequences)
    assert max((a - b).abs().max() for a, b in zip(ours.logits, eager.logits, strict=True)) < 2e-6


def test_what_is_counted_of_a_fixed_layer_is_what_a_growing_one_has():
    model, name = zoo.model("llava_next"), "llava_next"
    counted = []
    for fixed in (False, True):
        with attached(model, parts.compressor("all_ragged"), parts.budget(9), reserve=8, fixed=fixed) as session:
            model.generate(**zoo.prompt(name), max_new_tokens=5, do_sample=False, past_key_values=session.new_cache())
        layers = session.cache.layers
        assert all(layer.fixed is fixed for layer in layers)
        counted.append([(layer.stored, layer.seen, layer.entries().tolist(), layer.nbytes()) for layer in layers])
        counted[-1].append([layer.slot_positions().tolist() for layer in layers])
    assert counted[0] == counted[1]


def test_free_slots_of_uninitialised_memory_reach_no_answer():
    layer = FixedLayer(reserve=4)
    layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    layer._key_storage[:, :, 3:] = layer._value_storage[:, :, 3:] = float("nan")
    fix(CompressedCache.of([layer]), Pool())
    key, value = layer.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    seen = torch.nn.functional.scaled_dot_product_attention(torch.ones(1, 2, 1, 4), key, value, layer.visible_slots(1))
    assert torch.equal(seen, torch.ones(1, 2, 1, 4))


def test_an_answer_beyond_the_room_is_one_sentence():
    name = "llama"
    model = zoo.model(name)
    with (
        attach(model, "snapkv", 8, compiled_tokens=3) as session,
        pytest.raises(UnsupportedError, match="needs more than the .* entries per head reserved"),
    ):
        model.generate(
            **zoo.prompt(name),
            max_new_tokens=90,  # more than a bucket
            do_sample=False,
            past_key_values=session.new_cache(),
        )


@pytest.mark.slow
def test_prompts_of_like_lengths_are_decoded_at_the_same_addresses():
    name = "qwen2_5_vl"
    model, asked = zoo.model(name), cells(some_methods(name))
    pool_of(model).clear()
    shared, alone, config = [], [], config_of(CPU, Counter())
    for seed in (0, 1, 2):
        prompt = common.encoded(name, zoo.prompt(name, seed, after=9 + 2 * seed))
        step = common.Seen(model)
        common.together(model, name, prompt, asked, step=step)
        shared.append(step.addresses)
        common.alone(model, name, prompt, asked[:1], compile_config=config)
        alone.append(sorted(tensor.data_ptr() for tensor in pool_of(model).tensors()))
    assert shared[0] and shared[0] == shared[1] == shared[2]
    assert alone[1] == alone[2], "stock generate() has its own, which stay too"


def test_two_caches_that_live_at_once_share_no_storage():
    def cache():
        layer = FixedLayer(reserve=4)
        layer.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))
        return CompressedCache.of([layer])

    pool = Pool()
    first, second = fixed_view(cache(), pool), fixed_view(cache(), pool)
    before = [layer.keys.clone() for layer in first.layers]
    second.layers[0].update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    assert first.layers[0]._key_storage.data_ptr() != second.layers[0]._key_storage.data_ptr()
    assert torch.equal(first.layers[0].keys, before[0])
    place = first.layers[0]._key_storage.data_ptr()
    del first
    third = fixed_view(cache(), pool)
    assert third.layers[0]._key_storage.data_ptr() == place and third.layers[0].stored == 3
    assert len(pool.tensors()) == 8, "four of each set"
    del second, third
    pool.clear()
    assert not pool.tensors()


class OneLayer(torch.nn.Module):
    def __init__(self, rows, slots, padded, place):
        super().__init__()
        self.layer = layer = FixedLayer(0)
        layer.dtype, layer.device, layer.is_initialized = torch.bfloat16, place, True
        layer._key_storage, layer._value_storage = torch.zeros(2, rows, 4, 300, 128, dtype=layer.dtype, device=place)
        layer.stored = layer.seen = 300
        shape = StorageShape(rows, 4, slots, (128, 128), layer.dtype, place, padded, by_lengths=True)
        layer.fix(torch.zeros(rows, 4, dtype=torch.int64, device=place) if padded else None, LayerBuffers(shape))

    def forward(self, query, new):
        self.layer.update(new, new)
        return varlen_layer.attend(None, query, self.layer, 0.25)[0]


@pytest.mark.slow
def test_a_step_that_reads_by_lengths_is_one_graph_whatever_the_capacity():
    """With torch's own `varlen_attn` on fake tensors of a CUDA device: traced, not run."""
    place, counter = torch.device("cuda"), Counter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for rows, slots, padded in (
            (1, 512, False),
            (1, 1024, False),
            (2, 512, True),
            (4, 1024, True),
            (8, 4096, True),
        ):
            step = torch.compile(OneLayer(rows, slots, padded, place), fullgraph=True, backend=counter)
            query, new = (torch.zeros(rows, heads, 1, 128, dtype=torch.bfloat16, device=place) for heads in (28, 4))
            assert step(query, new).shape == (rows, 1, 28, 128)
    assert counter.frame_count <= 3, "one row and several, with padding and without"


def test_a_bucket_holds_what_it_is_asked_for_and_an_eighth_more_at_most():
    sizes = [1, 63, 64, 65, 1000, 1024, 1025, 32_799]
    rooms = [bucket(size) for size in sizes]
    assert all(size <= room <= max(size + 64, size * 9 / 8) for size, room in zip(sizes, rooms, strict=True)), rooms
    assert len({bucket(size) for size in range(1, 40_000)}) < 100


def test_methods_that_act_while_decoding_stay_eager_and_say_so():
    name, counter = "qwen2_5_vl", Counter()
    model, prompt = zoo.model(name), common.encoded(name)
    acting = cells([common.registry(model=name)[one] for one in ACTING], protocols=("paper",))
    assert all(one.compressor.decoding is not None for one in acting)
    shared = common.together(model, name, prompt, acting, step=CompiledStep(model, counter))
    alone = common.alone(model, name, prompt, acting, compile_config=config_of(CPU, counter))
    for rows in (shared, alone):
        assert all(one.fallback.count(EAGER_DECODE) == 1 for one in rows), [(one.cell, one.error) for one in rows]
    assert counter.frame_count == 0
    same_tokens(shared, common.together(model, name, prompt, acting))


@pytest.mark.full
def test_attach_compiles_by_the_cache_that_it_gives_and_says_where_it_does_not():
    name, counter = "internvl", Counter()
    model, inputs = zoo.model(name), zoo.prompt(name)
    told = {"max_new_tokens": 5, "do_sample": False}
    with attach(model, "adakv", 12, window=4):
        eager = model.generate(**inputs, **told)
    with attach(model, "adakv", 12, window=4, compiled_tokens=5) as session:
        for _ in range(2):
            cache, config = session.new_cache(), copy.copy(session.compile_config)
            config.backend = counter
            ours = model.generate(**inputs, **told, past_key_values=cache, compile_config=config)
            assert torch.equal(ours, eager) and counter.frame_count == 1
        assert session.report().fallback == ()
        with pytest.raises(UnsupportedError, match=r"give generate\(\) past_key_values=session.new_cache\(\)"):
            model.generate(**inputs, **told)
    with attach(model, "h2o_decode", 12, compiled_tokens=5) as session:
        model.generate(**inputs, **told, past_key_values=session.new_cache())
    assert session.report().fallback == (EAGER_DECODE,) and counter.frame_count == 1


def test_without_a_compiler_there_is_one_sentence(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="decode=compiled needs a C\\+\\+ compiler, but there is no no-such-compiler"):
        check_compiler()
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler"):
        attach(zoo.model("llama"), "snapkv", 8, compiled_tokens=5)


def test_cuda_steps_are_replayed_as_graphs_and_others_are_not():
    assert config_of(torch.device("cuda")).mode == "reduce-overhead" and config_of(CPU).mode is None
    assert compiled._mode(torch.device("cuda"), "eager") is None
