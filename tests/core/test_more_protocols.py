"""Promises of the protocols `query_aware` and `masked`, driven through `generate_alone`, the fork engine and stock models."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.compressor import Compressor, full
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.scorers.base import Scorer
from mmkv_bench.compression.scorers.recency import RecencyScorer
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation.encode import lengths_of
from mmkv_bench.generation.unshared_generation import generate_alone
from mmkv_bench.protocols import NAMES, protocol
from tests import reference, zoo
from tests.core import parts
from tests.generation import common

TOLERANCE = 2e-6
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava_next")


@dataclass(frozen=True)
class ValueSize(Scorer):
    """Looks at nothing but the entry itself."""

    def key(self, budget: int, length: int) -> tuple:
        return ()

    def score(self, obs, budget: int, seed: int) -> Tensor:
        return obs.value.float().norm(dim=-1)


def answered(model, prompt, made, budget, name: str, context: int | None = None, tokens: int = 4):
    """Logits `[n, V]`, kept indices per layer `[1, Hkv, m]`."""
    budget = None if budget is None else parts.budget(budget)
    out = generate_alone(model, prompt, made, budget, name, context=context, max_new_tokens=tokens)
    return torch.cat(out.logits), out.session.kept()


def cut_of(name: str) -> int:
    return lengths_of(protocol("query_aware"), common.encoded(name), common.family(name)).reduced


def test_what_a_protocol_says_of_a_prompt_fits_together():
    """The promises that the engine builds on, for every file of the folder."""
    for name in NAMES:
        rule = protocol(name)
        found = rule.lengths(20, 12)
        assert rule.name == name and rule.about
        assert 0 <= found.candidates <= found.reduced <= found.prefilled <= found.prompt == 20
        assert found.fed == found.refed + found.appended and (found.fed == 0) == (rule.from_prefill > 0)
        assert (found.reduced == 12) == rule.cuts
        assert not rule.prefills_again or found.prefilled == found.prompt


# ----------------------------------------------------------------------------------------------------- query_aware


@pytest.mark.parametrize("name", FAMILIES)
def test_query_aware_keeps_what_the_question_looks_at_and_answers_from_it_alone(name):
    """Kept entries are those of the stock model's own attention weights, summed by hand; question and answer see these and
    the question, by an explicit mask."""
    model, inputs, cut, budget, window = zoo.model(name), zoo.prompt(name), cut_of(name), 12, 4
    made = Compressor("window", WindowScorer(window, pool=1), Uniform(), TopK(recents=1), Evict())
    logits, kept = answered(model, inputs, made, budget, "query_aware", cut)
    zoo.set_attention(model, "eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    zoo.set_attention(model, "sdpa")
    for index, weight in zip(kept, weights, strict=True):
        heads = index.shape[1]
        mass = weight[0, :, -window:].unflatten(0, (heads, -1)).mean((1, 2))[:, : cut - 1]
        for row, wanted in zip(index[0], mass.topk(budget - 1).indices, strict=True):
            assert row.tolist() == sorted([*wanted.tolist(), cut - 1])
    masked = reference.masked_generate(model, inputs, reference.keep_of(kept, cut), cut, 4)
    assert (logits - torch.cat(tuple(masked.logits))).abs().max() <= TOLERANCE
    agnostic, others = answered(model, inputs, made, budget, "query_agnostic", cut)
    assert not all(torch.equal(a, b) for a, b in zip(kept, others, strict=True))
    assert (logits - agnostic).abs().max() > 0.01


@pytest.mark.parametrize("name", FAMILIES[1:])
def test_query_aware_is_query_agnostic_for_who_does_not_look_at_the_question_and_full_for_who_keeps_all(name):
    model, inputs, cut = zoo.model(name), zoo.prompt(name), cut_of(name)
    for scorer in (RecencyScorer(), ValueSize()):
        made = Compressor("blind", scorer, Uniform(), TopK(recents=1), Evict())
        (aware, kept), (agnostic, same) = (
            answered(model, inputs, made, 9, name_, cut) for name_ in ("query_aware", "query_agnostic")
        )
        assert all(torch.equal(a, b) for a, b in zip(kept, same, strict=True))
        assert (aware - agnostic).abs().max() <= TOLERANCE
    whole, _ = answered(model, inputs, full(), None, "query_aware", cut)
    stock = reference.generate(model, inputs, 4)
    assert (whole - torch.cat(tuple(stock.logits))).abs().max() <= TOLERANCE
    kept_all, _ = answered(model, inputs, parts.window(), "100%", "query_aware", cut)
    assert torch.equal(kept_all, whole)


# ---------------------------------------------------------------------------------------------------------- masked


@pytest.mark.parametrize("name", FAMILIES[::2])
def test_masked_is_a_prefill_whose_every_row_sees_kept_entries_and_itself(name):
    for attention, kind in (("sdpa", "uniform"), ("sdpa", "all_ragged"), ("eager", "head_ragged")):
        model, inputs = zoo.model(name, attention), zoo.prompt(name)
        length = inputs["input_ids"].shape[1]
        logits, kept = answered(model, inputs, parts.compressor(kind), length // 4, "masked")
        keep = reference.keep_of(kept, length - 1)

        def rule(layer: int, queries: Tensor, columns: int, keep=keep, cut=length - 1) -> Tensor:
            own = torch.arange(columns) == queries[:, None]
            shown = torch.ones(*keep[layer].shape[:2], columns, dtype=torch.bool)
            shown[..., : min(cut, columns)] = keep[layer][..., : min(cut, columns)]
            return shown[:, :, None] | own

        with reference.masked(model, rule) as cache:
            expected = reference.generate(model, inputs, 4, past_key_values=cache)
        assert (logits - torch.cat(tuple(expected.logits))).abs().max() <= TOLERANCE, (attention, kind)


@pytest.mark.parametrize("name", FAMILIES[::2])
def test_under_masked_what_is_evicted_everywhere_leaves_no_trace_and_under_strict_it_does(name):
    """Other embeddings for every token that no layer and no head keeps, in all prefills; the choice does not look at them."""
    model, inputs = zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    made = Compressor("recent", RecencyScorer(), Uniform(), TopK(sinks=4, recents=1), Evict())
    noise = torch.randn(length, model.config.get_text_config().hidden_size, generator=torch.Generator().manual_seed(4))
    moved = {}
    for rule in ("masked", "strict"):
        logits, kept = answered(model, inputs, made, length // 4, rule)
        evicted = torch.ones(length, dtype=torch.bool)
        evicted[torch.cat([index[index >= 0] for index in kept])] = False
        evicted[-1] = False
        assert int(evicted.sum()) > length // 2

        def change(module, args, kwargs, evicted=evicted):
            embeds = kwargs["inputs_embeds"]
            if embeds.shape[1] < length:
                return args, kwargs
            return args, kwargs | {"inputs_embeds": embeds + noise * evicted[:, None]}

        hook = model.get_decoder().register_forward_pre_hook(change, with_kwargs=True)
        try:
            other, same = answered(model, inputs, made, length // 4, rule)
        finally:
            hook.remove()
        assert all(torch.equal(a, b) for a, b in zip(kept, same, strict=True))
        moved[rule] = (logits - other).abs().max().item()
    assert moved["masked"] <= TOLERANCE and moved["strict"] > 0.01, moved


def test_masked_refuses_methods_that_do_more_than_evict_by_name():
    model, inputs, methods = zoo.model("qwen2_5_vl"), zoo.prompt("qwen2_5_vl"), common.registry()
    late = replace(common.registry("released")["meda"], reducer=Evict())
    for name, why in (
        ("look_m", "merges"),
        ("kivi", "fewer bits"),
        ("hybridkv", "off the device"),
        (late, "full cache first"),
    ):
        made = methods[name] if isinstance(name, str) else name
        with pytest.raises(UnsupportedError, match=f"protocol=masked.*{made.name} .*{why}"):
            answered(model, inputs, made, None if made.unbudgeted else 8, "masked")
    cells = [common.cell(methods[name], 8, "masked") for name in ("look_m", "snapkv")]
    refused, fine = common.together(model, "qwen2_5_vl", common.encoded("qwen2_5_vl"), cells)
    assert (refused.status, fine.status) == ("error", "ok") and "protocol=masked" in refused.error


# ------------------------------------------------------------------------------------------------------------ both


@pytest.mark.full
def test_both_fork_as_they_run_alone_beside_the_other_protocols():
    name, methods = "qwen2_5_vl", common.registry()
    cells = [common.cell(full(), None, rule) for rule in NAMES if not protocol(rule).apart]
    for rule in ("query_aware", "masked", "strict", "paper"):
        for method in ("snapkv", "adakv", "h2o_decode", "local", "oracle", "random"):
            cells += [common.cell(methods[method], budget, rule) for budget in (8, "70%")]
    common.assert_forks_equal_alone(zoo.model(name), name, common.encoded(name), cells)
