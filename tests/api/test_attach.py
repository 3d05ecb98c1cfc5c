"""Promise: `with attach(model, ...)` and stock generate() are the product's single run; afterwards the model is as before."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from mmkv_bench import attach, method
from mmkv_bench.config.files import conf_dir
from mmkv_bench.diagnostics.remade_answers import draw, make_again
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.generation.unshared_generation import generate_alone, run_alone
from mmkv_bench.protocols import FED_ONCE, NAMES
from mmkv_bench.store.store import Store
from tests import zoo
from tests.api.test_method import value_norm
from tests.each import each
from tests.generation import common

FAMILIES = ("qwen2_5_vl", "llava_next", "internvl")
"""mrope GQA, long MHA, 1-D GQA."""
TOKENS = 6
KIVI = {"group": 8, "residual": 8}
COUNTS = ("entries_asked", "entries_planned", "entries_resident", "entries_reachable")
BYTES = ("bytes_device", "bytes_host", "bytes_metadata", "bytes_full")


def state(model):
    """What hooks and settings a model has: everything that attaching could leave behind."""
    hooks = [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()]
    configs = (model.config, model.get_decoder().config, getattr(model.config, "vision_config", model.config))
    replaced = [name for name in sorted(model.__dict__) if callable(getattr(type(model), name, None))]
    return hooks, [config._attn_implementation for config in configs], replaced


def answer(model, inputs, **options):
    return model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, **options)


STORED = conf_dir().parent / "results" / "tiny" / "methods"
DRAWING = ("mmshift", "mmshift_adakv", "mmshift_pyramidkv", "mmshift_sparsemm", "random")


@pytest.mark.slow
def test_an_identity_draws_what_the_run_of_a_stored_row_drew():
    """Methods that draw give the committed rows' answers; under no name another draw."""
    store, asked = Store(STORED), {"dataset": "pages_walk_small", "protocol": "paper", "budget_entries": 64, "seed": 0}
    names = ["cell", "method", *asked]
    cells = [row["cell"] for row in store.cells(columns=names).to_pylist() if asked.items() <= row.items()]
    drawn = [one for one in draw([STORED], None, 0, cells, "walk3-small-test-000003") if one.cell["method"] in DRAWING]
    seen = {}
    make_again(drawn[:1], watch=lambda loaded, request, prompt, results: seen.update(model=loaded.model, prompt=prompt))
    model, prompt = seen["model"], seen["prompt"]
    assert prompt.identity == "pages_walk_small/walk3-small-test-000003" and len(drawn) == len(DRAWING)
    for one in drawn:
        with attach(model, one.cell["method"], 64, identity=prompt.identity) as session:
            tokens = model.generate(**prompt.inputs, max_new_tokens=24, do_sample=False)[0, prompt.length :].tolist()
        assert (tokens, [list(heads) for heads in session.report().kept]) == (one.row["token_ids"], one.row["kept"])
    with attach(model, one.cell["method"], 64) as unnamed:
        model(**prompt.inputs)
    assert any(not torch.equal(a, b) for a, b in zip(session.kept(), unnamed.kept(), strict=True))


@each("name", FAMILIES)
def test_full_is_plain_generate_and_others_are_the_single_run(name):
    model, prompt = zoo.model(name), common.encoded(name)
    told = {"return_dict_in_generate": True, "output_logits": True}
    stock, before = answer(model, prompt.inputs, **told), state(model)
    with attach(model, "full") as session:
        ours = answer(model, prompt.inputs, **told)
    assert torch.equal(ours.sequences, stock.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, stock.logits, strict=True))
    assert session.report().entries_resident == session.report().entries_planned
    asked = [("snapkv", 12, {"window": 4}), ("adakv", "25%", {"window": 4}), ("look_m", 12, {}), ("kivi", None, KIVI)]
    for one, budget, parameters in asked:  # sequential sessions on one model
        cell = common.cell(method(one, **parameters), budget)
        alone = run_alone(model, common.family(name), common.rules(model), common.tokenizer(), prompt, cell)
        assert alone.status == "ok", alone.error
        with attach(model, one, budget, **parameters) as session:
            tokens = answer(model, prompt.inputs)[0, prompt.length :].tolist()
        report = session.report()
        assert tokens == alone.token_ids, one
        assert [list(heads) for heads in report.kept] == alone.kept, one
        assert [(layer >= 0).sum(1).tolist() for layer in session.kept()] == alone.kept, one
        assert all(layer.min() >= -1 and layer.max() < prompt.length for layer in session.kept()), one
        assert {key: getattr(report, key) for key in COUNTS + BYTES} == {
            key: getattr(alone, key) for key in COUNTS + BYTES
        }, one
        assert list(report.fallback) == alone.fallback and report.audit.startswith("passed"), one
        assert state(model) == before, one


def test_the_report_says_what_was_kept():
    model, inputs = zoo.model("qwen2_5_vl"), zoo.prompt("qwen2_5_vl")
    session = attach(model, "adakv", "20%", window=4)
    with pytest.raises(ConfigError, match="nothing to report yet"):
        session.report()
    with session:
        answer(model, inputs)
        answer(model, zoo.prompt("qwen2_5_vl", seed=1, after=14))
    report = session.report()
    length = inputs["input_ids"].shape[1] + 5
    entries = max(1, length // 5)
    assert (report.prompt_tokens, report.budget_entries, report.budget) == (length, entries, "20%")
    assert {sum(heads) for heads in report.kept} == {2 * entries}  # a layer's heads share its entries
    assert len({heads for layer in report.kept for heads in layer}) > 1
    said = str(report)
    assert "adakv@20%" in said and "exactly the budget" in said and f"of {length} prompt tokens" in said
    assert said.count("layer") == zoo.LAYERS
    assert session.cache is None  # a report keeps no cache alive
    with attach(model, "snapkv", 4096) as session:
        answer(model, inputs)
    assert session.report().fallback == ("prompt_within_budget",)
    with attach(model, "look_m", 2, reading="released") as session:
        answer(model, inputs)
    assert (
        session.report().audit.startswith("passed: ")
        and "over the budget, which look_m allows" in session.report().audit
    )


def test_a_scorer_of_ones_own_is_attached_like_a_method():
    model, inputs, scorer = zoo.model("llava_next"), zoo.prompt("llava_next"), value_norm()
    answers = []
    for given, parameters in ((scorer, {"power": 2.0}), (scorer(2.0), {}), (method(scorer, power=2.0), {})):
        with attach(model, given, 12, **parameters) as session:
            answers.append(answer(model, inputs).tolist())
        assert session.report().method == "ValueNormScorer" and session.report().audit == "passed: exactly the budget"
    assert answers[0] == answers[1] == answers[2] != answer(model, inputs).tolist()


def test_a_context_is_compressed_before_its_question():
    model, inputs = zoo.model("internvl"), zoo.prompt("internvl")
    ids = inputs["input_ids"]
    context = ids.shape[1] - 9
    made = method("snapkv", window=4)
    budget = common.cell(made, 12).budget
    wanted = generate_alone(model, inputs, made, budget, "query_agnostic", context=context, max_new_tokens=TOKENS)
    first = {name: value[:, :context] if value.shape == ids.shape else value for name, value in inputs.items()}
    with attach(model, made, 12, protocol="query_agnostic") as session:
        model(**first, logits_to_keep=1)
        rest = {"input_ids": ids, "attention_mask": inputs["attention_mask"], "past_key_values": session.cache}
        assert torch.equal(answer(model, rest), wanted.sequences)
    assert session.report().prompt_tokens == context


def test_a_calibrated_method_finds_what_was_measured_of_the_models_folder():
    from transformers import AutoModelForImageTextToText

    from mmkv_bench.config.schema import resolve_path

    folder = resolve_path("pkg://mmkv_bench/tiny/weights")
    model = AutoModelForImageTextToText.from_pretrained(folder, use_safetensors=True)
    ids = torch.randint(20, 60, (1, 90), generator=torch.Generator().manual_seed(0))
    with attach(model, "sparsemm", 32) as session:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
    assert len({heads for layer in session.report().kept for heads in layer}) > 1
    with pytest.raises(ConfigError, match="belongs to the weights of a folder"):
        attach(zoo.model("qwen2_5_vl"), "sparsemm", 32)


def test_the_model_is_as_before_after_an_exception_and_takes_one_session_at_a_time():
    model, inputs = zoo.model("qwen2_5_vl", attention="eager"), zoo.prompt("qwen2_5_vl")
    before = state(model)
    with pytest.raises(RuntimeError, match="stopped"), attach(model, "snapkv", 12):
        answer(model, inputs)
        raise RuntimeError("stopped")
    assert state(model) == before
    with attach(model, "snapkv", 12) as outer:
        with pytest.raises(ConfigError, match="already has a session attached"), attach(model, "full"):
            pass
        answer(model, inputs)
        assert outer.report().entries_resident == 12 * 2 * zoo.LAYERS
    assert state(model) == before


def batch(inputs):
    return {name: torch.cat([value, value]) for name, value in inputs.items()}


@each(
    ("options", "words"),
    [
        ({"num_beams": 2}, "one prompt at a time, but got 2 rows"),
        ({"num_return_sequences": 2, "do_sample": True}, "one prompt at a time, but got 2 rows"),
        ({"use_cache": False}, "use_cache=False leaves no cache"),
        ({"cache_implementation": "static"}, "past_key_values is a StaticCache"),
        ({"prefill_chunk_size": 20}, "follow a prompt that is already compressed"),
        ({"prompt_lookup_num_tokens": 3}, "assisted|at once follow"),
        ({"past_key_values": "full"}, "past_key_values is a DynamicCache of 30 tokens"),
    ],
)
def test_generation_that_would_not_be_what_it_seems_is_refused(options, words):
    model = zoo.model("llama")
    inputs, before = zoo.prompt("llama"), state(model)
    options = {"do_sample": False, "max_new_tokens": TOKENS, **options}
    if options.get("past_key_values") == "full":
        options["past_key_values"] = DynamicCache(config=model.config)
        model(inputs["input_ids"][:, :30], past_key_values=options["past_key_values"])
    with pytest.raises(UnsupportedError, match=words) as refused, attach(model, "snapkv", 12):
        model.generate(**inputs, **options)
    assert "\n" not in str(refused.value)
    assert state(model) == before


def test_a_batch_and_wrong_requests_are_refused_in_a_sentence():
    assert FED_ONCE == ("paper", "query_agnostic")
    model, inputs = zoo.model("llama"), zoo.prompt("llama")
    with pytest.raises(UnsupportedError, match="got 2 rows"), attach(model, "snapkv", 12):
        answer(model, batch(inputs))
    for arguments, options, words in [
        (("snapkv",), {}, "needs a budget"),
        (("snapkv", 0), {}, "keeps nothing"),
        (("snapkv", 1.5), {}, "neither whole entries nor a fraction"),
        (("full", 64), {}, "takes no budget, got 64"),
        (("snapkv", 64), {"windw": 3}, "did you mean 'window'"),
        *(
            (("snapkv", 64), {"protocol": name}, rf"evaluate\(protocol='{name}'\)")
            for name in sorted({*NAMES} - {*FED_ONCE})
        ),
        (("snapkv", 64), {"protocol": "papre"}, "did you mean 'paper'"),
        (("oracle", 64), {}, "reads the full cache's answer"),
        (("meda", 64), {}, "needs visual tokens, but Llama"),
        ((method("snapkv"), 64), {"window": 3}, "whose parameters are already set, but got window"),
        ((method("snapkv"), 64), {"reading": "released"}, "got reading"),
    ]:
        with pytest.raises(ConfigError, match=words):
            attach(model, *arguments, **options)
    with pytest.raises(UnsupportedError, match="not a transformers model"):
        attach(torch.nn.Linear(2, 2), "snapkv", 64)
    model.train()
    try:
        with pytest.raises(UnsupportedError, match="call model.eval"):
            attach(model, "snapkv", 64)
    finally:
        model.eval()


def test_a_prompt_whose_tokens_attend_to_later_ones_is_refused_and_a_causal_mask_is_not():
    model = zoo.model("llama")
    ids = torch.arange(2, 22)[None]
    causal = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    for allowed, added in ((causal, False), (causal, True)):
        mask = allowed.float().log() if added else allowed
        with attach(model, "snapkv", 8) as session:
            model(ids, attention_mask=mask, past_key_values=session.cache)
    two_way = causal.clone()
    two_way[..., :6, :6] = True  # a prefix, as PaliGemma's
    for mask in (two_way, two_way.float().log(), {"full_attention": two_way}):
        with attach(model, "snapkv", 8) as session, pytest.raises(UnsupportedError, match="attend to later tokens"):
            model(ids, attention_mask=mask, past_key_values=session.cache)
