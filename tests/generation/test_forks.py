"""Promise: every fork of a shared prefill is what its cell gives alone, through attach() and stock generate().

Token ids, answers, finish reasons, kept counts and indices, entries and bytes: every field of a result but times.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkv_bench.generation.forks import Fork
from mmkv_bench.generation.result import digest
from tests import cover, zoo
from tests.core import parts
from tests.each import each
from tests.generation import common, faulty

PROPERTY = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

OVER_AS_RELEASED = {"keydiff", "pyramidkv", "adakv", "sparsemm", "look_m", "meda", "prefixkv", "kivi_prefixkv"}


def protocols_of(name: str) -> tuple[str, ...]:
    return common.PROTOCOLS if name in zoo.MULTIMODAL else common.PROTOCOLS[:2]


def grid(methods, budgets, protocols, seeds=(0,)) -> list:
    """One cell per combination; deterministic methods have no seed and `full` has no budget, as in a run."""
    cells = [common.cell(methods["full"], None, protocol) for protocol in protocols] if "full" in methods else []
    for method in (m for name, m in methods.items() if name != "full"):
        for seed in seeds if method.stochastic else (0,):
            own = (None,) if method.unbudgeted else budgets
            cells += [common.cell(method, b, protocol, seed) for b in own for protocol in protocols]
    return cells


chosen = pytest.mark.parametrize("chosen", [common.some, pytest.param(list, id="whole", marks=pytest.mark.full)])


def in_turn(cells: list) -> list:
    """Of every method two protocols, and over the methods each protocol as often as the others."""
    protocols = list(dict.fromkeys(one.protocol for one in cells))
    methods = list(dict.fromkeys(one.compressor.name for one in cells))
    return [
        one
        for one in common.some(cells)
        if (methods.index(one.compressor.name) + protocols.index(one.protocol)) % 3 or one.compressor.is_full
    ]


@pytest.mark.parametrize("chosen", [in_turn, pytest.param(list, id="whole", marks=pytest.mark.full)])
@cover.few("name", ("qwen2_5_vl", "llava_next", "llama"))
def test_every_method_of_the_registry_forks_as_it_runs_alone(name, chosen):
    model, prompt = zoo.model(name), common.encoded(name)
    methods = common.registry(model=name)
    if name not in zoo.MULTIMODAL:
        methods = common.for_text(methods)
    cells = chosen(grid(methods, (1, 9, "40%", prompt.length + 3), protocols_of(name), seeds=(0, 5)))
    forks = common.assert_forks_equal_alone(model, name, prompt, cells)
    assert len({tuple(fork.token_ids) for fork in forks}) > len(cells) // 4, "evictions must have changed answers"
    assert len({fork.kept_digest for fork in forks}) > len(cells) // 3
    assert all(digest(fork.selected) == fork.kept_digest for fork in forks), "what was kept can be had"


@pytest.mark.full
@chosen
@cover.few("name", ("qwen3_vl", "internvl_qwen3", "llava_onevision_video"), first=1)
def test_released_readings_fork_as_they_run_alone(name, chosen):
    """They may hold more entries than the budget says, which is why only they may."""
    model, prompt = zoo.model(name), common.encoded(name)
    methods = {key: method for key, method in common.registry("released", name).items() if key != "streamingllm"}
    cells = chosen(grid(methods, (5, "50%"), protocols_of(name)))
    forks = common.assert_forks_equal_alone(model, name, prompt, cells)
    over = [fork for fork in forks if fork.entries_asked is not None and fork.entries_resident > fork.entries_asked]
    assert {fork.cell.split("@")[0] for fork in over} <= OVER_AS_RELEASED and len(over) > 6


@pytest.mark.slow
@chosen
@cover.few("name", zoo.ALL, keep=1)
def test_ragged_budgets_fork_as_they_run_alone_on_every_family(name, chosen):
    model, prompt = zoo.model(name), common.encoded(name)
    methods = {kind: parts.compressor(kind) for kind in parts.BUDGETS} | {"window": parts.window(6, "all_ragged")}
    cells = chosen(grid(methods, (6, "45%"), protocols_of(name)))
    forks = common.assert_forks_equal_alone(model, name, prompt, cells)
    ragged = [fork for fork in forks if len({count for layer in fork.kept for count in layer}) > 1]
    assert len(ragged) > len(forks) // 2
    for one, fork in zip(cells, forks, strict=True):
        heads = len(fork.kept) * len(fork.kept[0])
        assert fork.entries_resident == sum(map(sum, fork.kept)) == one.entries(fork.context_tokens) * heads


@pytest.mark.full
@cover.few("attention", ("sdpa", "eager"), first=1)
@pytest.mark.parametrize("name", ("qwen2_vl", "internvl"))
def test_mixed_answer_lengths_with_early_eos_end_as_alone(name, attention):
    """Rows of a batch that have ended are fed on until the last row ends; nobody may notice."""
    prompt = common.encoded(name)
    methods = {kind: parts.compressor(kind) for kind in ("uniform", "all_ragged")}
    cells = grid(methods, (1, 4, 12, "80%"), protocols_of(name), seeds=(0, 1))
    model = zoo.model(name, attention)
    free = common.together(model, name, prompt, cells, common.rules(model, 10))
    eos = sorted({fork.token_ids[place] for place in (0, 1, 3, 5, 7) for fork in free[place::5]})[:12]
    zoo.model(name, attention, eos=eos)
    try:
        forks = common.assert_forks_equal_alone(model, name, prompt, cells, common.rules(model, 10))
    finally:
        zoo.model(name)
    lengths = {fork.n_tokens for fork in forks}
    assert {"eos", "length"} == {fork.finish_reason for fork in forks} and len(lengths) >= 5 and 1 in lengths


def test_rows_that_have_ended_leave_the_batch_when_they_are_half_of_it_in_float32_alone():
    name, rows = "qwen2_vl", []
    prompt, model = common.encoded(name), copy.deepcopy(zoo.model(name))
    cells = grid({kind: parts.compressor(kind) for kind in ("uniform", "all_ragged")}, (1, 4, 12), ("paper",))
    free = common.together(model, name, prompt, cells, common.rules(model, 8))
    model.generation_config.eos_token_id = [fork.token_ids[place] for place, fork in enumerate(free, 1)]
    model.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    for dtype in (torch.float32, torch.bfloat16):
        rows.clear()
        forks = common.together(model.to(dtype), name, prompt, cells, common.rules(model, 8))
        going = [sum(fork.n_tokens > step for fork in forks) for step in range(1, max(f.n_tokens for f in forks))]
        assert [fork.status for fork in forks] == ["ok"] * len(cells) and going[-1] <= len(cells) / 2
        expected = [len(cells)]
        for alive in going:
            expected.append(alive if dtype == torch.float32 and alive <= expected[-1] / 2 else expected[-1])
        assert rows[1:] == expected[1:], dtype  # the first pass is the prefill


@pytest.mark.full
def test_processors_and_stop_strings_see_each_forks_own_answer():
    name = "qwen2_5_vl"
    model, prompt = zoo.model(name), common.encoded(name)
    cells = grid({"uniform": parts.compressor("uniform")}, (1, 5, 20), common.PROTOCOLS, seeds=(0, 1, 2))
    free = common.together(model, name, prompt, cells, common.rules(model, 10))
    stops = [fork.answer[2 * i + 1 : 2 * i + 3] for i, fork in zip((2, 4, 6, 8), free[::3], strict=False)]
    rules = common.rules(model, 10, until=stops, repetition_penalty=1.2)
    forks = common.assert_forks_equal_alone(model, name, prompt, cells, rules)
    assert {"stop", "length"} == {fork.finish_reason for fork in forks}
    assert len({fork.n_tokens for fork in forks}) >= 3


@pytest.mark.slow
@cover.few("name", zoo.FEW, keep=2)
def test_prompt_within_the_budget_is_full_and_says_so(name):
    model, prompt = zoo.model(name), common.encoded(name)
    methods = {"full": common.registry()["full"], "snapkv": common.registry()["snapkv"]}
    methods["ragged"] = parts.compressor("all_ragged")
    cells = common.some(grid(methods, (prompt.length, prompt.length + 1, 10**6, 1.0), protocols_of(name)))
    forks = common.assert_forks_equal_alone(model, name, prompt, cells)
    for one, fork in zip(cells, forks, strict=True):
        own_full = next(f for c, f in zip(cells, forks, strict=True) if c.protocol == one.protocol)
        assert fork.token_ids == own_full.token_ids and fork.kept_digest == own_full.kept_digest
        assert fork.fallback == ([] if fork is own_full else ["prompt_within_budget"])
        assert fork.tokens_from_compressed == 0


@pytest.mark.full
@cover.few("name", ("qwen2_5_vl", "internvl"))
def test_text_only_prompts_of_visual_models_fork_as_they_run_alone(name):
    model, prompt = zoo.model(name), common.encoded(name, zoo.without_visual(name, 30))
    cells = common.some(grid(common.for_text(common.registry(model=name)), (1, 8, "50%"), common.PROTOCOLS[:2]))
    forks = common.assert_forks_equal_alone(model, name, prompt, cells)
    assert all(fork.visual_tokens == 0 for fork in forks)


@pytest.mark.full
def test_small_fork_batches_and_large_ones_give_the_same_results():
    name = "llava_next"
    model, prompt = zoo.model(name), common.encoded(name)
    cells = common.some(grid(common.registry(model=name), (3, 17, "60%"), common.PROTOCOLS))
    large = common.together(model, name, prompt, cells, fork_batch=64)
    for rows in (1, 2, 5):
        small = common.together(model, name, prompt, cells, fork_batch=rows)
        common.assert_same(small, large)
        assert max(fork.fork_rows for fork in small) == rows
    assert max(fork.fork_rows for fork in large) >= 15


def test_forks_of_very_different_lengths_do_not_pad_one_another():
    def bucket(length: int) -> int:
        return Fork(None, [torch.zeros(2, length, dtype=torch.int64)], None).bucket()

    assert {bucket(length) for length in (0, 1, 64, 512)} == {bucket(512)}
    assert len({bucket(length) for length in (512, 513, 1025, 2049)}) == 4
    assert bucket(513) == bucket(1024)


@pytest.mark.full
@PROPERTY
@given(
    name=st.sampled_from(("qwen2_5_vl", "llava", "qwen2")),
    kind=st.sampled_from(sorted(parts.BUDGETS)),
    budgets=st.lists(
        st.one_of(st.integers(1, 45), st.integers(1, 100).map(lambda n: f"{n}%")), min_size=1, max_size=4, unique=True
    ),
    protocol=st.sampled_from(common.PROTOCOLS),
    seed=st.integers(0, 10**6),
    sample=st.integers(0, 3),
    tokens=st.integers(1, 5),
)
def test_any_budget_seed_and_length_forks_as_it_runs_alone(name, kind, budgets, protocol, seed, sample, tokens):
    model, prompt = zoo.model(name), common.encoded(name, seed=sample, identity=f"zoo/{sample}")
    protocol = protocol if protocol in protocols_of(name) else "strict"
    cells = [common.cell(parts.compressor(kind), budget, protocol, seed) for budget in budgets]
    cells += [common.cell(parts.window(5, kind), budget, protocol) for budget in budgets]
    common.assert_forks_equal_alone(model, name, prompt, cells, common.rules(model, tokens))


def test_seeds_and_samples_move_stochastic_methods_and_nothing_else():
    name = "llama"
    model, random = zoo.model(name), common.registry()["random"]
    cells = [common.cell(random, 8, "paper", seed) for seed in (0, 1)] + [common.cell(common.registry()["snapkv"], 8)]
    first = common.together(model, name, common.encoded(name), cells)
    again = common.together(model, name, common.encoded(name), cells)
    other = common.together(model, name, common.encoded(name, identity="zoo/1"), cells)
    assert [f.kept_digest for f in first] == [f.kept_digest for f in again]
    assert first[0].kept_digest != first[1].kept_digest and first[0].kept_digest != other[0].kept_digest
    assert first[2].kept_digest == other[2].kept_digest


@each("protocol", common.PROTOCOLS)
def test_stored_slots_of_a_fork_carry_their_true_positions(protocol):
    """Kept tokens their place in the prompt, and new ones the places after it, whatever was evicted before them."""
    name = "internvl"
    model, prompt = zoo.model(name), common.encoded(name)
    last = {}

    def look(kwargs) -> bool:
        last["cache"] = kwargs["past_key_values"]
        return False

    cells = [common.cell(parts.compressor(kind), 7, protocol) for kind in ("uniform", "all_ragged")]
    with faulty.failing(model, look, faulty.oom):
        forks = common.together(model, name, prompt, cells, common.rules(model, 5))
    context = forks[0].context_tokens
    fed = prompt.length - context + 4 + (protocol == "strict")  # the question, and all answer tokens but the last
    start = context - (protocol == "strict")
    assert last["cache"].get_seq_length() == start + fed
    for number, layer in enumerate(last["cache"].layers):
        for row, fork in enumerate(forks):
            for head, kept in enumerate(fork.kept[number]):
                positions = layer.positions[row, head]
                positions = positions[positions >= 0].tolist()
                assert positions[-fed:] == list(range(start, start + fed))
                assert len(positions) - fed == kept - (protocol == "strict")
                assert positions[:-fed] == sorted(set(positions[:-fed])) and max(positions[:-fed], default=0) < start


def test_result_fields_are_all_compared_by_these_tests():
    """Guards the comparison itself: only times, memory peaks and batch shapes may be left out."""
    ignored = common.CIRCUMSTANCES | common.PATH
    compared = {field.name for field in dataclasses.fields(common.ForkResult)} - ignored
    assert compared >= {"status", "error", "answer", "token_ids", "finish_reason", "kept", "kept_digest", "fallback"}
    assert compared >= {f"entries_{part}" for part in ("asked", "planned", "resident", "reachable", "appended", "end")}
    assert compared >= {"bytes_device", "bytes_metadata", "bytes_full", "window_effective", "tokens_from_compressed"}
