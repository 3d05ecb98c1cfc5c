"""Promises of the protocols `strict` and `query_agnostic`, driven through `generate_alone` and stock `generate()`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmkv_bench.compression.compressor import full
from mmkv_bench.errors import MMKVError
from mmkv_bench.families.facts import context_length, model_facts
from mmkv_bench.generation.unshared_generation import generate_alone
from tests import cover, reference, zoo
from tests.core import parts

TOLERANCE = 2e-6
ATTENTION = ("sdpa", "eager")
PROTOCOLS = ("paper", "strict", "query_agnostic")
FEW_MULTIMODAL = tuple(name for name in zoo.FEW if name in zoo.MULTIMODAL)


def _run(model, inputs, made, budget, protocol, tokens=5, **options):
    """Tokens, logits and session of one answer under a protocol."""
    budget = None if budget is None else parts.budget(budget)
    output = generate_alone(model, inputs, made, budget, protocol, max_new_tokens=tokens, **options)
    length = inputs["input_ids"].shape[1]
    return reference.Run(output.sequences[:, length:], torch.stack(output.logits), output.session.cache), output.session


def _close(run, other):
    assert (run.logits - other.logits).abs().max() <= TOLERANCE
    assert torch.equal(run.tokens, other.tokens)


def _cut(name: str, inputs: dict[str, Tensor]) -> int:
    return context_length(inputs["input_ids"], model_facts(zoo.config(name)))


# ---------------------------------------------------------------------------------------------------------- strict


@cover.cases(zoo.ALL, parts.BUDGETS, ATTENTION, keep=4)
def test_strict_first_token_sees_only_kept_entries(name, combinations):
    """First-token logits, and all later ones, equal full attention whose last prompt row sees the kept slots and
    itself."""
    inputs = zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    for kind, attention in combinations:
        with cover.case(kind, attention):
            stock, model = reference.stock(name, attention), zoo.model(name, attention)
            run, session = _run(model, inputs, parts.compressor(kind), length // 4, "strict")
            keep = reference.keep_of(session.kept(), length - 1)
            _close(run, reference.masked_generate(model, inputs, keep, length - 1, 5))
            assert (run.logits[0] - stock.logits[0]).abs().max() > 0.02, "the first token is not the compressed cache's"


@cover.cases(zoo.FEW, (1, 2, 8, "30%"), parts.BUDGETS, each=3)
def test_strict_cache_holds_exactly_the_budget_after_the_last_prompt_token(name, combinations):
    """Counted from the tensors once the re-fed token has written its own K and V; every head holds that token once."""
    model, inputs = zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    for budget, kind in combinations:
        with cover.case(budget, kind):
            entries = budget if isinstance(budget, int) else int(0.3 * length)
            run, session = _run(model, inputs, parts.compressor(kind), budget, "strict", tokens=1)
            counts = parts.stored(session)
            heads = counts[0].shape[1]
            assert sum(int(count.sum()) for count in counts) == entries * heads * zoo.LAYERS
            for layer in session.cache.layers:
                positions = layer.slot_positions()
                assert ((positions == length - 1).sum(-1) == 1).all(), "the last prompt token, in every head once"
                assert int(positions.max()) == length - 1
                assert layer.get_seq_length() == length
            keep = reference.keep_of(session.kept(), length - 1)
            _close(run, reference.masked_generate(model, inputs, keep, length - 1, 1))


@cover.cases(zoo.ALL, ATTENTION, each=1, keep=4)
def test_strict_keep_all_equals_full_of_the_same_protocol(name, combinations):
    for (attention,) in combinations:
        with cover.case(attention):
            stock, model, inputs = reference.stock(name, attention, 5), zoo.model(name, attention), zoo.prompt(name)
            length = inputs["input_ids"].shape[1]
            whole, session = _run(model, inputs, full(), None, "strict")
            stored = [int(count.sum()) for count in parts.stored(session)]
            assert stored == [(length + 4) * session.kept()[0].shape[1]] * 3
            for made, budget in _keeping_all(length):
                run, _ = _run(model, inputs, made, budget, "strict")
                assert torch.equal(run.logits, whole.logits) and torch.equal(run.tokens, whole.tokens), made.name
            _close(whole, stock)


def _keeping_all(length: int):
    """Three ways to keep everything of so many candidates."""
    return (parts.keep_all(), 1), (parts.compressor("all_ragged"), "100%"), (parts.window(), length)


@pytest.mark.parametrize("name", zoo.FEW)
def test_strict_keeps_its_window_from_the_prompt_with_the_last_token(name):
    """The observation window counts the last token, which is then fed again: the other rows of the window stay."""
    model, inputs = zoo.model(name), zoo.prompt(name)
    length = inputs["input_ids"].shape[1]
    _, session = _run(model, inputs, parts.window(4), 9, "strict", tokens=1)
    for kept in session.kept():
        assert kept.shape[2] == 8
        assert (kept[..., -3:] == torch.arange(length - 4, length - 1)).all()


def test_strict_prompt_of_one_token_is_answered_from_that_token():
    for name in zoo.FEW:
        model, inputs = zoo.model(name), zoo.without_visual(name, 1)
        stock = reference.generate(model, inputs, 3)
        for made, budget in ((full(), None), (parts.compressor(), 1), (parts.keep_all(), 1)):
            _close(_run(model, inputs, made, budget, "strict", tokens=3)[0], stock)


# --------------------------------------------------------------------------------------------------- query_agnostic


def _with_hidden(model, inputs, made, cut: int):
    """Last hidden states of all rows under `query_agnostic`, and what `_run` returns."""
    box = []
    hidden = reference.recorded_hidden(
        model, lambda: box.append(_run(model, inputs, made, cut // 4, "query_agnostic", context=cut))
    )
    return hidden, *box[0]


@cover.cases(zoo.MULTIMODAL, parts.BUDGETS, ATTENTION, keep=4)
def test_query_agnostic_question_rows_see_kept_context_and_the_question(name, combinations):
    """Logits of every question row and of every decoded token equal the masked reference."""
    inputs = zoo.prompt(name)
    length, cut = inputs["input_ids"].shape[1], _cut(name, inputs)
    for kind, attention in combinations:
        with cover.case(kind, attention):
            stock, model = reference.stock(name, attention), zoo.model(name, attention)
            hidden, run, session = _with_hidden(model, inputs, parts.compressor(kind), cut)
            keep = reference.keep_of(session.kept(), cut)
            _close(run, reference.masked_generate(model, inputs, keep, cut, 5))
            with torch.no_grad():
                question = model.get_output_embeddings()(hidden[:, cut:length])
            assert question.shape[1] == 9
            assert (question - reference.masked_rows(model, inputs, keep, cut)[:, cut:]).abs().max() <= TOLERANCE
            assert (run.logits[0] - stock.logits[0]).abs().max() > 0.01, "answered from the full context"


@cover.cases(
    zoo.MULTIMODAL, (parts.compressor("all_ragged"), parts.window(4), parts.window(3, "layer_ragged")), each=1, keep=6
)
def test_query_agnostic_kept_context_does_not_depend_on_the_question(name, combinations):
    model, inputs = zoo.model(name), zoo.prompt(name)
    cut = _cut(name, inputs)
    questions = [inputs["input_ids"][0, cut:].tolist(), zoo.text(9, 81), zoo.text(1, 82), zoo.text(17, 83)]
    for (made,) in combinations:
        kept, answers = [], []
        for question in questions:
            ids = torch.tensor([inputs["input_ids"][0, :cut].tolist() + question])
            asked = zoo.with_ids(name, inputs, ids)
            run, session = _run(model, asked, made, "30%", "query_agnostic", tokens=2, context=cut)
            kept.append(session.kept())
            answers.append(run.logits[0])
        with cover.case(made.name):
            assert all(torch.equal(a, b) for other in kept[1:] for a, b in zip(kept[0], other, strict=True))
            assert not torch.equal(answers[0], answers[1]), "the questions were not read"


@cover.cases(FEW_MULTIMODAL, (1, 6, "50%", 0.1), parts.BUDGETS, each=3)
def test_query_agnostic_budget_counts_the_context_alone(name, combinations):
    model, inputs = zoo.model(name), zoo.prompt(name)
    length, cut = inputs["input_ids"].shape[1], _cut(name, inputs)
    entries = {1: 1, 6: 6, "50%": cut // 2, 0.1: max(1, cut // 10)}
    for budget, kind in combinations:
        with cover.case(budget, kind):
            _, session = _run(model, inputs, parts.compressor(kind), budget, "query_agnostic", tokens=3, context=cut)
            kept, counts = session.kept(), parts.stored(session)
            heads = kept[0].shape[1]
            assert sum(int((index >= 0).sum()) for index in kept) == entries[budget] * heads * zoo.LAYERS
            for index, count in zip(kept, counts, strict=True):  # the question and 2 of 3 answer tokens are kept whole
                assert torch.equal(count, (index >= 0).sum(-1) + (length - cut) + 2)


@cover.cases(zoo.MULTIMODAL, ATTENTION, each=1, keep=4)
def test_query_agnostic_keep_all_equals_full_of_the_same_protocol(name, combinations):
    for (attention,) in combinations:
        with cover.case(attention):
            stock, model, inputs = reference.stock(name, attention, 5), zoo.model(name, attention), zoo.prompt(name)
            cut = _cut(name, inputs)
            whole, _ = _run(model, inputs, full(), None, "query_agnostic", context=cut)
            for made, budget in _keeping_all(cut):
                run, _ = _run(model, inputs, made, budget, "query_agnostic", context=cut)
                assert torch.equal(run.logits, whole.logits) and torch.equal(run.tokens, whole.tokens), made.name
            _close(whole, stock)


def test_query_agnostic_without_a_cut_is_refused():
    model, inputs = zoo.model("llava"), zoo.prompt("llava")
    for context in (None, 0, inputs["input_ids"].shape[1]):
        with pytest.raises(MMKVError, match="context"):
            _run(model, inputs, parts.compressor(), 4, "query_agnostic", context=context)


# -------------------------------------------------------------------------------------------------- all protocols


@cover.cases(FEW_MULTIMODAL, parts.BUDGETS, PROTOCOLS, each=2)
def test_nan_in_evicted_entries_changes_no_token_of_any_protocol(name, combinations):
    model, inputs = zoo.model(name), zoo.prompt(name)
    for kind, protocol in combinations:
        with cover.case(kind, protocol):
            context = _cut(name, inputs) if protocol == "query_agnostic" else None
            clean, poisoned = (
                _run(model, inputs, parts.compressor(kind, reducer=reducer), 7, protocol, context=context)[0]
                for reducer in (None, parts.PoisonEvicted())
            )
            assert torch.isfinite(poisoned.logits).all()
            assert torch.equal(clean.tokens, poisoned.tokens) and torch.equal(clean.logits, poisoned.logits)


@pytest.mark.parametrize("name", FEW_MULTIMODAL)
def test_full_of_every_protocol_answers_like_the_untouched_model_to_an_early_eos(name):
    inputs, cut = zoo.prompt(name), _cut(name, zoo.prompt(name))
    model = zoo.model(name, eos=int(reference.stock(name).tokens[0, 2]))
    stock = reference.generate(model, inputs, 6)
    assert stock.tokens.shape[1] <= 3
    for protocol in PROTOCOLS:
        context = cut if protocol == "query_agnostic" else None
        run, _ = _run(model, inputs, full(), None, protocol, tokens=6, context=context)
        with cover.case(protocol):
            _close(run, stock)


@cover.few("name", zoo.MULTIMODAL, keep=4)
def test_positions_under_every_protocol_are_those_of_the_untouched_model(name):
    """The re-fed last token, the question and the answer sit at their true positions (same mrope triple)."""
    model, inputs = zoo.model(name), zoo.prompt(name)
    cut, length = _cut(name, inputs), inputs["input_ids"].shape[1]

    def rotations(run) -> list[tuple[Tensor, Tensor]]:
        seen = []
        hook = (
            model.get_decoder()
            .layers[0]
            .self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: seen.append(kwargs["position_embeddings"]), with_kwargs=True
            )
        )
        run()
        hook.remove()
        return [torch.cat(axis, dim=1) for axis in zip(*seen, strict=True)]

    stock = rotations(lambda: reference.generate(model, inputs, 5))
    strict = rotations(lambda: _run(model, inputs, parts.compressor(), 6, "strict"))
    for before, after in zip(stock, strict, strict=True):  # the last prompt token comes twice
        assert torch.equal(after[:, length], before[:, length - 1])
        assert torch.equal(before, torch.cat([after[:, :length], after[:, length + 1 :]], dim=1))
    agnostic = rotations(lambda: _run(model, inputs, parts.compressor(), 6, "query_agnostic", context=cut))
    for before, after in zip(stock, agnostic, strict=True):
        assert torch.equal(before, after)


@pytest.mark.slow
def test_under_strict_entries_that_stay_remember_what_was_evicted_around_them():
    """What docs and tables say of strict, on the embedded model: pages that differ only in cells which no layer and no head
    keeps get other answers from the same slots, and a page prefilled twice does not."""
    from scripts.strict_absorbs import twice

    pages = list(twice("walk3", "small", "streamingllm", 64, 4))
    assert all(page.moved > 100 for page in pages)
    assert any(page.first != page.second for page in pages)
    again = list(twice("walk3", "small", "streamingllm", 64, 2, move=False))
    assert all(page.first == page.second and page.moved == 0 for page in again)
