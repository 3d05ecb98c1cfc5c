"""Promise: what goes wrong in one fork is that cell's status; every other fork's result stays what it was."""

from __future__ import annotations

import weakref

import pytest
import torch

from mmkv_bench.devices import device as clocks
from mmkv_bench.generation import decode, engine
from mmkv_bench.generation.engine import Engine
from tests import zoo
from tests.core import parts
from tests.each import each
from tests.generation import common, faulty

NAME = "qwen2_5_vl"


def healthy(protocols=common.PROTOCOLS) -> list:
    methods = [common.registry()[name] for name in ("snapkv", "keydiff", "random")] + [parts.compressor("all_ragged")]
    cells = [common.cell(method, budget, protocol) for method in methods for budget in (4, "40%", 1.0)
             for protocol in protocols]  # fmt: skip
    return common.full_cells(protocols) + cells


@pytest.fixture(scope="module")
def baseline() -> dict:
    """cell -> result of a run without any fault."""
    results = common.together(zoo.model(NAME), NAME, common.encoded(NAME), healthy())
    assert {result.status for result in results} == {"ok"}
    return {result.cell: result for result in results}


@pytest.fixture
def clock(monkeypatch):
    for module in (engine, decode, clocks):
        monkeypatch.setattr(module, "time", faulty.CLOCK)


def check(results, baseline, sick: dict[str, tuple[str, str]], ignore=frozenset()) -> None:
    """Cells of `sick` have that status and a message with that text; all others equal the baseline."""
    seen = set()
    for result in results:
        if result.cell in sick:
            status, text = sick[result.cell]
            assert result.status == status and text in result.error, (result.cell, result.status, result.error)
            seen.add(result.cell)
        else:
            assert common.content(result, ignore) == common.content(baseline[result.cell], ignore), result.cell
    assert seen == set(sick)


FAULTS = {
    "reducer out of memory": ({"reducer": faulty.FaultyReducer("oom")}, "oom", faulty.OOM),
    "reducer out of host memory": ({"reducer": faulty.FaultyReducer("host_oom")}, "oom", faulty.OOM),
    "reducer broken": ({"reducer": faulty.FaultyReducer("error")}, "error", "RuntimeError: broken, on purpose"),
    "reducer slow": ({"reducer": faulty.FaultyReducer("timeout")}, "timeout", "timeout_s"),
    "reducer writes NaN keys": ({"reducer": faulty.FaultyReducer("nan_key")}, "nan", "NaN logits at new token"),
    "reducer writes NaN values": ({"reducer": faulty.FaultyReducer("nan_value")}, "nan", "NaN logits at new token"),
    "scorer out of memory": ({"scorer": faulty.FaultyScorer("oom")}, "oom", faulty.OOM),
    "scorer broken in the last layer": ({"scorer": faulty.FaultyScorer("error", 2)}, "error", "broken, on purpose"),
    "scorer slow": ({"scorer": faulty.FaultyScorer("timeout")}, "timeout", "scoring took"),
    "scorer gives NaN": ({"scorer": faulty.FaultyScorer("nan")}, "nan", "non-finite scores in layer 1"),
    "scorer gives infinity": ({"scorer": faulty.FaultyScorer("inf", 0)}, "nan", "non-finite scores in layer 0"),
    "scorer without a key": ({"scorer": faulty.FaultyKey()}, "error", "no key, on purpose"),
    "scorer without fallbacks": ({"scorer": faulty.FaultyFallbacks()}, "error", "no fallbacks, on purpose"),
    "allocator broken": ({"allocator": faulty.FaultyAllocator()}, "error", "no caps, on purpose"),
    "allocator above the budget": ({"allocator": faulty.Overdraw()}, "error", "OverBudgetError"),
}


@each("fault", FAULTS, keep=4)
def test_a_fault_in_one_fork_leaves_every_other_result_unchanged(fault, baseline, clock):
    made, status, text = FAULTS[fault]
    cells, sick = healthy(), {}
    for place, protocol in ((1, "paper"), (17, "strict"), (len(cells), "query_agnostic")):
        one = common.cell(faulty.compressor(f"sick_{protocol}", **made), 6, protocol)
        cells.insert(place, one)
        sick[one.cell] = (status, text)
    results = common.together(zoo.model(NAME), NAME, common.encoded(NAME), cells, timeout_s=50)
    check(results, baseline, sick)
    for result in results:
        if result.cell in sick:
            assert result.answer is None and result.token_ids == [] and result.finish_reason is None


def test_several_faults_at_once_each_end_their_own_cell(baseline, clock):
    cells, sick = healthy(), {}
    for place, (fault, (made, status, text)) in enumerate(FAULTS.items()):
        one = common.cell(faulty.compressor(fault, **made), 5, common.PROTOCOLS[place % 3])
        cells.insert(3 * place, one)
        sick[one.cell] = (status, text)
    results = common.together(zoo.model(NAME), NAME, common.encoded(NAME), cells, timeout_s=50)
    check(results, baseline, sick)


@pytest.mark.full
@each("rows", (1, 2, 5))
def test_a_device_that_holds_few_rows_gives_the_same_results(rows, baseline):
    """Out of memory above `rows` rows at any step of decoding: batches are halved until they fit, nobody fails."""
    model = zoo.model(NAME)
    with faulty.failing(model, lambda k: faulty.rows(k) > rows, faulty.oom) as raised:
        results = common.together(model, NAME, common.encoded(NAME), healthy())
    assert raised
    check(results, baseline, {})
    assert max(result.fork_rows for result in results) <= rows


def test_out_of_memory_late_in_decoding_is_retried_from_the_start(baseline):
    model, calls = zoo.model(NAME), []

    def third_step(kwargs) -> bool:
        calls.append(faulty.rows(kwargs))
        return faulty.rows(kwargs) > 4 and calls[-3:].count(calls[-1]) == 3

    with faulty.failing(model, third_step, faulty.oom) as raised:
        results = common.together(model, NAME, common.encoded(NAME), healthy())
    assert raised
    check(results, baseline, {})


def test_the_cache_of_a_failed_batch_is_freed_before_its_halves_are_gathered():
    """On a device that is nearly full the retry would otherwise run out of memory again, down to the last fork."""
    model, held, alive = zoo.model(NAME), [], []

    def too_many(kwargs) -> bool:
        first = kwargs["past_key_values"].layers[0]
        if first.positions is None:  # the prefill, or the full cache that is decoded from
            return False
        alive.append(sum(reference() is not None for reference in held))
        held.append(weakref.ref(first._key_storage))
        return faulty.rows(kwargs) > 1

    with faulty.failing(model, too_many, faulty.oom) as raised:
        common.together(model, NAME, common.encoded(NAME), healthy(("strict",)), common.rules(model, 1))
        assert len(raised) > 5
    assert max(alive) == 0


def test_a_scorer_that_failed_keeps_no_tensor_of_the_prefill_alive():
    references = []

    class Leaky(faulty.RandomScores):
        def score(self, obs, budget, seed):
            references.append(weakref.ref(obs))
            boom = obs.key  # noqa: F841 - a frame that holds the layer's keys
            raise RuntimeError("broken, on purpose")

    model = zoo.model(NAME)
    with Engine(model, common.family(NAME), common.rules(model), common.tokenizer()) as running:
        results = running.answer(
            common.encoded(NAME), [common.cell(faulty.compressor("leaky", scorer=Leaky()), b) for b in (3, 5)]
        )
        assert {result.status for result in results} == {"error"}
        assert all(reference() is None for reference in references)


def test_a_failed_prefill_is_the_status_of_every_cell_and_the_next_sample_is_answered(baseline):
    model, prompt = zoo.model(NAME), common.encoded(NAME)

    def is_prefill(kwargs) -> bool:
        return kwargs["past_key_values"].get_seq_length() == 0

    with Engine(model, common.family(NAME), common.rules(model), common.tokenizer()) as running:
        for error, status in ((faulty.oom, "oom"), (lambda: RuntimeError("corrupt image"), "error")):
            with faulty.failing(model, is_prefill, error):
                results = running.answer(prompt, healthy())
            assert {(r.status, r.token_ids == [], r.answer) for r in results} == {(status, True, None)}
            assert all(str(error()) in r.error for r in results)
            check(running.answer(prompt, healthy()), baseline, {})


def test_a_prefill_that_fails_for_the_context_alone_leaves_the_other_protocols(baseline):
    model, prompt = zoo.model(NAME), common.encoded(NAME)
    cells = healthy()
    context = next(r.context_tokens for r in baseline.values() if "query_agnostic" in r.cell)
    assert context < prompt.length
    with faulty.failing(model, lambda k: faulty.tokens(k) == context, faulty.oom):
        results = common.together(model, NAME, prompt, cells)
    check(results, baseline, {c.cell: ("oom", faulty.OOM) for c in cells if c.protocol == "query_agnostic"})


def test_nan_logits_of_the_prefill_are_the_status_of_every_cell(baseline):
    model, prompt, cells = zoo.model(NAME), common.encoded(NAME), healthy()

    def poison(module, args, output):
        if output.shape[0] == 1 and poisoned:
            output[..., 7] = float("nan")

    poisoned, hook = [True], model.lm_head.register_forward_hook(poison)
    try:
        assert {result.status for result in common.alone(model, NAME, prompt, cells[:4])} == {"nan"}
        with Engine(model, common.family(NAME), common.rules(model), common.tokenizer()) as running:
            results = running.answer(prompt, cells)
            assert {(r.status, r.answer) for r in results} == {("nan", None)}
            poisoned.clear()
            check(running.answer(prompt, cells), baseline, {})
    finally:
        hook.remove()


def test_a_fault_while_decoding_from_the_shared_cache_ends_the_cells_that_keep_everything(baseline):
    """`full` decodes from the prefill's own cache: a fault in the middle must give it back as it was."""
    model, prompt, cells = zoo.model(NAME), common.encoded(NAME), healthy()

    def borrowed_by_paper(kwargs) -> bool:
        layer = kwargs["past_key_values"].layers[0]
        return layer.positions is None and layer.seen == prompt.length + 2 and not raised

    raised = []
    with faulty.failing(model, borrowed_by_paper, lambda: raised.append(1) or faulty.oom()):
        results = common.together(model, NAME, prompt, cells)
    sick = [r.cell for r in results if r.status != "ok"]
    protocols = {c.protocol for c in cells if c.cell in sick}
    assert len(protocols) == 1 and len(sick) == 5, "full and the four cells at budget 1.0 are one fork"
    check(results, baseline, dict.fromkeys(sick, ("oom", faulty.OOM)))


def test_time_that_runs_out_while_decoding_ends_the_forks_and_not_the_sample(clock):
    model, prompt = zoo.model(NAME), common.encoded(NAME)

    def slow(kwargs) -> bool:
        faulty.CLOCK.now += 20.0
        return False

    with faulty.failing(model, slow, faulty.oom):
        results = common.together(model, NAME, prompt, healthy(("paper",)), common.rules(model, 6), timeout_s=50)
        assert {r.status for r in results} == {"timeout"}
        results = common.together(model, NAME, prompt, healthy(("paper",)), common.rules(model, 3), timeout_s=50)
        assert {r.status for r in results} == {"ok"}


@pytest.mark.full
def test_a_memory_cap_that_allows_two_forks_decodes_two_at_a_time_and_gives_the_same_results(baseline):
    model, prompt, cells = zoo.model(NAME), common.encoded(NAME), healthy()
    held = []

    def measure(kwargs) -> bool:
        layers = kwargs["past_key_values"].layers
        if layers[0].positions is not None:
            stored = [(own._key_storage, own._value_storage, own._position_storage) for own in layers]
            held.append((sum(tensor.nbytes for tensors in stored for tensor in tensors), faulty.rows(kwargs)))
        return False

    heads, reserve = 2, 7  # 6 new tokens and one slot to spare
    slot = heads * (2 * zoo.HEAD_DIM * 4 + 4)  # key, value and position
    uniform = [common.cell(parts.compressor(), 10, "paper", seed) for seed in range(5)]
    two = 2 * zoo.LAYERS * slot * (10 + reserve)
    with faulty.failing(model, measure, faulty.oom):
        for cap, rows in ((two - 1, {1}), (two, {1, 2}), (10**9, {5})):  # five forks: the last one is alone
            results = common.together(model, NAME, prompt, uniform, fork_memory=cap)
            assert {result.fork_rows for result in results} == rows
        for cap in (1, two, 2 * two, 10**9):
            held.clear()
            check(common.together(model, NAME, prompt, cells, fork_memory=cap), baseline, {})
            assert held and all(size <= cap or count == 1 for size, count in held)
            check(common.together(model, NAME, prompt, cells, fork_memory=cap, fork_batch=2), baseline, {})


class Watching(Engine):
    """Compares the prefilled cache before the first and after the last batch."""

    def __enter__(self):
        self.snapshots = {}
        return super().__enter__()

    def _decode(self, forks, *rest):
        prefilled = forks[0].group.prefilled
        layers = prefilled.cache.layers
        state = [(own.stored, own.seen, own.growths, own.keys.clone(), own.values.clone()) for own in layers]
        before = self.snapshots.setdefault(prefilled.length, state)
        super()._decode(forks, *rest)
        for layer, (stored, seen, growths, key, value) in zip(layers, before, strict=True):
            assert (layer.stored, layer.seen, layer.growths) == (stored, seen, growths)
            assert layer.positions is None
            assert torch.equal(layer.keys, key) and torch.equal(layer.values, value)


@pytest.mark.parametrize("name", ("qwen2_5_vl", "llava", "llama"))
def test_the_prefilled_cache_is_bit_for_bit_what_it_was_after_all_forks(name):
    """Also after strict `full`, whose last slot is dropped and written again, and with all protocols in one call."""
    model, prompt = zoo.model(name), common.encoded(name)
    protocols = common.PROTOCOLS if name != "llama" else common.PROTOCOLS[:2]
    for order in (1, -1):
        cells = healthy(protocols)[::order]
        with Watching(model, common.family(name), common.rules(model), common.tokenizer()) as running:
            results = running.answer(prompt, cells)
            assert len(running.snapshots) == (2 if "query_agnostic" in protocols else 1)
        assert {result.status for result in results} == {"ok"}


def test_memory_that_runs_out_is_told_apart_whoever_says_it():
    """The allocators of PyTorch and numpy really refuse 2^60 bytes, and the operating system says ENOMEM."""
    import errno

    import numpy as np

    from mmkv_bench.generation.result import status_of

    refusals = [lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: np.empty(1 << 60, dtype=np.uint8)]
    for refused in refusals:
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            refused()
        assert status_of(caught.value) == "oom", caught.value
    assert status_of(OSError(errno.ENOMEM, "Cannot allocate memory")) == "oom"
    assert {status_of(error) for error in (RuntimeError("shapes differ"), OSError(errno.EIO, "I/O"))} == {"error"}
