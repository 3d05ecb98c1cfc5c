"""Promise: of a model with sliding or linear layers those of full attention are compressed, and the others stay stock ones.

The reference is the one of every family: stock transformers over a full `DynamicCache` of the model's own layers, with evicted
entries masked out in its full layers.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
import transformers as tf
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

import mmkv_bench
from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.compression.compressor import full
from mmkv_bench.compression.numerics.moments import rotate, unrotate
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.session import Session, attach
from mmkv_bench.compression.states import FULL, SLIDING, check_layers
from mmkv_bench.compression.states import LINEAR as LINEAR_KIND
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.facts import state_bytes
from mmkv_bench.families.registry import REFUSED
from mmkv_bench.generation.encode import EncodedPrompt
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.fidelity import ExtraMeasures
from mmkv_bench.generation.one_pass import Driver
from mmkv_bench.generation.unshared_generation import generate_alone
from mmkv_bench.protocols import NAMES, SINGLE, protocol
from tests import cover, reference, zoo
from tests.core import parts
from tests.core.test_observing import WINDOW, Spy
from tests.each import each
from tests.generation import common, test_questions

TOLERANCE, CUT = 2e-6, 41
PROTOCOLS = tuple(name for name in SINGLE if not (protocol(name).prefills_again or protocol(name).streams))
LINEAR, SINKS = "qwen3_5", "gpt_oss"


def beside(name: str) -> str:
    return "LinearAttentionLayer" if name == LINEAR else "DynamicSlidingWindowLayer"


def context(name: str) -> int | None:
    return CUT if protocol(name).cuts else None


def close(found, wanted) -> None:
    """Equal to rounding; Gemma multiplies embeddings by the root of their width, so its logits are ten times as large."""
    assert (found - wanted).abs().max() <= TOLERANCE * max(1.0, float(wanted.abs().max()))


def document(name: str) -> EncodedPrompt:
    """A text prompt that is cut behind its document, as datasets with a `context_key` cut it."""
    return dataclasses.replace(common.encoded(name), context_tokens=CUT)


# ------------------------------------------------------------------------------------------------- nothing is evicted


@each(
    ("name", "attention"),
    [(name, base) for name in zoo.HYBRID for base in ("sdpa", "eager") if (name, base) != (SINKS, "sdpa")],
)
def test_full_is_bit_identical_to_the_untouched_model_alone_and_in_a_padded_batch(name, attention):
    model = zoo.model(name, attention)
    for inputs in (zoo.prompt(name), zoo.batch([zoo.prompt(name), zoo.prompt(name, 1, before=2)])):
        stock = reference.generate(model, inputs, 6)
        for made, budget in ((full(), None), (parts.keep_all(), parts.budget(1))):
            with attach(model, made, budget=budget) as session:
                run = reference.generate(model, inputs, 6)
            assert torch.equal(run.logits, stock.logits) and torch.equal(run.tokens, stock.tokens)
            kinds = [type(layer).__name__ for layer in session.latest_cache.layers[::2]]
            assert kinds == [beside(name)] * 2 and len(session.latest_cache.compressed) == 2


def test_a_session_registers_no_layer_for_every_cache():
    assert CompressedLayer not in DYNAMIC_LAYER_TYPE_MAPPING.values()
    assert getattr(CompressedLayer, "_layer_type", None) is None


# --------------------------------------------------------------------------------------------------- what scorers see


@each("name", zoo.HYBRID)
def test_scorers_see_the_full_layers_queries_without_gates_and_their_own_rotation(name):
    """Gates stand between the queries of Qwen3.5's projection; its cos has 4 of 16 dimensions; Gemma rotates by kind of layer;
    gpt-oss hands one cos to both halves, scaled by YaRN."""
    model, inputs, spy, called = zoo.model(name), zoo.prompt(name), Spy(), {}
    modules, length = zoo.full_attention(model), inputs["input_ids"].shape[1]

    def note(module, args, kwargs):
        called.setdefault(module.layer_idx, (kwargs["hidden_states"][0], *kwargs["position_embeddings"]))

    cache = DynamicCache(config=model.config)
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    with torch.no_grad():
        model(**zoo.inputs_of(name, inputs["input_ids"][0].tolist() + [5, 6, 7]), past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    with attach(model, parts.compressor(scorer=spy), parts.budget(5)), torch.no_grad():
        model(**inputs, use_cache=True)
    assert [seen[0] for seen in spy.seen] == [0, 1], "compressed layers are counted among themselves"
    for (_, tail, key, _, _, future, probe, projected), module in zip(spy.seen, modules, strict=True):
        hidden, cos, sin = called[module.layer_idx]
        if name == SINKS:
            assert cos.shape[-1] == zoo.HEAD_DIM / 2 and float(cos[0, 0].max()) > 1.3
            cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

        def queries(of, module=module):
            made = module.q_proj(of).view(len(of), zoo.HEADS, -1)[:, :, : zoo.HEAD_DIM]
            return getattr(module, "q_norm", torch.nn.Identity())(made).transpose(0, 1)

        window = slice(length - WINDOW, length)
        torch.testing.assert_close(projected, queries(probe))
        expected = rotate(queries(hidden[window]), cos[0, window], sin[0, window])
        torch.testing.assert_close(tail, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(key, cache.layers[module.layer_idx].keys[0, :, :length], atol=1e-5, rtol=1e-5)
        assert torch.equal(future[0], cos[0, length:]) and torch.equal(future[1], sin[0, length:])
        torch.testing.assert_close(
            unrotate(expected, cos[0, window], sin[0, window]), queries(hidden[window]).float(), atol=1e-5, rtol=1e-5
        )
    assert (cos.shape[-1] == 4) == (name == "qwen3_5")


# ------------------------------------------------------------------------------------------------- against the oracle


def evicting(name: str) -> dict:
    """Methods that only evict, once each; calibrated ones have made-up data of the two compressed layers."""
    methods = {key: made for key, made in common.for_text(common.registry(model=name)).items() if not made.needs.replay}
    return {key: made for key, made in methods.items() if made.decoding is None and type(made.reducer) is Evict}


@pytest.mark.slow
@cover.shares(12)
@each(("place", "name"), enumerate(zoo.HYBRID))
def test_every_scorer_under_every_protocol_answers_as_masked_stock_attention(place, name, share):
    model, inputs, moved = zoo.model(name), zoo.prompt(name), []
    length = inputs["input_ids"].shape[1]
    for number, rule in enumerate(PROTOCOLS, place * len(PROTOCOLS)):  # twelve cases: each method has one
        cut = protocol(rule).lengths(length, context(rule)).candidates
        for made in cover.turn(evicting(name).values(), number, share):
            budget = None if made.unbudgeted else parts.budget(12)
            out = generate_alone(model, inputs, made, budget, rule, context=context(rule), max_new_tokens=3)
            stock = reference.masked_generate(model, inputs, reference.keep_of(out.session.kept(), cut), cut, 3)
            close(torch.stack(out.logits), stock.logits)
            moved.append(float((stock.logits[-1] - reference.stock(name).logits[2]).abs().max()))
    assert len(moved) >= 8 and max(moved) > 0.02, "evictions must matter"


@cover.shares(len(zoo.HYBRID))
@each(("place", "name"), enumerate(zoo.HYBRID))
def test_every_method_forks_as_it_runs_alone(place, name, share):
    """Forks share a prefill and have states of their own; the rows of a batch end at different steps."""
    model, prompt = zoo.model(name), document(name)
    methods = [
        made
        for made in common.for_text(common.registry(model=name)).values()
        if not made.needs.replay and (made.decoding is None or not made.decoding.moves_queries)
    ]
    cells = [  # in a share each method has one family and one protocol
        common.cell(made, None if made.unbudgeted else (5, "40%")[number // 4 % 2], rule)
        for number, made in enumerate(cover.turn(methods, place, share))
        for rule in (PROTOCOLS[:1] if made.needs.answer else PROTOCOLS if share == 1 else [PROTOCOLS[number % 4]])
    ]
    forks = common.assert_forks_equal_alone(model, name, prompt, cells, common.rules(model, 5))
    held = {fork.bytes_state for fork in forks}
    assert len({tuple(fork.token_ids) for fork in forks}) > 3 and min(held) > 0


# ------------------------------------------------------------------------------------ states do not forget, and clones


@each("name", zoo.HYBRID)
def test_tokens_that_are_fed_again_find_the_state_from_before_them(name):
    """`crop(-1)` of a recurrent state does not go back, and a window has lost what slid out: a copy is put back."""
    model, inputs = zoo.model(name), zoo.prompt(name)
    ids = inputs["input_ids"]
    stock = reference.stock(name)
    for rule in ("strict", "query_aware"):
        out = generate_alone(model, inputs, full(), None, rule, context=context(rule), max_new_tokens=6)
        close(torch.stack(out.logits), stock.logits)
    with Session(model) as session, torch.no_grad():
        cache = session.new_cache()
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        for layer in cache.compressed:
            layer.forget(1)
        again = model(input_ids=ids[:, -1:], position_ids=torch.tensor([[ids.shape[1] - 1]]), past_key_values=cache)
    assert (again.logits[0, -1] - stock.logits[0, 0]).abs().max() > 1e-3, "without the copy the answer is another one"


@pytest.mark.slow
@each("name", zoo.HYBRID, keep=1)
def test_forks_neither_share_states_nor_leave_theirs_behind(name):
    """One prefill, two answers in turn and a measure between them; `full` again is what it was, and its own floor is 0."""
    model, prompt = zoo.model(name), document(name)
    cells = [common.cell(full(), None, rule) for rule in PROTOCOLS]
    cells += [common.cell(parts.window(), budget, rule) for rule in PROTOCOLS for budget in (6, 9)]
    reference_ids = tuple(prompt.input_ids[0, :5].tolist())
    extras = ExtraMeasures(fidelity=True, reference=reference_ids, samples=True)
    measured = common.together(model, name, prompt, cells, extras=extras)
    plain = common.together(model, name, prompt, cells)
    common.assert_same(measured, plain, common.MEASURES)
    for row in measured[: len(PROTOCOLS)]:
        assert row.status == "ok" and max(row.forced_kl) < 1e-9 and len(row.reference_nll) == 5
    assert all(min(row.forced_kl) >= 0 and row.reference_nll for row in measured), [row.error for row in measured]
    together = common.together(model, name, prompt, cells, fork_batch=1)
    common.assert_same(together, plain, {"bytes_held"})


@pytest.mark.slow
@each("rule", ["paper", "strict"])
@each("name", zoo.HYBRID)
def test_sequences_that_are_joined_answer_as_alone(name, rule):
    """A measured batch: prompts of one length, prefilled one by one or together."""
    model = zoo.model(name)
    prompts = [common.encoded(name, zoo.prompt(name, seed), f"zoo/{seed}") for seed in range(3)]
    lengths, cell = protocol(rule).lengths(prompts[0].length, None), common.cell(parts.window(), 9, rule)
    alone = common.alone(model, name, prompts[0], [cell]) + common.alone(model, name, prompts[1], [cell])
    for together in (False, True):
        made = Driver(model, 6, together=together).run(prompts, cell, lengths, _Host(), _untimed)
        assert made.answers[:2].tolist() == [row.token_ids for row in alone]


@pytest.mark.slow
@cover.shares(2)
@each("name, method", itertools.product(zoo.HYBRID, ("snapkv", "keydiff", "adakv", "streamingllm")), keep=2)
def test_questions_of_one_document_are_answered_as_each_with_a_cache_of_its_own(name, method, share):
    """Whatever was asked before on the states of the document; the reference is stock attention over masked keys, prompt by
    prompt."""
    model, prompts = zoo.model(name), test_questions.document(name)
    cut = prompts[0].context_tokens
    rules = ("query_agnostic", *test_questions.NEW)
    cells = [common.cell(common.registry(model=name)[method], 12, rule) for rule in rules]
    answers = test_questions.asked(name, prompts, [*cells, *common.full_cells(rules)], order=(2, 0, 3, 1))
    assert {answers[number, cells[1].cell].compression_reused for number in range(4)} == {False, True}
    lost = 0
    for number, prompt in enumerate(prompts):
        stock = reference.generate(model, prompt.inputs, 6).tokens[0].tolist()
        for cell in common.full_cells(rules):
            assert answers[number, cell.cell].token_ids == stock
        for cell in cover.turn(cells, number, share):
            found = answers[number, cell.cell]
            keep = reference.keep_of([index[None] for index in found.selected], cut)
            masked = reference.masked_generate(model, prompt.inputs, keep, cut, 6).tokens[0].tolist()
            assert found.token_ids == masked, (cell.cell, number)
            lost += masked != stock
    assert lost, "evictions must matter"


class _Host:
    place = torch.device("cpu")

    def mark(self) -> None:
        """Nothing is timed."""


def _untimed(name: str):
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.slow
@cover.shares(2)
def test_pictures_before_linear_layers_are_compressed_as_text_is(share):
    """Qwen3.5 with two pictures: bit-identical without eviction, as masked stock attention with it, forks as alone."""
    name = "qwen3_5_vl"
    model, inputs, prompt = zoo.model(name), zoo.prompt(name), common.encoded(name)
    cut, stock = common.context_cut(prompt, common.family(name)), reference.stock(name)
    with attach(model, full()):
        run = reference.generate(model, inputs, 6)
    assert torch.equal(run.logits, stock.logits) and prompt.visual_tokens == 20
    methods = {key: common.registry(model=name)[key] for key in ("snapkv", "mmshift", "expected_attention", "hybridkv")}
    for number, rule in enumerate(PROTOCOLS):
        end = protocol(rule).lengths(prompt.length, cut).candidates
        for made in cover.turn(methods.values(), number, share):
            given = cut if protocol(rule).cuts else None
            out = generate_alone(model, inputs, made, parts.budget(9), rule, context=given, max_new_tokens=4)
            if type(made.reducer) is Evict and made.decoding is None:
                keep = reference.keep_of(out.session.kept(), end)
                close(torch.stack(out.logits), reference.masked_generate(model, inputs, keep, end, 4).logits)
    turns = [(made, cover.turn(PROTOCOLS, number, share)) for number, made in enumerate(methods.values())]
    cells = [common.cell(made, 9, rule) for made, rules in turns for rule in rules]
    common.assert_forks_equal_alone(model, name, prompt, [*common.full_cells(PROTOCOLS), *cells])


# -------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.slow
@each("length", [3, 40, 90])
@each("name", zoo.HYBRID)
def test_bytes_of_states_are_those_of_the_stock_cache_and_foretold(name, length):
    """A window holds at most its size less one, whatever the prompt; a recurrent state does not grow."""
    model, inputs = zoo.model(name), zoo.without_visual(name, length)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    held = sum(
        tensor.numel() * tensor.element_size()
        for layer in cache.layers[::2]
        for tensor in (
            [layer.conv_states[0], layer.recurrent_states[0]] if name == LINEAR else [layer.keys, layer.values]
        )
    )
    prompt = common.encoded(name, inputs)
    rows = common.together(model, name, prompt, [common.cell(full(), None), common.cell(parts.window(), 2)])
    rows += common.alone(model, name, prompt, [common.cell(parts.window(), 2)])
    assert {row.bytes_state for row in rows} == {held} == {state_bytes(common.family(name), length, "float32")}
    assert rows[0].bytes_full == 2 * length * common.family(name).num_kv_heads * zoo.HEAD_DIM * 2 * 4
    assert [len(row.kept) for row in rows] == [2, 2, 2]


@each("name", zoo.HYBRID)
def test_an_amount_of_bytes_is_never_exceeded_and_no_entry_more_would_fit(name):
    """Windows are full here; `generate` is given one token, so that the report is of the reduced prompt."""
    model, inputs = zoo.model(name), zoo.prompt(name)
    family = common.family(name)
    entry = 2 * 2 * family.num_kv_heads * zoo.HEAD_DIM * 4
    asked = state_bytes(family, 54, "float32") + 9 * entry + entry - 1
    with mmkv_bench.attach(model, "snapkv", f"{asked}B", pool=1) as session, torch.no_grad():
        model.generate(**inputs, max_new_tokens=1, do_sample=False)
    report = session.report()
    assert report.budget_entries == 9 and report.fallback == ("window_reduced",)
    assert asked - entry < report.bytes_device + report.bytes_state <= asked
    with pytest.raises(ConfigError, match="leaves no entry"):
        mmkv_bench.attach(model, "snapkv", "10B")


# ----------------------------------------------------------------------------------------------------------- refusals


@each("name", zoo.HYBRID)
def test_what_states_cannot_follow_is_refused_and_the_model_left_as_it_was(name):
    model, prompt = zoo.model(name), common.encoded(name)
    (row,) = common.together(model, name, prompt, [common.cell(parts.window(), 9, "masked")])
    assert row.status == "error" and "hides evicted tokens from a second prefill" in row.error
    (row,) = common.alone(model, name, prompt, [common.cell(parts.window(), 9, "masked")])
    assert row.status == "error" and "allowed: every protocol but masked, stream and turns" in row.error
    for run in (common.together, common.alone):
        (row,) = run(model, name, prompt, [common.cell(parts.window(), 9, "stream")])
        assert row.status == "error" and "keep a window or a recurrent state of all that was read" in row.error
    with pytest.raises(UnsupportedError, match="protocol=masked hides evicted"):
        attach(model, parts.window(), parts.budget(9), "masked")
    with pytest.raises(UnsupportedError, match="positions of cached entries.*positions=own"):
        mmkv_bench.attach(model, "local", 9, reading="released")
    for options in ({"fixed": True}, {"attention": "flash_attention_2"}):
        with pytest.raises(UnsupportedError, match="allowed for this model: decode=eager, attention=sdpa or eager"):
            Session(model, **options)
    with pytest.raises(UnsupportedError, match="decode=eager"):
        Engine(model, common.family(name), common.rules(model), common.tokenizer(), step=lambda **inputs: None)
    assert model.config._attn_implementation == ("eager" if name == SINKS else "sdpa")


def test_learned_sinks_have_a_place_in_eager_attention_alone():
    with pytest.raises(
        UnsupportedError, match="learned sinks, which attention=sdpa does not support; choose attention=eager"
    ):
        Session(zoo.model(SINKS), attention="sdpa")


def test_every_protocol_is_either_driven_or_refused_here():
    assert set(NAMES) - set(PROTOCOLS) == {"masked", "stream"} | {
        name for name in NAMES if protocol(name).needs_questions
    }


def test_a_copied_layer_shares_no_tensor():
    for name in zoo.HYBRID:
        with Session(zoo.model(name)) as session, torch.no_grad():
            cache = session.new_cache()
            zoo.model(name)(**zoo.prompt(name), past_key_values=cache, use_cache=True)
            kept = cache.copy_states()
            before = copy.deepcopy(kept)
            zoo.model(name)(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True)
        for place, layer in kept.items():
            for attribute in ("conv_states", "recurrent_states") if name == LINEAR else ("keys", "values"):
                one, other = getattr(layer, attribute), getattr(before[place], attribute)
                assert torch.equal(one[0], other[0]) if name == LINEAR else torch.equal(one, other)


def _tiny(config_class, **more):
    widths = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return config_class(
        **{"vocab_size": 64, "num_hidden_layers": 2, "head_dim": 8, "pad_token_id": 0, **widths, **more}
    )


@each(
    ("made", "by_attach", "by_session"),
    [
        (lambda: _tiny(tf.Lfm2Config, layer_types=["conv", "full_attention"]), "short convolutions", "conv layers"),
        (
            lambda: _tiny(
                tf.Llama4TextConfig, intermediate_size_mlp=32, num_local_experts=2, interleave_moe_layer_step=2
            ),
            "attend in chunks",
            "chunked_attention layers; allowed: full_attention",
        ),
        (
            lambda: _tiny(tf.MistralConfig, sliding_window=4),
            "allowed: full attention in every layer",
            "sliding_attention layers",
        ),
    ],
)
def test_models_with_other_layers_are_refused_before_anything_is_changed(made, by_attach, by_session):
    model = AutoModelForCausalLM.from_config(made()).eval()
    before, hooks = model.config._attn_implementation, len(model._forward_pre_hooks)
    with pytest.raises(UnsupportedError, match=by_attach):
        mmkv_bench.attach(model, "snapkv", 4)
    with pytest.raises(UnsupportedError, match=by_session):
        Session(model)
    assert (model.config._attn_implementation, len(model._forward_pre_hooks)) == (before, hooks)


@pytest.mark.slow
@each("kind", REFUSED)
def test_attach_refuses_every_other_model_by_its_name_and_says_why(kind):
    model = copy.copy(zoo.model("llama"))
    model.config = tf.AutoConfig.for_model(kind)
    with pytest.raises(UnsupportedError) as refused:
        mmkv_bench.attach(model, "snapkv", 4)
    assert f"model_type {kind!r} is not supported ({REFUSED[kind]})" in str(refused.value)


@each("kind", ["reference_sliding_attention", "compressed_sparse_attention", *DYNAMIC_LAYER_TYPE_MAPPING])
def test_a_session_names_every_kind_of_layer_that_is_not_known(kind):
    config = copy.deepcopy(zoo.config("llama"))
    config.layer_types = [kind, *["full_attention"] * (zoo.LAYERS - 1)]
    config.sliding_window = config.attention_chunk_size = 4
    if kind in (FULL, SLIDING, LINEAR_KIND):
        assert check_layers("A model", config)[0] == kind
        return
    with pytest.raises(UnsupportedError, match=f"A model has {kind} layers; allowed: full_attention layers"):
        check_layers("A model", config)


@pytest.mark.slow
@each("name", zoo.HYBRID)
def test_rows_of_a_batch_that_end_leave_it_with_their_states(name):
    """Half of the rows end early and leave; the others go on with their own states, not with those of rows that left."""
    prompt, model = document(name), zoo.model(name)
    cells = [common.cell(parts.compressor(), budget, "strict", seed) for budget in (2, 3, 5, 9) for seed in (0, 1)]
    free = common.together(model, name, prompt, cells, common.rules(model, 8))
    ends: set[int] = set()
    for token in sorted({token for fork in free for token in fork.token_ids[1:4]}):
        rows = sum(bool({token, *ends} & set(fork.token_ids)) for fork in free)
        ends |= {token} if rows < len(free) else set()
    model.generation_config.eos_token_id = sorted(ends)
    try:
        forks = common.assert_forks_equal_alone(model, name, prompt, cells, common.rules(model, 8))
    finally:
        zoo.model(name)
    ended = [fork.finish_reason for fork in forks]
    assert len(forks) / 2 <= ended.count("eos") < len(forks)
