"""Presses of kvpress as scorers: the adapter against a stand-in of the library, and against the library itself where it
is installed (`pip install --no-deps kvpress cachetools fire termcolor`; absent, those tests are skipped)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmkv_bench.compression import presses
from mmkv_bench.compression.allocators.safeguard import Safeguard
from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.scorers.kvpress import parts
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.methods.build import build_compressor, identity_form
from mmkv_bench.plan.cells import build_methods, method_entries
from tests import reference, zoo
from tests.each import each
from tests.generation import common

FAKE = Path(__file__).parent / "fake_kvpress"
BUDGET = 12
UNIFORM = {"_target_": "mmkv_bench.compression.allocators.uniform.Uniform"}
installed = pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")


def make(press: str, args: str = "{}", *overrides: str, method: str = "kvpress"):
    own = [f"methods.kvpress.press={press}", f"methods.kvpress.args={args}"] if method == "kvpress" else []
    config = compose([f"method={method}", *own, *overrides])
    return build_compressor(method, config.methods[method], "paper", method_defaults([method])[method])


def composed(press: str, /, **args):
    """As `make`, of the method's defaults: without Hydra, which takes a second."""
    plain = {"base": "kvpress", "press": press, "args": args, "allocator": UNIFORM}
    own = {"allocator": Uniform()} | parts(plain)
    return Compressor("kvpress", selector=TopK(recents=0), reducer=Evict(), **own)


@pytest.fixture
def fake(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "kvpress"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(FAKE)
    yield
    sys.modules.pop("kvpress", None)


def kept(family: str, compressor, budget: int, inputs=None) -> list[list[set[int]]]:
    """Per layer and KV head, the tokens that stay in a run of stock generate()."""
    model, inputs = zoo.model(family), zoo.prompt(family) if inputs is None else inputs
    with attach(model, compressor, Budget.parse(budget)) as session:
        reference.generate(model, inputs, 1)
        return [[{j for j in row if j >= 0} for row in index[0].tolist()] for index in session.kept()]


# ---------------------------------------------------------------- with a stand-in for the library


def test_composed_is_the_method(fake):
    assert composed("LoudPress", first=1) == make("LoudPress", "{first: 1}")


@pytest.mark.full
@each(
    ("args", "wanted"),
    [
        ({"last": 8}, [-5, -4, -3, -2, -1]),
        ({"first": 8}, [4, 5, 6, 7, -1]),
        ({"first": 3, "last": 3}, [1, 2, -3, -2, -1]),
    ],
)
def test_of_what_a_press_keeps_in_any_case_the_last_stays_and_the_row_says_so(fake, args, wanted):
    """More entries with the press's highest score than the budget holds, plain and with heads that share a budget."""
    family, model = "llava_next", zoo.model("llava_next")
    length = zoo.prompt(family)["input_ids"].shape[1]
    plain = composed("EdgesPress", **args)
    pooled = composed("AdaKVPress", press={"press": "EdgesPress", **args})
    assert pooled.allocator == Safeguard(0.2) and plain.allocator != pooled.allocator
    for made in (plain, pooled):
        assert all(head == {i % length for i in wanted} for layer in kept(family, made, 5) for head in layer)
    cells = [
        common.cell(made, budget, protocol, name=f"{made.allocator}/{budget}/{protocol}")
        for made in (plain, pooled)
        for protocol in common.PROTOCOLS
        for budget in (5, BUDGET)
    ]
    results = common.assert_forks_equal_alone(model, family, common.encoded(family), cells)
    assert [result.fallback for result in results] == [["press_reduced"], []] * 6
    assert all(result.entries_resident == result.entries_asked for result in results)


def test_a_press_that_divides_the_budget_takes_no_other_allocator(fake):
    pool = "methods.kvpress.allocator._target_=mmkv_bench.compression.allocators.head_pool.HeadPool"
    assert type(make("LoudPress", "{}", pool).allocator).__name__ == "HeadPool"
    with pytest.raises(
        ConfigError, match="HeadPool has no effect, because kvpress' AdaKVPress divides the budget itself"
    ):
        make("AdaKVPress", "{press: LoudPress}", pool)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava_next"])
def test_a_press_gets_what_its_own_hook_would_get_and_its_scores_decide(fake, family):
    found = kept(family, make("LoudPress", "{first: 1}"), BUDGET)
    model, inputs = zoo.model(family), zoo.prompt(family)
    cache = DynamicCache()
    with torch.no_grad():
        model(**inputs, past_key_values=cache, use_cache=True)
    for layer, heads in zip(cache.layers, found, strict=True):
        for channel, ours in zip(layer.keys[0, :, :, 0].abs(), heads, strict=True):
            channel[0] = torch.inf
            assert ours == set(channel.topk(BUDGET).indices.tolist())


def test_forks_equal_runs_of_their_own_under_every_protocol(fake):
    family = "qwen2_5_vl"
    made = make("DicePress")
    assert made.stochastic
    cells = [common.cell(made, BUDGET, protocol, seed) for protocol in common.PROTOCOLS for seed in (0, 1)]
    results = common.assert_forks_equal_alone(zoo.model(family), family, common.encoded(family), cells)
    assert len({result.kept_digest for result in results}) == 6, "another seed and another protocol draw again"
    again = common.together(zoo.model(family), family, common.encoded(family), cells[::-1])[::-1]
    assert [r.kept_digest for r in again] == [r.kept_digest for r in results], "whatever was drawn before"


def test_the_import_changes_no_attention_function(fake):
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    presses.load()
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before


def test_a_wrapper_takes_another_press_by_name(fake):
    plain = kept("qwen2_5_vl", make("LoudPress", "{first: 0}"), BUDGET)
    for args in (
        "{press: {press: LoudPress, first: 0}, factor: 2}",
        "{press: {press: LoudPress, first: 0}, factor: 1}",
    ):
        assert kept("qwen2_5_vl", make("AroundPress", args), BUDGET) == plain
    turned = kept("qwen2_5_vl", make("AroundPress", "{press: LoudPress}"), BUDGET)
    assert all(0 not in head and 1 not in head for layer in turned for head in layer)


def test_the_identity_holds_the_version_and_every_argument(fake):
    def of(args):
        made = make("LoudPress", args)
        return identity_form({"base": "kvpress", "press": "LoudPress", "args": {}}, made)

    assert of("{}") == of("{first: 2}") == of("{power: 1}")
    assert of("{}") == {
        "base": "kvpress",
        "press": "LoudPress",
        "args": {"first": 2, "power": 1.0},
        "kvpress": "9.9",
    }
    assert of("{first: 3}") != of("{}")

    def around(inner):
        return identity_form({"base": "kvpress"}, composed("AroundPress", press=inner))

    one, other = {"press": "LoudPress", "power": 1}, {"press": "LoudPress", "args": {"first": 2}}
    assert around("LoudPress") == around(one) == around(other)
    assert around("LoudPress")["args"]["press"] == {"press": "LoudPress", "args": {"first": 2, "power": 1.0}}
    assert around({"press": "LoudPress", "first": 3}) != around("LoudPress")


@each(("args", "tuned"), [("{}", False), ("{power: 1}", False), ("{power: 2}", True)])
def test_a_press_is_tuned_when_its_arguments_are_not_its_defaults(fake, args, tuned):
    config = compose(["method=kvpress", "methods.kvpress.press=LoudPress", f"methods.kvpress.args={args}"])
    methods = build_methods(method_entries(config.method_config))
    assert [method.tuned for method in methods] == [False, tuned]


@pytest.mark.slow
@each(
    ("press", "args", "words"),
    [
        ("null", "{}", "needs a press"),
        ("LudPress", "{}", "no press 'LudPress'; did you mean 'LoudPress'"),
        ("torch", "{}", "no press 'torch'"),
        ("os.system", "{}", "no press"),
        ("ScorerPress", "{}", "it is a base class"),
        ("QFilterPress", "{}", "it reads filters of the hub"),
        ("TablePress", "{}", "it loads tables or weights"),
        ("HookPress", "{}", "it overrides the hook"),
        ("DrivePress", "{}", "it runs the model itself"),
        ("MergePress", "{}", "instead of scoring entries"),
        ("AdaKVPress", "{press: DivePress}", "no press 'DivePress'; did you mean 'DicePress'"),
        ("AdaKVPress", "{press: {first: 2}}", "allowed: a press's name, {press:"),
        ("AdaKVPress", "{press: {press: AdaKVPress}}", "has no score that AdaKVPress could read"),
        ("AdaKVPress", "{press: LoudPress, alpha_safeguard: 2}", "alpha is 2"),
        ("LoudPress", "{frist: 1}", "no argument 'frist'; did you mean 'first'"),
        ("LoudPress", "{compression_ratio: 0.5}", "is set by the budget"),
        ("AroundPress", "{}", "cannot be built: TypeError"),
        ("AroundPress", "{press: TablePress}", "it loads tables or weights"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(fake, press, args, words):
    with pytest.raises(ConfigError) as refused:
        make(press, args)
    assert words in str(refused.value)


@each(
    ("press", "words"),
    [
        ("PickyPress", "cannot score this prompt: AssertionError: the prompt is too short for me"),
        ("FlatPress", "gave scores of shape"),
    ],
)
def test_a_press_that_fails_ends_its_own_cell_only(fake, press, words):
    family = "qwen2_5_vl"
    cells = [common.cell(make(press), BUDGET), common.cell(make("LoudPress"), BUDGET, name="other")]
    for run in (common.together, common.alone):
        failed, fine = run(zoo.model(family), family, common.encoded(family), cells)
        assert failed.status == "error" and words in failed.error and fine.status == "ok"


def test_without_the_library_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.delitem(sys.modules, "kvpress")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "kvpress").is_dir()])
    with pytest.raises(ConfigError, match="not installed; run: pip install"):
        make("KnormPress")


def test_a_version_that_cannot_be_imported_is_refused_with_those_that_can(fake, monkeypatch, tmp_path):
    (tmp_path / "kvpress").mkdir()
    (tmp_path / "kvpress" / "__init__.py").write_text("from transformers import NoSuchThing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match="cannot be imported with this transformers.*versions that were checked: 0.4.3"
    ):
        make("KnormPress")
    (tmp_path / "kvpress" / "__init__.py").write_text("import no_such_dependency\n")
    with pytest.raises(ConfigError, match="needs the package no_such_dependency"):
        make("KnormPress")


# ---------------------------------------------------------------- with the library itself

# LagKVPress scores by ranks within partitions, which tie; the library leaves ties to `topk`, so it is not among these.
PRESSES = {
    "KnormPress": {},
    "KeyDiffPress": {},
    "SnapKVPress": {"window_size": 4},
    "StreamingLLMPress": {"n_sink": 2},
    "ExpectedAttentionPress": {"n_sink": 2, "n_future_positions": 16},
    "TOVAPress": {},
    "NonCausalAttnPress": {"chunk_size": 8},
}
TEXT_ONLY = {"ExpectedAttentionPress"}  # the library counts positions on one axis, which mrope's are not


def by_the_library(family: str, press, inputs) -> list[list[set[int]]]:
    """The tokens that kvpress' own hook leaves in a stock cache, found again by their keys, short of those that it masks."""
    model, full, pruned = zoo.model(family), DynamicCache(), DynamicCache()
    text = model.get_decoder()

    def position(module, args, options):  # transformers passes it no longer, and the hook wants it
        seen = options["past_key_values"].get_seq_length(module.layer_idx)
        return args, dict(options, cache_position=torch.arange(seen, seen + options["hidden_states"].shape[1]))

    hooks = [layer.self_attn.register_forward_pre_hook(position, with_kwargs=True) for layer in text.layers]
    masked = []
    try:
        with torch.no_grad():
            model(**inputs, past_key_values=full, use_cache=True)
            with press(model):
                model(**inputs, past_key_values=pruned, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
        for layer in text.layers:
            del layer.self_attn.rotary_emb
            masked.append(vars(layer.self_attn).pop("masked_key_indices", None))
    found = []
    for whole, rest, mask in zip(full.layers, pruned.layers, masked, strict=True):
        same = (rest.keys[0][:, :, None] == whole.keys[0][:, None]).all(-1)
        assert bool((same.sum(-1) == 1).all()), "every kept key is one of the prompt's"
        heads = [set(row.tolist()) for row in same.int().argmax(-1)]
        gone = [] if mask is None else zip(mask[1].tolist(), mask[2].tolist(), strict=True)
        for head, token in gone:
            heads[head].remove(token)
        found.append(heads)
    return found


@installed
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "llava_next"])
@each("name", sorted(PRESSES))
def test_the_same_entries_stay_as_under_the_librarys_own_hook(name, family):
    if name in TEXT_ONLY and family != "llama":
        pytest.skip("the library's positions are not the model's")
    library, inputs = presses.load(), zoo.prompt(family)
    press = getattr(library, name)(compression_ratio=ratio(inputs), **PRESSES[name])
    assert kept(family, composed(name, **PRESSES[name]), BUDGET) == by_the_library(family, press, inputs)


def ratio(inputs) -> float:
    return 1 - (BUDGET + 0.5) / inputs["input_ids"].shape[1]


WRAPPERS = {
    "AdaKVPress": ({}, {"alpha_safeguard": 0.0}, {"alpha_safeguard": 0.5}),
    "CriticalKVPress": ({}, {"first_stage_ratio": 0.25}),
    "CriticalAdaKVPress": ({}, {"alpha_safeguard": 0.5, "first_stage_ratio": 0.25}, {"first_stage_ratio": 0.0}),
}


@installed
@pytest.mark.parametrize("family", ["llama", "llava_next"])  # the library reads a head_dim that Qwen2.5-VL leaves out
@each("name", sorted(WRAPPERS))
def test_wrappers_leave_what_the_librarys_masks_leave(name, family):
    """Of a press with scores of attention and of one with negative scores, with the same total in every layer."""
    library, inputs = presses.load(), zoo.prompt(family)
    for inner, own in (("SnapKVPress", {"window_size": 4}), ("KeyDiffPress", {})):
        for args in WRAPPERS[name]:
            press = getattr(library, name)(getattr(library, inner)(ratio(inputs), **own), **args)
            theirs = by_the_library(family, press, inputs)
            ours = kept(family, composed(name, press={"press": inner, **own}, **args), BUDGET)
            assert ours == theirs, (inner, args)
            assert {sum(map(len, layer)) for layer in ours} == {BUDGET * len(ours[0])}
    assert name == "CriticalKVPress" or any(len(head) != BUDGET for layer in ours for head in layer), "heads differ"


@installed
def test_a_wrapper_in_a_wrapper_is_the_librarys():
    family, library, inputs = "llama", presses.load(), zoo.prompt("llama")
    theirs = library.AdaKVPress(library.CriticalKVPress(library.TOVAPress(ratio(inputs)), first_stage_ratio=0.25))
    inner = {"press": "CriticalKVPress", "args": {"press": "TOVAPress", "first_stage_ratio": 0.25}}
    ours = composed("AdaKVPress", press=inner)
    assert kept(family, ours, BUDGET) == by_the_library(family, theirs, inputs)


OURS = {
    "KeyDiffPress": ("{}", "keydiff", ["methods.keydiff.recents=0"]),
    "SnapKVPress": ("{window_size: 4}", "snapkv", ["methods.snapkv.window=4"]),
    "StreamingLLMPress": ("{n_sink: 2}", "streamingllm", ["methods.streamingllm.sinks=2"]),
    "ExpectedAttentionPress": (
        "{n_future_positions: 16}",
        "expected_attention",
        ["methods.expected_attention.future=16"],
    ),
}


@installed
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "qwen3_vl"])
@each("press", sorted(OURS))
def test_our_own_methods_keep_what_their_presses_keep(press, family):
    args, method, overrides = OURS[press]
    theirs = kept(family, make(press, args), BUDGET)
    assert theirs == kept(family, make("", "", *overrides, method=method), BUDGET)


@installed
def test_every_export_is_carried_under_every_protocol_or_refused_by_name_with_a_reason():
    library, family = presses.load(), "qwen2_5_vl"
    exported = {n: v for n, v in vars(library).items() if n in library.__all__ and isinstance(v, type)}
    found = {name for name, cls in exported.items() if issubclass(cls, library.BasePress)}
    assert found == set(presses.presses(library)) and len(found) >= 45
    names = presses.usable(library)
    assert set(PRESSES) | set(WRAPPERS) | {"RandomPress"} <= set(names)
    args = PRESSES | dict.fromkeys(WRAPPERS, {"press": "KnormPress"})
    made = {name: composed(name, **args.get(name, {})) for name in names}
    cells = [common.cell(made[n], BUDGET, p, name=f"{n}/{p}") for n in names for p in common.PROTOCOLS]
    results = common.assert_forks_equal_alone(zoo.model(family), family, common.encoded(family), cells)
    assert {result.entries_resident for result in results} == {results[0].entries_asked}
    for name in sorted(found - set(names)):
        with pytest.raises(UnsupportedError, match=f"{name} cannot be used, because it ") as refused:
            composed(name)
        base = name in ("BasePress", "ScorerPress")
        assert base or presses.REFUSED[name] in str(refused.value), "a reason of its own"
    assert set(presses.REFUSED) <= found, "no reason is kept for what is not there"


@installed
@each("press", ["SnapKVPress", "StreamingLLMPress"])
def test_a_window_over_the_budget_is_reduced_to_its_last_tokens_by_name(press):
    """The library leaves it to `topk` which entries of the window or the sinks stay."""
    family, budget = "llava_next", 5
    length = zoo.prompt(family)["input_ids"].shape[1]
    own = {"SnapKVPress": {"window_size": 8}, "StreamingLLMPress": {"n_sink": 8}}[press]
    wanted = {
        "SnapKVPress": set(range(length - 5, length)),
        "StreamingLLMPress": {4, 5, 6, 7, length - 1},
    }[press]
    plain, pooled = composed(press, **own), [composed(name, press={"press": press, **own}) for name in WRAPPERS]
    for made in (plain, *pooled):
        assert all(head == wanted for layer in kept(family, made, budget) for head in layer)
    cells = [
        common.cell(made, c, p, name=f"{i}/{c}/{p}")
        for i, made in enumerate((plain, *pooled))
        for p in common.PROTOCOLS
        for c in (budget, BUDGET)
    ]
    results = common.assert_forks_equal_alone(zoo.model(family), family, common.encoded(family), cells)
    assert [result.fallback for result in results] == [["press_reduced"], []] * (len(results) // 2)
    assert all(result.entries_resident == result.entries_asked for result in results)
