"""protocol=turns: a conversation about a document under a budget, against stock models fed by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import DynamicCache

from mmkv_bench.compression.streaming import check_turns
from mmkv_bench.devices import device as clocks
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation import decode, turns
from mmkv_bench.generation.encode import encode, reference_tokens, turn_tokens
from mmkv_bench.generation.engine import Engine
from mmkv_bench.models.chat_template import rendered
from mmkv_bench.protocols import protocol
from tests import zoo
from tests.each import each
from tests.generation import common, faulty
from tests.generation.test_encode import parts, picture
from tests.generation.test_questions import QUESTIONS, asked, document

NAMES = ("llama", "qwen2_5_vl")
METHODS = ("expected_attention", "h2o", "keydiff", "mmshift", "random", "snapkv", "streamingllm")
TOKENS = 6
BUDGET = 16
OWN = {"question_known", "entries_max", "entries_peak", "eviction_rounds", "entries_evicted", "fork_batch", "cell"}


def conversation(name: str):
    """Prompts of a document's questions with what stands between an answer and the next."""
    prompts = document(name)
    between = tuple(torch.tensor([zoo.text(length, 200 + length)]) for length in (5, 8, 6))
    whole = dataclasses.replace(prompts[0].document, turns=between)
    return [
        dataclasses.replace(one, document=dataclasses.replace(whole, number=place)) for place, one in enumerate(prompts)
    ]


def cells(*names: str, budget=BUDGET, rule: str = "turns") -> list:
    methods = common.registry(model="llama")
    return [common.cell(methods[one], None if one == "full" else budget, rule, name=one) for one in names]


def stock_answer(model, inputs, count: int) -> list[int]:
    out = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.slow
@each("ends", [False, True])
@each("name", NAMES)
def test_the_full_cache_holds_the_conversation_that_a_stock_model_holds(name, ends):
    model, prompts = zoo.model(name), conversation(name)
    whole = prompts[0].document
    first = prompts[whole.order[0]]
    eos = (
        stock_answer(model, {**first.inputs, "attention_mask": torch.ones_like(first.input_ids)}, TOKENS)[3]
        if ends
        else None
    )
    model = zoo.model(name, eos=eos)
    answers = (
        asked(name, prompts, cells("full"), whole.order) if eos is None else ask(name, model, prompts, cells("full"))
    )
    ids, lengths = first.input_ids, set()
    for turn, number in enumerate(whole.order):
        inputs = zoo.with_ids(name, first.inputs, ids)
        expected = stock_answer(model, inputs, TOKENS)
        row = answers[number, "full"]
        assert row.token_ids == expected and row.prompt_tokens == ids.shape[1]
        assert row.question_known == ",".join(map(str, whole.order[: turn + 1]))
        said = expected[:-1] if expected[-1] == eos else expected
        lengths.add(len(said))
        if turn < 3:
            ids = torch.cat([ids, torch.tensor([said], dtype=torch.int64), whole.turns[turn]], 1)
    assert not ends or min(lengths) < TOKENS
    zoo.model(name)


def ask(name: str, model, prompts, chosen, order=None) -> dict:
    answers = {}
    with Engine(model, common.family(name), common.rules(model), common.tokenizer()) as engine:
        for number in prompts[0].document.order if order is None else order:
            for one in engine.answer(prompts[number], chosen):
                assert one.status == "ok", one.error
                answers[number, one.cell] = one
    return answers


@pytest.mark.slow
@each("name", NAMES, keep=1)
def test_the_first_turn_is_that_of_query_aware_and_no_turn_holds_more_than_the_budget(name):
    prompts = conversation(name)
    whole = prompts[0].document
    talks = asked(name, prompts, cells("full", *METHODS), whole.order)
    aware = asked(name, prompts, cells("full", *METHODS, rule="query_aware"), whole.order[:1])
    heads = zoo.model(name).config.get_text_config().num_key_value_heads * zoo.LAYERS
    for method in ("full", *METHODS):
        first = whole.order[0]
        common.assert_same([talks[first, method]], [aware[first, method]], ignore=common.PATH | OWN)
        evicted = [talks[number, method].entries_evicted for number in whole.order]
        for turn, number in enumerate(whole.order):
            row = talks[number, method]
            if method == "full":
                assert row.entries_resident == row.context_tokens * heads and row.entries_evicted == 0
                continue
            assert row.entries_max == BUDGET and row.entries_resident == row.entries_asked == BUDGET * heads
            assert max(max(layer) for layer in row.kept) == BUDGET and row.eviction_rounds == turn
            assert row.entries_end > row.entries_resident and (turn == 0 or row.entries_peak > BUDGET)
        assert method == "full" or evicted == sorted(set(evicted)), "every turn evicts"
    assert len({tuple(row.token_ids) for row in talks.values()}) > 8, "what is evicted must matter"


@pytest.mark.slow
@each("name", NAMES)
def test_later_turns_are_answered_as_by_a_stock_model_on_the_entries_that_stay(name):
    """Keys and values are gathered by hand in a stock cache; what stays is taken from the rows, and of `streamingllm` known."""
    model, prompts = zoo.model(name), conversation(name)
    whole = prompts[0].document
    first, cut = prompts[whole.order[0]], None
    cut = first.context_tokens or common.context_cut(first, common.family(name))
    for method in ("streamingllm", "keydiff"):
        rows = asked(name, prompts, cells(method), whole.order)
        talk = [rows[number, method] for number in whole.order]
        cache, ids = DynamicCache(), first.input_ids
        inputs = zoo.with_ids(name, first.inputs, ids)
        model(**{key: one for key, one in inputs.items() if key != "attention_mask"}, past_key_values=cache)
        start = int(model.model.rope_deltas) if hasattr(model.model, "rope_deltas") else 0
        places = [torch.arange(ids.shape[1]).expand(layer.keys.shape[1], -1) for layer in cache.layers]
        cache, places = gathered(cache, places, talk[0].selected)
        seen, lead = cut, ids[:, cut:]
        for turn, row in enumerate(talk):
            if turn:
                said = torch.tensor([talk[turn - 1].token_ids])
                cache, places = fed(model, cache, places, torch.cat([lead, said], 1), seen, start)[:2]
                seen += lead.shape[1] + said.shape[1]
                if method == "streamingllm":
                    known = [0, 1, 2, 3, *range(seen - BUDGET + 4, seen)]
                    assert all(head.tolist() == known for layer in row.selected for head in layer)
                cache, places = gathered(cache, places, row.selected)
                lead = whole.turns[turn - 1]
            answer, trial, spots, feed, at = [], cache, places, lead, seen
            for _ in range(TOKENS):
                trial, spots, logits = fed(model, trial, spots, feed, at, start)
                at += feed.shape[1]
                answer.append(int(logits.argmax()))
                feed = torch.tensor([answer[-1:]])
            assert answer == row.token_ids, (method, turn)


def gathered(cache, places, selected):
    """A stock cache with the entries of these tokens, and their places."""
    made, kept = DynamicCache(), []
    for number, (layer, spots, index) in enumerate(zip(cache.layers, places, selected, strict=True)):
        pairs = zip(spots.tolist(), index.tolist(), strict=True)
        slots = torch.tensor([[row.index(place) for place in head] for row, head in pairs])
        wide = slots[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
        made.update(layer.keys.gather(2, wide), layer.values.gather(2, wide), number)
        kept.append(index.long())
    return made, kept


@torch.no_grad()
def fed(model, cache, places, ids, seen, start):
    """Feed tokens to a copy of a stock cache at their true positions; returns it, the places and the last logits."""
    made = DynamicCache()
    for number, layer in enumerate(cache.layers):
        made.update(layer.keys, layer.values, number)
    positions = torch.arange(seen, seen + ids.shape[1])[None] + start
    if model.config.get_text_config() is not model.config and hasattr(model.model, "get_rope_index"):
        positions = positions.expand(3, 1, -1)
    logits = model(input_ids=ids, position_ids=positions, past_key_values=made).logits[0, -1]
    new = torch.arange(seen, seen + ids.shape[1])
    return made, [torch.cat([one, new.expand(one.shape[0], -1)], 1) for one in places], logits


@pytest.mark.slow
def test_a_row_does_not_depend_on_which_questions_were_asked_before():
    name = "llama"
    prompts, chosen = conversation(name), cells("full", "snapkv", "random")
    whole = prompts[0].document
    forward = asked(name, prompts, chosen, whole.order)
    for order in (whole.order[2:3], whole.order[::-1], [whole.order[1], whole.order[1], whole.order[3]]):
        for key, one in asked(name, prompts, chosen, order).items():
            common.assert_same([one], [forward[key]], ignore=common.PATH)
    large = asked(name, prompts, cells("snapkv", budget=10**6), whole.order)
    for number in whole.order:
        assert large[number, "snapkv"].token_ids == forward[number, "full"].token_ids


def test_what_no_conversation_can_be_given_to_is_refused_with_the_reason():
    methods = common.registry(model="llama")
    for name, why in (
        ("oracle", "scores by the answer"),
        ("kvzip", "feeding the whole context again"),
        ("pyramidkv", "more entries than others"),
        ("adakv", "more entries than others"),
        ("look_m", "merges"),
        ("kivi", "acts while the answer is decoded"),
    ):
        with pytest.raises(UnsupportedError, match=f"protocol=turns .*{name} .*{why}"):
            check_turns(methods[name])
    for name in METHODS:
        check_turns(methods[name])
    for name in zoo.HYBRID:
        prompt = dataclasses.replace(common.encoded(name), context_tokens=30)
        (row,) = common.together(zoo.model(name), name, prompt, cells("snapkv"))
        assert row.status == "error" and "protocol=turns feeds a turn again" in row.error
    model, prompt = zoo.model("llama"), dataclasses.replace(common.encoded("llama"), context_tokens=30)
    (row,) = common.alone(model, "llama", prompt, cells("snapkv"))
    assert row.status == "error" and "protocol=turns asks one question after another" in row.error
    prompts = conversation("llama")
    short = dataclasses.replace(common.family("llama"), max_context=prompts[0].length + 12)
    with Engine(zoo.model("llama"), short, common.rules(zoo.model("llama")), common.tokenizer()) as engine:
        rows = [engine.answer(prompts[number], cells("snapkv"))[0] for number in prompts[0].document.order]
    assert rows[0].status == "ok" and "the conversation has" in rows[-1].error
    assert protocol("turns").needs_questions and len(prompts) == QUESTIONS


@pytest.mark.slow
@each("name", ["qwen2_5_vl", "llama", "llava_next", "smolvlm"])
def test_the_tokens_between_answers_are_those_of_the_whole_conversation(name):
    _, processor, family = parts(name)
    media = [{"type": "image"}] * (name != "llama")
    first = [{"role": "user", "content": [*media, {"type": "text", "text": "What is it?"}]}]
    images = [picture()] * len(media)
    prompt = encode(processor, family, "one", first, images)
    answer = "Yes, it is."
    said = list(reference_tokens(processor, first, answer))
    ids, messages = prompt.input_ids[0].tolist(), list(first)
    for question in ("Where?", "And why not?"):
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            {"role": "user", "content": [{"type": "text", "text": question}]},
        ]
        ids += said + turn_tokens(processor, first, question)[0].tolist()
        whole = encode(processor, family, "one", messages, images).input_ids[0].tolist()
        assert ids == whole, rendered(processor, messages)


def test_a_turn_whose_second_feeding_takes_too_long_is_a_row_with_status_timeout(monkeypatch):
    """The third long forward is the first turn's that is fed again: behind the prefill and the first question."""
    for module in (turns, decode, clocks):
        monkeypatch.setattr(module, "time", faulty.CLOCK)
    name = "qwen2_5_vl"
    model, prompts, long = zoo.model(name), conversation(name), []
    order = prompts[0].document.order

    def slow(seconds):
        def before(kwargs) -> bool:
            long.extend([1] * (faulty.tokens(kwargs) > 1))
            faulty.CLOCK.now += seconds(len(long)) if faulty.tokens(kwargs) > 1 else 0.0
            return False

        return before

    for seconds, words in (
        (lambda place: 60.0 * (place == 3), "feeding turn 1 again ran past timeout_s"),
        (lambda place: 30.0, "decoding ran past timeout_s"),  # the turn's two feedings together
    ):
        long.clear()
        with (
            faulty.failing(model, slow(seconds), faulty.oom),
            Engine(model, common.family(name), common.rules(model), common.tokenizer(), timeout_s=50) as engine,
        ):
            first, second = (engine.answer(prompts[number], cells("keydiff"))[0] for number in order[:2])
        assert first.status == "ok" and second.status == "timeout" and words in second.error
    slow_method = common.cell(faulty.compressor("slow", scorer=faulty.FaultyScorer("timeout")), BUDGET, "turns")
    with Engine(model, common.family(name), common.rules(model), common.tokenizer(), timeout_s=50) as engine:
        (row,) = engine.answer(prompts[order[0]], [slow_method])
    assert row.status == "timeout" and "scoring took" in row.error
