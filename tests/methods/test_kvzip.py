"""KVzip: its scores and kept sets against stock attention rows, a replay that leaves no trace, its words, its refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from PIL import Image
from transformers import GptOssForCausalLM

from mmkv_bench.api import attached_model as api
from mmkv_bench.compression.replay import ReplayText
from mmkv_bench.compression.session import attach
from mmkv_bench.config.files import content
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.generation.encode import encode
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.prefill import prefill
from mmkv_bench.generation.unshared_generation import generate_alone
from mmkv_bench.methods.build import build_compressor
from mmkv_bench.protocols import protocol
from tests import cover, zoo
from tests.each import each
from tests.generation import common
from tests.generation.test_encode import parts
from tests.generation.test_questions import NEW, document
from tests.oracles import kvzip

FAMILIES = ("llama", "qwen2_5_vl", "qwen3_vl", "llava_next")
WORDS = ReplayText(prefix=3, whole=(11, 12, 13), part=(21, 22), tail=(31, 32))
RULES = ("paper", "strict", "query_agnostic", "query_aware")


def made(**parameters):
    return build_compressor("kvzip", content("method", "kvzip") | parameters, "paper")


def prompted(name: str, words: ReplayText = WORDS):
    """A prompt of the zoo that ends with the template's tail, and the number of its context's tokens."""
    inputs = zoo.prompt(name)
    ids = torch.cat([inputs["input_ids"], torch.tensor([list(words.tail)], dtype=torch.int64)], 1)
    prompt = dataclasses.replace(common.encoded(name, zoo.with_ids(name, inputs, ids)), words=words)
    if name == "llama":
        prompt.context_tokens = prompt.length - 9
    return prompt, prompt.context_tokens or common.context_cut(prompt, common.family(name))


def stock(name: str):
    model = zoo.build(name)
    model.load_state_dict(zoo.model(name).state_dict())
    zoo.set_attention(model, "eager")
    return model.eval()


@cover.cases(FAMILIES, [(7, 4), (2048, 2), (20, 0)], each=1)
def test_what_stays_is_what_stock_attention_rows_of_a_repetition_say(name, combinations):
    for ((chunk, sinks),) in combinations:
        with cover.case(chunk, sinks):
            stays_what_stock_rows_say(name, chunk, sinks)


def stays_what_stock_rows_say(name, chunk, sinks):
    model, (prompt, cut) = zoo.model(name), prompted(name)
    heads = model.config.get_text_config().num_key_value_heads
    inputs = {key: value for key, value in prompt.inputs.items() if key != "attention_mask"}
    words = (list(WORDS.whole), list(WORDS.part), list(WORDS.tail))
    reference, by_end = stock(name), {}
    cells = [common.cell(made(chunk=chunk, sinks=sinks), 9, rule) for rule in RULES]
    cells += [common.cell(made(chunk=chunk, sinks=sinks, layerwise=True), 9, "query_agnostic", name="layerwise")]
    for cell, result in zip(cells, common.together(model, name, prompt, cells), strict=True):
        assert result.status == "ok" and result.fallback == [], (result.error, result.fallback)
        end = cut if protocol(cell.protocol).cuts else prompt.length - len(WORDS.tail)
        if end not in by_end:  # protocols with the same context have the same scores
            by_end[end] = kvzip.scores(reference, inputs, heads, end, WORDS.prefix, chunk, sinks, words)
        scores = by_end[end]
        behind = 0 if protocol(cell.protocol).cuts else len(WORDS.tail) - (cell.protocol == "strict")
        scores = [[[*head, *[float("inf")] * behind] for head in layer] for layer in scores]
        count = (9 - (cell.protocol == "strict")) * heads
        if cell.cell == "layerwise":
            expected = [kvzip.kept([layer], count)[0] for layer in scores]
        else:
            expected = kvzip.kept(scores, count * len(scores))
        assert [[[j for j in row if j >= 0] for row in layer.tolist()] for layer in result.selected] == expected
        assert result.entries_resident == result.entries_asked


def test_scores_are_those_of_stock_rows_and_the_replay_leaves_the_cache_as_it_was():
    for name in FAMILIES:
        model, (prompt, cut) = zoo.model(name), prompted(name)
        heads = model.config.get_text_config().num_key_value_heads
        inputs = {key: value for key, value in prompt.inputs.items() if key != "attention_mask"}
        cell = common.cell(made(chunk=10), 9, "query_aware")
        lengths = {cell.protocol: protocol(cell.protocol).lengths(prompt.length, cut)}
        plain = common.cell(common.registry(model=name)["keydiff"], 9, "query_aware")
        with Engine(model, common.family(name), common.rules(model), common.tokenizer()) as engine:
            first, second = (
                prefill(engine.session, prompt, [one], lengths, Meter(engine.device), 8) for one in (cell, plain)
            )
        for ours, theirs in zip(first.cache.layers, second.cache.layers, strict=True):
            assert (ours.stored, ours.seen, ours.capacity, ours.growths) == (
                theirs.stored,
                theirs.seen,
                theirs.capacity,
                theirs.growths,
            )
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert torch.equal(first.logits, second.logits) and torch.equal(first.last_positions, second.last_positions)
        assert sum(first.score_seconds.values()) > 0
        words = (list(WORDS.whole), list(WORDS.part), list(WORDS.tail))
        expected = torch.tensor(kvzip.scores(stock(name), inputs, heads, cut, WORDS.prefix, 10, 4, words))
        ((layers),) = first.scores.values()
        for layer, reference in zip(layers, expected.clamp_max(2.0), strict=True):
            torch.testing.assert_close(layer[:, :cut], reference.float(), atol=2e-6, rtol=2e-5)


@pytest.mark.slow
@each("name", ("llama", "qwen2_5_vl"))
def test_forks_equal_runs_of_their_own_under_every_protocol(name):
    model, (prompt, _) = zoo.model(name), prompted(name)
    cells = [common.cell(made(chunk=12), budget, rule) for rule in (*RULES, "masked") for budget in (6, 14)]
    common.assert_forks_equal_alone(model, name, prompt, [*cells, *common.full_cells(RULES)])


def test_no_question_is_known_to_it():
    """What stays of a context is the same, whether the prefill saw the question or not."""
    for name in ("llama", "qwen2_5_vl"):
        prompt, _ = prompted(name)
        cells = [common.cell(made(chunk=12), 8, rule) for rule in ("query_agnostic", "query_aware")]
        first, second = common.together(zoo.model(name), name, prompt, cells)
        assert first.kept_digest == second.kept_digest and first.token_ids == second.token_ids
        cells = [common.cell(made(chunk=12), 8, rule) for rule in ("query_agnostic", *NEW)]
        rows = common.together(zoo.model(name), name, document(name)[2], cells)
        assert {row.status for row in rows} == {"ok"} and len({row.kept_digest for row in rows}) == 1


def test_a_prompt_of_tokens_is_repeated_without_words_and_small_budgets_say_what_gives_way():
    prompt, _ = prompted("llama")
    cells = [common.cell(made(), budget, "query_agnostic") for budget in (3, 9)]
    bare = dataclasses.replace(prompt, words=ReplayText())
    small, _ = common.together(zoo.model("llama"), "llama", prompt, cells)
    assert small.fallback == ["protected_reduced"] and small.entries_resident == small.entries_asked
    assert common.together(zoo.model("llama"), "llama", bare, cells)[1].fallback == ["no_instruction"]


def test_the_words_around_a_context_are_the_templates_and_the_instructions():
    for name, media in (("qwen2_5_vl", True), ("llama", False), ("llava_next", True)):
        _, processor, family = parts(name)
        tokenizer = getattr(processor, "tokenizer", processor)
        content_ = [{"type": "image"}] * media + [{"type": "text", "text": "Read the page. What is it?"}]
        said = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
        for system in ([], said) if name == "qwen2_5_vl" else ([],):
            messages = [*system, {"role": "user", "content": content_}]
            prompt = encode(processor, family, "one", messages, [Image.new("RGB", (56, 56))] * media, replays=True)
            words, ids = prompt.words, prompt.input_ids[0].tolist()
            head = prompt.rendered[: prompt.rendered.index("Read" if not media else processor.image_token)]
            assert tokenizer.decode(ids[: words.prefix]).endswith(head[-6:]), name
            assert "Read" not in tokenizer.decode(ids[: words.prefix]) and not prompt.types[0, : words.prefix].any()
            end = prompt.rendered[prompt.rendered.index("What is it?") + len("What is it?") :]
            assert tokenizer.decode(words.tail) == end or not words.tail
            assert "Repeat the previous context exactly." in tokenizer.decode(words.whole)
            assert "starting with" in tokenizer.decode(words.part)


def test_what_cannot_feed_a_context_again_is_refused_by_name():
    model, method = zoo.model("llama"), made()
    with (
        pytest.raises(UnsupportedError, match="kvzip feeds the prompt again with an instruction"),
        attach(model, method, common.cell(method, 5).budget),
    ):
        model.generate(**zoo.prompt("llama"), max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="which attach cannot do"):
        api.attach(model, method, budget=5)
    inputs = zoo.batch([zoo.prompt("llama"), zoo.prompt("llama", seed=1, before=3)])
    with pytest.raises(UnsupportedError, match="one prompt at a time"):
        generate_alone(model, inputs, method, common.cell(method, 5).budget, replay=WORDS, max_new_tokens=2)
    for name in zoo.HYBRID:
        prompt = common.encoded(name)
        (result,) = common.together(zoo.model(name), name, prompt, [common.cell(method, 5)])
        assert result.status == "error" and "method kvzip appends the context a second time" in result.error
    config = zoo.config("gpt_oss")
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    full = GptOssForCausalLM(config).eval()
    full.set_attn_implementation("eager")
    with (
        pytest.raises(UnsupportedError, match="kvzip needs a softmax without learned sinks"),
        attach(full, method, common.cell(method, 5).budget),
    ):
        full(**zoo.prompt("gpt_oss"), use_cache=True)
    for wrong in ({"chunk": 0}, {"sinks": -1}):
        with pytest.raises(ConfigError):
            made(**wrong)
