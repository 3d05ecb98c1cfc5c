"""What every registered method promises; a file in conf/method joins this matrix by being there."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.decoding.late import Late
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.compression.replay import ReplayText
from mmkv_bench.compression.selectors.modality_quota import ModalityQuota
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.files import options
from mmkv_bench.methods import invariants
from mmkv_bench.methods.build import OUTSIDE, build_compressor, identity_form
from mmkv_bench.methods.node import under_reading
from mmkv_bench.methods.toy_layers import Problem
from tests import cover, reference, zoo
from tests.calibrate import synthetic
from tests.compression import oracles
from tests.generation import common

LAYERS = 3
OPEN = {*OUTSIDE, "pixels", "cut_prompt"}  # built from what the user names: tests/methods; no compressor of a cache
NAMES = sorted(set(options("method")) - {"full"} - OPEN)
READINGS = ("paper", "released")
DEFAULTS = method_defaults(NAMES)  # composed once, because that is slow


@functools.cache
def method(name: str, reading: str = "paper", heads: int = 2) -> Compressor:
    """A method as a run of a model with LAYERS layers of ``heads`` KV heads builds it, calibrated with made-up data."""
    return synthetic.calibrated(build_compressor(name, DEFAULTS[name], reading), LAYERS, heads)


UNBUDGETED = [name for name in NAMES if method(name).unbudgeted]  # nothing is evicted: kivi
NAMES = [name for name in NAMES if name not in UNBUDGETED]
every_method = pytest.mark.parametrize("name", NAMES)


@functools.cache
def union() -> Needs:
    return functools.reduce(Needs.__or__, (method(n, r).needs for n in NAMES for r in READINGS))


def types_of(length: int) -> torch.Tensor:
    """Text, an image, text again; a prompt of one or two tokens has an image token too."""
    types = torch.zeros(length, dtype=torch.int64)
    types[length // 4 : length // 4 + max(1, length // 2)] = 1
    return types


def observations(length: int, heads: int, group: int, seed: int, needs: Needs, dtype=torch.float32, identity="sample"):
    """A model's observations of one prompt: other weights and hidden states in every layer."""
    seen = []
    for i in range(LAYERS):
        layer = oracles.make_layer(length, heads, group, seed=seed + i)
        seen.append(layer.observe(needs, layer=i, identity=identity, dtype=dtype))
        seen[-1].token_types, seen[-1].layers = types_of(length), LAYERS
    return seen


prompt = functools.cache(observations)
"""The same for all tests, which read only (`test_what_methods_share_is_written_to_by_none`)."""


def problem(length: int, heads: int, group: int, seed: int, budget: int, **options) -> Problem:
    """The oracles' layers as a problem for the promises; most methods need the same, and share it."""
    name = f"{length} tokens, {heads} KV heads, {heads * group} query heads, seed {seed}, budget {budget}, {options}"
    return Problem(lambda needs: prompt(length, heads, group, seed, needs, **options), budget, name, LAYERS)


def kept(promise, name: str, problems, readings=READINGS, heads: int = 2, **options) -> None:
    """The promise of `mmkv-bench check` is kept by both readings of a shipped method."""
    for reading in readings:
        said = promise(method(name, reading, heads), problems, **options)
        assert said is None, f"{name}, {reading}: {said}"


SHAPES = ((2, 1, 1, 1), (2, 2, 3, 1), (3, 2, 1, 2), (7, 4, 1, 6), (23, 2, 3, 1), (40, 1, 3, 13), (70, 2, 3, 24),
          (96, 4, 1, 95), (150, 1, 1, 60))  # fmt: skip
"""(prompt tokens, KV heads, query heads per KV head, budget)"""


@every_method
def test_exactly_the_budget_is_kept(name):
    for seed, (length, heads, group, budget) in enumerate(SHAPES):
        kept(invariants.the_budget_is_kept, name, [problem(length, heads, group, seed, budget)], heads=heads)


drawn = given(
    length=st.integers(2, 150),
    heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 3]),
    share=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)


@pytest.mark.full
@every_method
@settings(max_examples=20, deadline=None, derandomize=True)
@drawn
def test_exactly_the_budget_is_kept_of_any_prompt(name, length, heads, group, share, seed):
    budget = 1 + int(share * (length - 2))  # 1 .. T - 1
    asked = replace(
        problem(length, heads, group, seed, budget), observe=functools.partial(observations, length, heads, group, seed)
    )
    kept(invariants.the_budget_is_kept, name, [asked], heads=heads)


def test_sinks_stay_in_every_head_at_equal_entries():
    """Of methods that have none by default, whose rows name no sinks then (`later`)."""
    later = [name for name, node in DEFAULTS.items() if "sinks" in (node.get("later") or ())]
    assert len(later) >= 7
    for name, sinks in product(later, (0, 4)):
        node = {**DEFAULTS[name], "sinks": sinks}
        compressor = build_compressor(name, node, "paper")
        seen = prompt(60, 2, 3, 1, union())
        scores = [compressor.score(one, 16, 0) for one in seen]
        summaries = {i: made for i, one in enumerate(seen) if (made := compressor.summary(one, 16, 0)) is not None}
        index = compressor.select(scores, 16, types_of(60), range(LAYERS), LAYERS, summaries=summaries)
        heads = [set(head) - {-1} for layer in index for head in layer.tolist()]
        assert sum(map(len, heads)) == 16 * len(heads), name
        wide = [head for head in heads if len(head) >= 4 + 16 // 2]  # room for the sinks beside the window
        assert len(wide) > len(heads) / 2 and all(head >= {0, 1, 2, 3} for head in wide) == (sinks == 4), name
        assert ("sinks" in identity_form(under_reading(name, node, "paper"), compressor)) == (sinks == 4), name


def test_no_paper_reading_exceeds_its_budget_and_only_released_ones_may():
    for name in NAMES:
        assert not method(name).exceeds, name
        made = method(name, "released")
        assert made.exceeds >= (made.allocator.excess > 0), f"{name}: an excess in entries is declared as one"


@every_method
def test_a_layer_decided_alone_is_decided_as_among_the_others(name):
    for seed, (length, heads, group, budget) in enumerate(SHAPES):
        made = method(name, "paper", heads)
        if made.scope == "model":
            return  # such a method sees all layers before it decides
        seen = prompt(length, heads, group, seed, made.needs)
        given_, summed = invariants.scores(made, seen, budget), invariants.summaries(made, seen, budget)
        for strict in (False, True):
            together = made.select(given_, budget, types_of(length), range(LAYERS), LAYERS, strict, summaries=summed)
            alone = []
            for i in range(LAYERS):
                so_far = {layer: summary for layer, summary in summed.items() if layer <= i}
                alone += made.select([given_[i]], budget, types_of(length), [i], LAYERS, strict, summaries=so_far)
            assert same(alone, together), (length, heads, group, budget, strict)


def same(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_method
def test_the_same_prompt_keeps_the_same_entries_whatever_ran_before(name):
    """Neither other methods, in any order, nor other samples, seeds or the state of torch change anything, nor what else
    is gathered."""
    shape = (70, 2, 3, 5)
    crowd = observations(*shape, union())

    def others():
        for other in reversed(NAMES[NAMES.index(name) % 9 :: 9]):  # other methods on the way
            invariants.scores(method(other), crowd, 30, seed=3)
            torch.rand(3)
        invariants.select(method(name), problem(40, 2, 3, 11, 9, identity="other"))

    asked = Problem(lambda needs: crowd if needs == union() else prompt(*shape, needs), 24, str(shape), LAYERS)
    kept(invariants.nothing_is_remembered, name, [asked], disturb=others, needs=union())


def test_the_seed_decides_stochastic_methods_alone():
    for name in NAMES:
        kept(invariants.seeds_matter_only_if_declared, name, [problem(70, 2, 3, 5, 24)])


def test_what_methods_share_is_written_to_by_none():
    for name in NAMES:
        kept(invariants.nothing_is_written_to, name, [problem(70, 2, 3, 5, 24)])


def test_equal_scores_keep_the_lower_tokens():
    """Deterministic ties: with equal scores and nothing protected the first candidates stay."""
    types = types_of(30)
    for name in NAMES:
        made = method(name)
        if made.allocator.summary_key(9, 30) is not None or made.allocator.falls_short:
            continue  # allocations that do not come from the scores are tested with their methods
        flat = [torch.ones(2, 30) for _ in range(LAYERS)]
        index = made.select(flat, 9, types, range(LAYERS), LAYERS)
        protected = made.selector.protected(30, 9, types).expand(2, -1)
        for rows in index:
            for row, always in zip(rows.tolist(), protected.tolist(), strict=True):
                free = [j for j in row if j >= 0 and not always[j]]
                kinds = (0, 1) if isinstance(made.selector, ModalityQuota) else (None,)  # a quota per kind of token
                for kind in kinds:
                    of_kind = [j for j in range(30) if not always[j] and kind in (None, int(types[j]))]
                    chosen = [j for j in free if kind in (None, int(types[j]))]
                    assert chosen == of_kind[: len(chosen)], name


@every_method
def test_half_precision_gives_finite_scores_and_the_budget(name):
    for dtype in (torch.float16, torch.bfloat16):
        asked = [
            problem(*shape, dtype=dtype)
            for shape in ((1, 2, 2, 3, 1), (2, 2, 2, 3, 1), (6, 2, 2, 3, 3), (80, 2, 2, 3, 33))
        ]
        kept(invariants.scores_are_finite, name, asked)
        kept(invariants.the_budget_is_kept, name, asked[1:])


def test_half_precision_keeps_the_float32_selection_up_to_near_ties():
    """Inputs are rounded to half precision first, so that both sides start from the same numbers. Proxies of other
    stochastic methods are projected in the model's dtype, which moves votes."""
    layer = oracles.make_layer(90, 2, 2, seed=8)
    layer.key, layer.value = layer.key.bfloat16().double(), layer.value.bfloat16().double()

    def rounded(dtype: torch.dtype, needs: Needs) -> list[Observation]:
        seen = [layer.observe(needs, layer=i, dtype=dtype) for i in range(LAYERS)]
        for obs in seen:
            obs.token_types, obs.layers = types_of(90), LAYERS
        return seen

    for name in NAMES:
        if method(name).stochastic and name != "random":
            continue
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            asked = Problem(functools.partial(rounded, dtype), 30, str(dtype), LAYERS)
            found.append(invariants.select(method(name), asked))
        for a, b in zip(*found, strict=True):
            ours, theirs = ({(h, j) for h, row in enumerate(x.tolist()) for j in row if j >= 0} for x in (a, b))
            assert len(ours - theirs) <= 4, f"{name}: more than rounding of the queries to 8 bits can move"


# ---------------------------------------------------------------- through a model


FAMILIES = ("qwen2_5_vl", "llava_next")


def of_model(name: str, model, reading: str = "paper") -> Compressor:
    config = model.config.get_text_config(decoder=True)
    assert config.num_hidden_layers == LAYERS
    return method(name, reading, config.num_key_value_heads)


@cover.cases([name for name in (*NAMES, *UNBUDGETED) if not method(name).quantises], FAMILIES, (0, 5, 1.0))
def test_a_budget_of_the_whole_prompt_is_the_full_cache(name, combinations):
    """Methods that keep fewer bits are not the full cache: tests/methods/test_kivi*."""
    for family, more in combinations:
        untouched, model, inputs = reference.stock(family, tokens=4), zoo.model(family), zoo.prompt(family)
        made, length = of_model(name, model), inputs["input_ids"].shape[1]
        budget = Budget.parse(more if more == 1.0 else length + more)
        with cover.case(family, budget):
            with attach(model, made, budget=budget, replay=ReplayText()) as session:
                run, entries = reference.generate(model, inputs, 4), session.kept()
            assert torch.equal(run.logits, untouched.logits)
            for index in entries:
                assert torch.equal(index, torch.arange(length).expand_as(index))


@cover.cases(NAMES, READINGS, FAMILIES)
def test_the_stored_tensors_hold_what_was_planned(name, combinations):
    """Counted from the cache right after the prefill."""
    for reading, family in combinations:
        with cover.case(reading, family):
            _stored_as_planned(name, reading, family)


def _stored_as_planned(name: str, reading: str, family: str) -> None:
    model, inputs = zoo.model(family), zoo.prompt(family)
    length, made = inputs["input_ids"].shape[1], of_model(name, model, reading)
    budget = length // 3
    with attach(model, made, budget=Budget.parse(budget), replay=ReplayText()) as session:
        reference.generate(model, inputs, 1)
        planned, layers = session.kept(), session.cache.layers
    heads = planned[0].shape[1]
    total = sum(int((index >= 0).sum()) for index in planned)
    if isinstance(made.decoding, Late):  # MEDA's release reduces in the first decode step
        assert all(int(layer.entries().min()) == length for layer in layers)
        return
    for index, layer in zip(planned, layers, strict=True):
        assert torch.equal(layer.entries().cpu(), (index >= 0).sum(-1))
        if made.decoding is None:
            stored = layer.slot_positions()[..., : index.shape[-1]]
            assert torch.equal(stored, index.to(stored))
    if name == "blind":
        types = inputs["input_ids"][0] == model.config.image_token_id
        assert total == min(budget, int((~types).sum())) * heads * LAYERS
        assert not types[torch.cat([index[index >= 0] for index in planned])].any()
    asked = budget * heads * LAYERS
    assert made.exceeds or total <= asked, f"{total} entries are kept where the budget is {asked}"
    assert made.falls_short or total >= asked, f"{total} entries are kept of a budget of {asked}"


class Watching:
    """How many entries each layer holds whenever a layer's attention has run, and when the prefill is over."""

    def __init__(self, model, session):
        self.session, self.after, self.hooks = session, [], []
        for block in model.get_decoder().layers:
            self.hooks.append(block.register_forward_hook(self.note))

    def note(self, *ignored) -> None:
        self.after.append(stored_bytes(self.session.cache))

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def stored_bytes(cache) -> list[int]:
    """Bytes of keys and values per layer, counted by storage: a view of a full tensor counts as the full tensor."""
    found = []
    for layer in cache.layers:
        storages = {}
        for tensor in (layer.keys, layer.values):
            if tensor is not None:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        found.append(sum(storages.values()))
    return found


@cover.cases(NAMES, FAMILIES, each=1)
def test_layer_scope_frees_each_layer_during_the_prefill_and_model_scope_does_not(name, combinations):
    """Measured after every layer: with scope "layer" all layers so far are small, with "model" all are full until the
    last one; afterwards both are small."""
    for (family,) in combinations:
        with cover.case(family):
            _frees_in_its_scope(name, family)


def _frees_in_its_scope(name: str, family: str) -> None:
    model, inputs = zoo.model(family), zoo.prompt(family)
    made = of_model(name, model)
    length = inputs["input_ids"].shape[1]
    with attach(model, made, budget=Budget.parse(max(2, length // 8)), reserve=0, replay=ReplayText()) as session:
        watch = Watching(model, session)
        reference.generate(model, inputs, 1)
        watch.remove()
        final = stored_bytes(session.cache)
    config = model.config.get_text_config(decoder=True)
    heads, dim = config.num_key_value_heads, model.get_decoder().layers[0].self_attn.head_dim
    full = 2 * heads * length * dim * 4
    assert len(watch.after) == LAYERS * (1 + made.needs.replay)
    assert sum(final) <= 0.6 * full * LAYERS, f"{final} bytes are stored where the full cache has {full} per layer"
    for done, held in enumerate(watch.after[:-1], 1):
        if made.scope == "model":
            assert all(bytes_ >= full for bytes_ in held[:done]), "a model-scope method holds everything until the end"
        else:
            assert held[:done] == final[:done], "a layer-scope method has reduced every layer that is prefilled"
            assert sum(held[:done]) < full * done


def test_methods_that_need_visual_tokens_refuse_text_and_the_others_do_not():
    """All at once, each on its own for one of the protocols."""
    family = "qwen2_5_vl"
    model = zoo.model(family)
    text = common.encoded(family, zoo.without_visual(family, 20))
    methods = {name: of_model(name, model) for name in NAMES}
    cells = [common.cell(made, 8, protocol) for protocol in common.PROTOCOLS[:2] for made in methods.values()]
    own = [cells[i + len(NAMES) * (i % 2)] for i in range(len(NAMES))]
    results = [*common.together(model, family, text, cells), *common.alone(model, family, text, own)]
    for cell, result in zip([*cells, *own], results, strict=True):
        if cell.compressor.needs_visual:
            assert result.status == "error" and "prompts with images or videos" in result.error, cell.cell
        else:
            assert result.status == "ok", f"{cell.cell}: {result.error}"


def test_the_order_of_methods_and_samples_changes_no_answer():
    """Everything at once through the fork engine: methods and samples forwards, and both backwards."""
    family = "qwen2_5_vl"
    model = zoo.model(family)
    prompts = [common.encoded(family, zoo.prompt(family, seed), identity=f"zoo/{seed}") for seed in (0, 1)]
    cells = [common.cell(of_model(name, model), 12) for name in NAMES]
    forward = answers(model, family, prompts, cells)
    turned = answers(model, family, prompts[::-1], cells[::-1])
    assert forward == turned and {status for _, status, _, _ in forward.values()} == {"ok"}


def answers(model, family, prompts, cells) -> dict:
    found = {}
    for prompt_ in prompts:
        for cell, result in zip(cells, common.together(model, family, prompt_, cells), strict=True):
            key = (prompt_.identity, cell.cell)
            found[key] = (result.error, result.status, tuple(result.token_ids or ()), result.kept_digest)
    return found
