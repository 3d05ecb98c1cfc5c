"""Promises: sample order, method order and what ran before change nothing; after `attach` the model is what it was;
nobody reads evicted entries."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmkv_bench.compression.attention_backend import SESSIONS
from mmkv_bench.compression.compressor import full
from mmkv_bench.compression.session import attach
from tests import cover, reference, zoo
from tests.core import parts

METHODS = (parts.compressor("all_ragged"), parts.window(4), full())


def _outcome(model, inputs, made, identity, seed=0):
    budget = None if made.is_full else parts.budget(9)
    with attach(model, made, budget=budget, seed=seed, identity=identity) as session:
        run = reference.generate(model, inputs, 4)
        return [run.tokens, run.logits, *session.kept()]


def _equal(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@cover.few("name", zoo.FEW, keep=2, first=2)
def test_sample_order_and_method_order_change_nothing(name):
    model = zoo.model(name)
    samples = {f"sample-{i}": zoo.prompt(name, i, before=2 + 3 * i) for i in range(3)}
    jobs = list(itertools.product(samples, METHODS))
    forward = {(s, m.name): _outcome(model, samples[s], m, s) for s, m in jobs}
    for sample, made in reversed(jobs):
        assert _equal(_outcome(model, samples[sample], made, sample), forward[sample, made.name]), (sample, made.name)
    fresh = zoo.build(name)
    assert _equal(_outcome(fresh, samples["sample-2"], METHODS[0], "sample-2"), forward["sample-2", METHODS[0].name])


@cover.few("name", zoo.FEW, keep=2, first=1)
def test_prompts_inside_one_attach_do_not_see_each_other(name):
    model, inputs, other = zoo.model(name), zoo.prompt(name), zoo.prompt(name, 1, before=1)
    for made in METHODS[:2]:
        alone = _outcome(model, inputs, made, "x")
        with attach(model, made, budget=parts.budget(9), identity="x") as session:
            for disturbing in (other, inputs, zoo.without_visual(name, 3)):
                reference.generate(model, disturbing, 3)
                run = reference.generate(model, inputs, 4)
                assert _equal([run.tokens, run.logits, *session.kept()], alone)


def test_what_fails_inside_attach_leaves_no_trace_in_the_next_prompt():
    class Fails(parts.RandomScores):
        def score(self, obs, budget, seed):
            if obs.layer == 1:
                raise RuntimeError("out of luck")
            return super().score(obs, budget, seed)

    model, inputs = zoo.model("qwen2_5_vl"), zoo.prompt("qwen2_5_vl")
    before = _outcome(model, inputs, METHODS[0], "x")
    state = _state(model)
    with pytest.raises(RuntimeError, match="out of luck"):
        _outcome(model, inputs, parts.compressor(scorer=Fails()), "x")
    assert _state(model) == state
    assert _equal(_outcome(model, inputs, METHODS[0], "x"), before)


def test_seed_and_identity_choose_the_random_stream_and_nothing_else_does():
    model, inputs = zoo.model("llama"), zoo.prompt("llama")
    base = _outcome(model, inputs, METHODS[0], "a", seed=0)
    torch.manual_seed(123)
    torch.rand(7)
    assert _equal(_outcome(model, inputs, METHODS[0], "a", seed=0), base)
    state = torch.get_rng_state()
    for changed in (_outcome(model, inputs, METHODS[0], "a", 1), _outcome(model, inputs, METHODS[0], "b", 0)):
        assert not _equal(changed[2:], base[2:])
    assert torch.equal(torch.get_rng_state(), state), "the global random state is not touched"


def _state(model):
    """Everything of the model and the library that attach() could leave behind."""
    hooks = {
        name: [len(getattr(module, kind)) for kind in vars(module) if kind.endswith("_hooks")]
        for name, module in model.named_modules()
    }
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    forwards = {name: getattr(module.forward, "__func__", module.forward) for name, module in model.named_modules()}
    implementations = {
        name: getattr(module.config, "_attn_implementation", None)
        for name, module in model.named_modules()
        if hasattr(module, "config")
    }
    stock = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS if not name.startswith("mmkv_")}
    masks = {
        name: ALL_MASK_ATTENTION_FUNCTIONS[name]
        for name in ALL_MASK_ATTENTION_FUNCTIONS
        if not name.startswith("mmkv_")
    }
    config = model.config.to_json_string()
    return hooks, attributes, forwards, implementations, stock, masks, config, len(SESSIONS)


@cover.cases(zoo.ALL, ("sdpa", "eager"), each=1, keep=4)
def test_after_attach_the_model_is_exactly_what_it_was(name, combinations):
    for (attention,) in combinations:
        with cover.case(attention):
            stock, model, inputs = reference.stock(name, attention), zoo.model(name, attention), zoo.prompt(name)
            weights = {key: value.clone() for key, value in model.state_dict().items()}
            before = _state(model)
            for made in METHODS:
                _outcome(model, inputs, made, "x")
            assert _state(model) == before
            after = model.state_dict()
            assert weights.keys() == after.keys() and all(torch.equal(weights[key], after[key]) for key in weights)
            again = reference.generate(model, inputs, 6)
            assert torch.equal(again.logits, stock.logits) and torch.equal(again.tokens, stock.tokens)


@pytest.mark.parametrize("name", zoo.FEW)
def test_importing_and_attaching_leave_other_models_alone(name):
    model, inputs = zoo.model(name), zoo.prompt(name)
    neighbour, question = zoo.model("qwen2"), zoo.prompt("qwen2")
    stock = reference.generate(neighbour, question, 3)
    with attach(model, METHODS[0], budget=parts.budget(4)):
        during = reference.generate(neighbour, question, 3)
        reference.generate(model, inputs, 2)
        assert type(during.cache).__name__ == "DynamicCache"
    assert torch.equal(during.logits, stock.logits)


@cover.cases(zoo.FEW, parts.BUDGETS, ("sdpa", "eager"), each=3)
def test_nan_in_evicted_entries_changes_nothing(name, combinations):
    inputs = zoo.batch([zoo.prompt(name), zoo.prompt(name, 1, before=3)])
    for kind, attention in combinations:
        with cover.case(kind, attention):
            model, runs = zoo.model(name, attention), []
            for reducer in (None, parts.PoisonEvicted()):
                with attach(model, parts.compressor(kind, reducer=reducer), budget=parts.budget(8)):
                    runs.append(reference.generate(model, inputs, 5))
            assert torch.isfinite(runs[1].logits).all()
            assert torch.equal(runs[0].logits, runs[1].logits) and torch.equal(runs[0].tokens, runs[1].tokens)


def test_poison_is_visible_to_whoever_reads_evicted_entries():
    """The check above would be empty if NaN could not be seen: a reducer that keeps the poisoned tensors shows it."""

    class Leaky(parts.Reducer):
        def reduce(self, key, value, index, types=None):
            everything = torch.arange(key.shape[1]).expand(key.shape[0], -1)[:, : index.shape[1]]
            parts.PoisonEvicted().reduce(key, value, index)
            return parts.Evict().reduce(key, value, everything)

    model, inputs = zoo.model("llama"), zoo.prompt("llama")
    with attach(model, parts.compressor(reducer=Leaky()), budget=parts.budget(8)):
        assert torch.isnan(reference.generate(model, inputs, 3).logits[1:]).any()
