"""Promise: fidelity and likelihood are those of the distributions that a fork decodes from, and measuring changes nothing.

The references are stock `generate()` with forced tokens: over a full cache whose evicted entries are masked, and, for
methods that no mask can express (merging, quantising, retrieval, eviction while decoding), with the method attached.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mmkv_bench.compression.compressor import full
from mmkv_bench.devices import device as clocks
from mmkv_bench.generation import decode, engine, fidelity, forks
from mmkv_bench.generation.fidelity import ExtraMeasures
from mmkv_bench.generation.unshared_generation import generate_alone
from tests import cover, reference, zoo
from tests.core import parts
from tests.each import each
from tests.generation import common, faulty
from tests.oracles import distributions

FAMILIES = ("qwen2_5_vl", "llava_next", "internvl")
REFERENCE = (17, 230, 5, 44, 101, 9, 66)  # longer than the answers of these tests
EVERYTHING = ExtraMeasures(fidelity=True, reference=REFERENCE, samples=True)
CLOSE = 2e-6  # as logits elsewhere in these tests


def measures(result) -> dict:
    return {name: getattr(result, name) for name in common.MEASURES}


def answers(result) -> dict:
    return common.content(result, common.MEASURES)


def context_of(name: str, prompt, protocol: str) -> int | None:
    return common.context_cut(prompt, common.family(name)) if protocol == "query_agnostic" else None


def attached(model, name: str, prompt, cell, tokens, **options):
    """Raw logits [n, V] of stock `generate()` with the cell's compressor attached, writing `tokens`; and the session."""
    context = context_of(name, prompt, cell.protocol)
    given = {"context": context, "identity": prompt.identity, "token_types": prompt.types, "seed": cell.seed}
    given |= {"max_new_tokens": len(tokens), "logits_processor": distributions.forcing(tokens)}
    made = generate_alone(model, prompt.inputs, cell.compressor, cell.budget, cell.protocol, **given, **options)
    return torch.stack(made.logits)[:, 0], made.session


def naive(full_logits, logits, tokens) -> tuple[list, list]:
    pairs = list(zip(full_logits, logits, strict=True))
    return [distributions.kl(p, q) for p, q in pairs], [
        distributions.first(p) == distributions.first(q) for p, q in pairs
    ]


@each("protocol", common.PROTOCOLS)
@cover.few("name", FAMILIES)
def test_fidelity_and_likelihood_are_those_of_masked_full_attention(name, protocol):
    model, prompt = zoo.model(name), common.encoded(name)
    methods = [parts.compressor(kind) for kind in ("uniform", "all_ragged")] + [parts.window()]
    cells = [common.cell(full(), None, protocol)] + [common.cell(m, b, protocol) for m in methods for b in (3, "40%")]
    results = common.together(model, name, prompt, cells, extras=EVERYTHING)
    answer = results[0].token_ids
    context = context_of(name, prompt, protocol)
    cut = {"paper": prompt.length, "strict": prompt.length - 1}.get(protocol, context)
    of_full = distributions.masked(model, prompt.inputs, answer)
    worst = 0.0
    for cell, result in zip(cells[1:], results[1:], strict=True):
        _, session = attached(model, name, prompt, cell, answer)
        keep = reference.keep_of(session.kept(), cut)
        kl, agree = naive(of_full, distributions.masked(model, prompt.inputs, answer, keep, cut), answer)
        assert result.forced_kl == pytest.approx(kl, abs=CLOSE) and result.forced_agree == agree
        expected = distributions.masked(model, prompt.inputs, REFERENCE, keep, cut)
        nll = [distributions.nll(row, token) for row, token in zip(expected, REFERENCE, strict=True)]
        assert result.reference_nll == pytest.approx(nll, abs=CLOSE)
        assert (result.forced_kl[0] == 0.0) == (protocol == "paper")
        worst = max(worst, max(kl))
    assert worst > 1000 * CLOSE, "eviction must have moved distributions"
    nll = [
        distributions.nll(r, t)
        for r, t in zip(distributions.masked(model, prompt.inputs, REFERENCE), REFERENCE, strict=True)
    ]
    assert results[0].reference_nll == pytest.approx(nll, abs=CLOSE)


def test_a_continuation_is_compared_at_its_tokens_and_a_budget_of_everything_changes_nothing():
    """Against masked full attention, and for eviction while decoding stock `generate()` with the method attached."""
    name = "llama"
    model, prompt = zoo.model(name), common.encoded(name)
    methods = common.for_text(common.registry(model=name))
    cells = [common.cell(full(), None), common.cell(parts.compressor("uniform"), "40%")]
    cells += [common.cell(methods[key], "40%") for key in ("snapkv", "h2o_decode")]
    cells += [common.cell(methods[key], "100%") for key in ("snapkv", "h2o_decode")]
    extras = ExtraMeasures(fidelity=True, reference=REFERENCE, continuation=True)
    results = common.together(model, name, prompt, cells, extras=extras)
    of_full = distributions.masked(model, prompt.inputs, REFERENCE)
    for cell, result in zip(cells, results, strict=True):
        assert result.status == "ok" and len(result.token_ids) < len(REFERENCE) == len(result.forced_kl)
        logits, session = attached(model, name, prompt, cell, REFERENCE) if cell.budget else (of_full, None)
        if session is not None and cell.compressor.decoding is None:
            keep = reference.keep_of(session.kept(), prompt.length)
            logits = distributions.masked(model, prompt.inputs, REFERENCE, keep, prompt.length)
        kl, agree = naive(of_full, logits, REFERENCE)
        assert result.forced_kl == pytest.approx(kl, abs=CLOSE) and result.forced_agree == agree, cell.cell
        nll = [distributions.nll(row, token) for row, token in zip(logits, REFERENCE, strict=True)]
        assert result.reference_nll == pytest.approx(nll, abs=CLOSE)
        evicts = cell.budget is not None and cell.budget.fraction != 1
        assert (max(kl[1:]) > 1000 * CLOSE) == evicts, "where nothing is evicted nothing moves"
        assert evicts or (max(result.forced_kl) < 1e-6 and all(result.forced_agree))
        assert nll[1:] != pytest.approx(nll[:-1], abs=0.01), "a token's number is no neighbour's"
        assert not evicts or kl[1:] != pytest.approx(kl[:-1], abs=CLOSE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "reading"),
    [
        pytest.param("qwen2_5_vl", "paper", marks=pytest.mark.full),
        ("llava_next", "released"),
        pytest.param("llava_next", "paper", marks=pytest.mark.full),
        pytest.param("qwen2_5_vl", "released", marks=pytest.mark.full),
    ],
)
def test_every_method_is_measured_as_it_decodes_with_the_method_attached(name, reading):
    model, prompt = zoo.model(name), common.encoded(name)
    protocols = common.PROTOCOLS if reading == "paper" else ("paper", "strict")
    methods = {key: made for key, made in common.registry(reading, name).items() if key not in ("full", "oracle")}
    cells = common.full_cells(protocols)
    for number, made in enumerate(methods.values()):
        budgets = (None,) if made.unbudgeted else (8 + number % 3,)
        cells += [common.cell(made, budget, protocol) for budget in budgets for protocol in protocols]
    results = common.together(model, name, prompt, cells, extras=EVERYTHING)
    of_full = {
        cell.protocol: (result.token_ids, attached(model, name, prompt, cell, result.token_ids)[0])
        for cell, result in zip(cells[: len(protocols)], results, strict=False)
    }
    acting = 0
    for cell, result in zip(cells, results, strict=True):
        assert result.status == "ok", result.error
        answer, expected = of_full[cell.protocol]
        kl, agree = naive(expected, attached(model, name, prompt, cell, answer)[0], answer)
        assert result.forced_kl == pytest.approx(kl, abs=CLOSE), cell.cell
        assert result.forced_agree == agree, cell.cell
        logits = attached(model, name, prompt, cell, REFERENCE)[0]
        nll = [distributions.nll(row, token) for row, token in zip(logits, REFERENCE, strict=True)]
        assert result.reference_nll == pytest.approx(nll, abs=CLOSE), cell.cell
        acting += cell.compressor.decoding is not None
    assert acting >= 5 * len(protocols), "quantising, retrieving and evicting policies must be among them"


@pytest.mark.full
@cover.few("name", (*FAMILIES, "llama"), first=1)
def test_measuring_changes_no_answer_no_count_and_no_digest(name):
    model, prompt = zoo.model(name), common.encoded(name)
    protocols = common.PROTOCOLS if name in zoo.MULTIMODAL else common.PROTOCOLS[:2]
    methods = common.registry(model=name)
    methods = methods if name in zoo.MULTIMODAL else common.for_text(methods)
    cells = common.full_cells(protocols)
    for made in (made for key, made in methods.items() if key != "full"):
        budgets = (None,) if made.unbudgeted else (7, prompt.length + 3)
        cells += [common.cell(made, budget, protocol) for budget in budgets for protocol in protocols]
    cells = common.some(cells)
    off = common.together(model, name, prompt, cells)
    on = common.together(model, name, prompt, cells, extras=EVERYTHING)
    assert [answers(a) for a in on] == [answers(b) for b in off]
    assert all(value is None for result in off for value in measures(result).values())
    assert all(len(r.forced_kl) == len(r.forced_agree) == 6 and len(r.reference_nll) == len(REFERENCE) for r in on)
    assert [r.cell for r in on if r.reference_samples is not None] == [
        cell.cell for cell in common.full_cells(protocols)
    ]


@pytest.mark.full
def test_batches_and_the_order_of_cells_change_no_measure():
    name = "qwen2_5_vl"
    model, prompt = zoo.model(name), common.encoded(name)
    methods = [common.registry()[key] for key in ("snapkv", "h2o", "kivi", "look_m", "hybridkv")]
    cells = [common.cell(m, None if m.unbudgeted else 9, p) for m in methods for p in common.PROTOCOLS]
    cells += common.full_cells()
    first = common.together(model, name, prompt, cells, extras=EVERYTHING)
    second = common.together(model, name, prompt, cells[::-1], extras=EVERYTHING, fork_batch=2)[::-1]
    for a, b in zip(first, second, strict=True):
        assert a.forced_kl == pytest.approx(b.forced_kl, abs=1e-6)
        assert a.forced_agree == b.forced_agree
        assert a.reference_nll == pytest.approx(b.reference_nll, abs=1e-6)
        assert a.reference_samples == b.reference_samples


@pytest.mark.slow
def test_without_full_among_the_cells_its_answer_is_decoded_for_them():
    name = "internvl"
    model, prompt = zoo.model(name), common.encoded(name)
    cells = [common.cell(common.registry(model=name)["snapkv"], 6, protocol) for protocol in common.PROTOCOLS]
    beside = common.together(model, name, prompt, cells + common.full_cells(), extras=EVERYTHING)
    apart = common.together(model, name, prompt, cells, extras=EVERYTHING)
    assert [measures(a) for a in apart] == [measures(b) for b in beside[: len(cells)]]


@pytest.mark.full
def test_one_forward_pass_gives_what_stepping_gives():
    """Blocks of any length, and single steps, put the same numbers into the rows."""
    name = "llava_next"
    model, prompt = zoo.model(name), common.encoded(name)
    cells = [common.cell(parts.compressor(kind), 5, p) for kind in ("uniform", "all_ragged") for p in common.PROTOCOLS]
    cells += common.full_cells()
    found = []
    for tokens in (1, 2, 3, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fidelity, "BLOCK_BYTES", 4 * zoo.VOCABULARY * tokens)  # of one row
            found.append(common.together(model, name, prompt, cells, extras=EVERYTHING, fork_batch=1))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert a.forced_kl == pytest.approx(b.forced_kl, abs=1e-6)
            assert a.forced_agree == b.forced_agree
            assert a.reference_nll == pytest.approx(b.reference_nll, abs=1e-6)


@cover.few("name", FAMILIES, first=2)
def test_full_against_full_is_measured_and_is_nothing_in_float32(name, monkeypatch):
    model, prompt = zoo.model(name), common.encoded(name)
    for result in common.together(model, name, prompt, common.full_cells(), extras=EVERYTHING):
        assert max(result.forced_kl) < 1e-9 and all(result.forced_agree)

    def damaged(prefilled, protocol, reserve):
        cache = forks.copied(prefilled, protocol, reserve)
        cache.layers[1].keys[:, :, :-3] *= 1.2
        return cache

    monkeypatch.setattr(fidelity, "copied", damaged)
    for result in common.together(model, name, prompt, common.full_cells(), extras=EVERYTHING):
        assert max(result.forced_kl[1:]) > 1e-6, "the floor is a constant"


def test_half_precision_is_compared_in_full_precision_of_what_the_model_gave():
    name = "internvl"
    model, prompt = zoo.build(name).to(torch.bfloat16), common.encoded(name)
    for key in ("pixel_values",):
        prompt.inputs[key] = prompt.inputs[key].to(torch.bfloat16)
    cells = [common.cell(full(), None), common.cell(parts.compressor(), 4)]
    of_full, evicted = common.together(model, name, prompt, cells, extras=ExtraMeasures(fidelity=True))
    assert all(kl >= 0.0 for kl in of_full.forced_kl + evicted.forced_kl)
    assert all(of_full.forced_agree)
    assert max(evicted.forced_kl) > 10 * max(of_full.forced_kl)


def no_forced(kwargs) -> bool:
    """Whether a forward is one of several tokens after the prefill."""
    return kwargs["past_key_values"].get_seq_length() > 0 and faulty.tokens(kwargs) > 1


def test_out_of_memory_while_measuring_leaves_answers_as_they_are(caplog):
    name = "qwen2_5_vl"
    model, prompt = zoo.model(name), common.encoded(name)
    cells = common.full_cells(("paper", "strict"))
    cells += [common.cell(common.registry()[key], 9, p) for key in ("snapkv", "h2o") for p in ("paper", "strict")]
    plain = common.together(model, name, prompt, cells)
    for when in (no_forced, lambda kwargs: no_forced(kwargs) and faulty.rows(kwargs) > 1):
        with faulty.failing(model, when, faulty.oom) as raised:
            results = common.together(model, name, prompt, cells, extras=EVERYTHING, fork_batch=4)
        assert raised or when is not no_forced
        assert [answers(a) for a in results] == [answers(b) for b in plain]
    assert "could not be measured" in caplog.text and faulty.OOM in caplog.text


def test_a_fork_that_fails_fails_alone_and_the_others_are_measured():
    name = "qwen2_5_vl"
    model, prompt = zoo.model(name), common.encoded(name)
    healthy = [common.cell(parts.compressor(kind), 6, "strict") for kind in parts.BUDGETS]
    sick = [
        common.cell(faulty.compressor(kind, reducer=faulty.FaultyReducer(kind)), 6, "strict", name=kind)
        for kind in ("oom", "error", "nan_key")
    ]
    results = common.together(model, name, prompt, healthy + sick, extras=EVERYTHING)
    assert [result.status for result in results] == ["ok"] * len(healthy) + ["oom", "error", "nan"]
    alone = common.together(model, name, prompt, healthy, extras=EVERYTHING)
    for a, b in zip(results, alone, strict=False):
        assert a.forced_kl == pytest.approx(b.forced_kl, abs=1e-6)
    assert results[-1].forced_kl is None and results[-1].reference_nll is None


def test_times_and_limits_do_not_see_the_measuring(monkeypatch):
    name = "qwen2_5_vl"
    model, prompt = zoo.model(name), common.encoded(name)
    for module in (engine, decode, clocks):
        monkeypatch.setattr(module, "time", faulty.CLOCK)
    slow = []

    def when(kwargs) -> bool:
        if no_forced(kwargs):
            slow.append(faulty.CLOCK.now)
            faulty.CLOCK.now += 100.0
        return False

    cells = common.full_cells(("paper",)) + [common.cell(common.registry()["snapkv"], b) for b in (5, 9)]
    with faulty.failing(model, when, faulty.oom):
        results = common.together(model, name, prompt, cells, extras=EVERYTHING, timeout_s=50.0)
    assert len(slow) >= 4
    for result in results:
        assert (result.status, result.decode_s, result.tpot_s) == ("ok", 0.0, 0.0)


def test_a_measure_that_runs_past_the_time_limit_is_missing_and_the_answers_stay(monkeypatch, caplog):
    name = "qwen2_5_vl"
    model, prompt = zoo.model(name), common.encoded(name)
    for module in (engine, decode, clocks, fidelity):
        monkeypatch.setattr(module, "time", faulty.CLOCK)
    monkeypatch.setattr(
        fidelity, "BLOCK_BYTES", 4 * zoo.VOCABULARY * 2
    )  # two tokens of one row: three passes a measure
    cells = common.full_cells(("paper",)) + [common.cell(common.registry()["snapkv"], b) for b in (5, 9)]
    plain = common.together(model, name, prompt, cells)

    def measured(seconds) -> list:
        passes = []

        def when(kwargs) -> bool:
            if no_forced(kwargs):
                faulty.CLOCK.now += seconds(len(passes))
                passes.append(kwargs)
            return False

        with faulty.failing(model, when, faulty.oom):
            results = common.together(model, name, prompt, cells, extras=EVERYTHING, timeout_s=50.0, fork_batch=1)
        assert [answers(a) for a in results] == [answers(b) for b in plain]
        assert {(result.status, result.decode_s) for result in results} == {("ok", 0.0)}
        return [len(passes), *((r.forced_kl is not None, r.reference_nll is not None) for r in results)]

    count, *found = measured(lambda number: 15.0)
    assert count > 10 and found == [(True, True)] * 3, "the limit is of each measure and not of all together"
    assert "could not be measured" not in caplog.text
    _, *found = measured(lambda number: 100.0 * (number == count - 3))  # first pass of the last fork's reference
    assert sorted(found) == [(True, False), (True, True), (True, True)]
    _, *found = measured(lambda number: 100.0)
    assert found == [(False, False)] * 3
    assert "measuring ran past timeout_s" in caplog.text


@pytest.mark.full
def test_sampled_answers_depend_on_seed_and_sample_alone():
    name = "internvl"
    model, prompt = zoo.model(name), common.encoded(name)
    cells = common.full_cells() + [common.cell(common.registry(model=name)["snapkv"], 6, "strict")]
    extras, long = ExtraMeasures(samples=True), common.rules(model, 24)
    first = common.together(model, name, prompt, cells, long, extras=extras)
    again = common.together(model, name, prompt, cells[1:2], long, extras=extras, fork_batch=1)
    other = common.together(model, name, common.encoded(name, identity="zoo/1"), cells[:1], long, extras=extras)
    assert first[1].reference_samples == again[0].reference_samples
    assert len(set(first[0].reference_samples)) == 2 and first[-1].reference_samples is None
    assert first[0].reference_samples != other[0].reference_samples
    assert first[0].reference_samples[0] != first[0].answer


def test_result_fields_of_measures_are_those_that_the_rows_have():
    from mmkv_bench.store.schema import RESPONSES

    fields = {field.name for field in dataclasses.fields(common.ForkResult)}
    assert not common.MEASURES - fields and not common.MEASURES - set(RESPONSES.names)
