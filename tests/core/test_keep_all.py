"""Promise: a compressor that keeps everything is bit-identical to the untouched model."""

from __future__ import annotations

import pytest
import torch

from mmkv_bench.compression.compressor import full
from mmkv_bench.compression.session import attach
from tests import cover, reference, zoo
from tests.core import parts

ATTENTION = ("sdpa", "eager")


def _same(run, stock):
    assert torch.equal(run.logits, stock.logits)
    assert torch.equal(run.tokens, stock.tokens)


@cover.cases(zoo.ALL, ("full", "100%"), ATTENTION, keep=4)
def test_keep_all_is_bit_identical_to_the_untouched_model(name, combinations):
    for kept, attention in combinations:
        with cover.case(kept, attention):
            stock, model, inputs = reference.stock(name, attention), zoo.model(name, attention), zoo.prompt(name)
            made, budget = (full(), None) if kept == "full" else (parts.compressor(), parts.budget(kept))
            with attach(model, made, budget=budget):
                _same(reference.generate(model, inputs, 6), stock)


@cover.cases(zoo.ALL, ATTENTION, each=1, keep=4)
def test_keep_all_forced_through_the_gather_path_is_bit_identical(name, combinations):
    for (attention,) in combinations:
        with cover.case(attention):
            stock, model, inputs = reference.stock(name, attention), zoo.model(name, attention), zoo.prompt(name)
            with attach(model, parts.keep_all(), budget=parts.budget(1)) as session:
                _same(reference.generate(model, inputs, 6), stock)
                assert all(layer.positions is not None for layer in session.cache.layers), "the gather path"


@cover.cases(zoo.FEW, ATTENTION, each=1)
def test_keep_all_of_a_left_padded_batch_is_bit_identical(name, combinations):
    for (attention,) in combinations:
        model = zoo.model(name, attention)
        inputs = zoo.batch([zoo.prompt(name, 0), zoo.prompt(name, 1, before=2)])
        stock = reference.generate(model, inputs, 5)
        for session in (attach(model, full()), attach(model, parts.keep_all(), budget=parts.budget(1))):
            with cover.case(attention, session), session:
                _same(reference.generate(model, inputs, 5), stock)


@cover.cases(zoo.FEW, (0, 1, 100_000), parts.BUDGETS, each=2)
def test_prompt_within_budget_is_bit_identical_to_full_and_says_so(name, combinations):
    stock, model, inputs = reference.stock(name), zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    for more, kind in combinations:
        made = parts.compressor(kind)
        with cover.case(more, kind), attach(model, made, budget=parts.budget(length + more)) as session:
            _same(reference.generate(model, inputs, 6), stock)
            assert session.listener.fallbacks == [("prompt_within_budget",)]
            assert all(torch.equal(k, torch.arange(length).expand_as(k)) for k in session.kept())
    with attach(model, parts.compressor(), budget=parts.budget(length - 1)) as session:
        assert not torch.equal(reference.generate(model, inputs, 6).logits, stock.logits), "one entry less is evicted"
        assert session.listener.fallbacks == [()]


@pytest.mark.parametrize("name", zoo.FEW)
def test_early_eos_ends_the_answer_where_the_untouched_model_ends_it(name):
    model, inputs = zoo.model(name), zoo.prompt(name)
    eos = int(reference.generate(model, inputs, 6).tokens[0, 2])
    model = zoo.model(name, eos=eos)
    stock = reference.generate(model, inputs, 6)
    assert stock.tokens.shape[1] <= 3 and int(stock.tokens[0, -1]) == eos
    with attach(model, full()):
        _same(reference.generate(model, inputs, 6), stock)
