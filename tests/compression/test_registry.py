"""What every registered method promises; a file in conf/method joins this matrix by being there."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import SCORE_DTYPES, Compressor
from mmkv_bench.compression.decoding.late import Late
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.selectors.modality_quota import ModalityQuota
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.schema import options
from mmkv_bench.methods.build import OUTSIDE, build_compressor
from tests import reference, zoo
from tests.calibrate import synthetic
from tests.compression import oracles
from tests.generation import common

LAYERS = 3
OPEN = set(OUTSIDE)  # custom and kvpress are built from what the user names: tests/methods
NAMES = sorted(set(options("method")) - {"full"} - OPEN)
READINGS = ("paper", "released")
DEFAULTS = method_defaults(NAMES)  # composed once, because that is slow

every_reading = pytest.mark.parametrize("reading", READINGS)


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


def prompt(length: int, heads: int, group: int, seed: int, needs: Needs, dtype=torch.float32, identity="sample"):
    """A model's observations of one prompt: other weights and hidden states in every layer."""
    seen = []
    for i in range(LAYERS):
        layer = oracles.make_layer(length, heads, group, seed=seed + i)
        seen.append(layer.observe(needs, layer=i, identity=identity, dtype=dtype))
        seen[-1].token_types, seen[-1].layers = types_of(length), LAYERS
    return seen


def scores_of(made: Compressor, seen, budget: int, seed: int = 0) -> list[torch.Tensor]:
    return [made.scorer.score(one, budget, seed) for one in seen]


def summaries_of(made: Compressor, seen, budget: int, seed: int = 0) -> dict[int, torch.Tensor]:
    if made.allocator.summary_key(budget, seen[0].length) is None:
        return {}
    return {layer: made.allocator.summary(one, budget, seed) for layer, one in enumerate(seen)}


def keep(made: Compressor, seen, budget: int, strict: bool, seed: int = 0) -> list[torch.Tensor]:
    """What stays of an observed prompt: scored, summed up, divided and selected as a run does it."""
    scores, summaries = scores_of(made, seen, budget, seed), summaries_of(made, seen, budget, seed)
    types = types_of(seen[0].length)
    return made.select(scores, budget, types, range(LAYERS), LAYERS, strict, summaries=summaries)


def same(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


problems = {
    "length": st.integers(2, 150),
    "heads": st.sampled_from([1, 2, 4]),
    "group": st.sampled_from([1, 3]),
    "share": st.floats(0, 1),
    "strict": st.booleans(),
    "seed": st.integers(0, 10**6),
}


def check_count(made: Compressor, kept: int, budget: int) -> None:
    """``kept`` entries against a budget of as many, both summed over layers and heads: equal unless the method itself
    declares that it may exceed or fall short."""
    assert made.exceeds or kept <= budget, f"{kept} entries are kept where the budget is {budget}"
    assert made.falls_short or kept >= budget, f"{kept} entries are kept of a budget of {budget}"


@every_method
@every_reading
@settings(max_examples=8, deadline=None, derandomize=True)
@given(**problems)
def test_exactly_the_budget_is_kept(name, reading, length, heads, group, share, strict, seed):
    made = method(name, reading, heads)
    budget = 1 + int(share * (length - 2))  # 1 .. T - 1
    index = keep(made, prompt(length, heads, group, seed, made.needs), budget, strict)
    candidates, granted = length - int(strict), budget - int(strict)
    assert len(index) == LAYERS
    for rows in index:
        assert rows.dtype == torch.int64 and rows.shape[0] == heads
        for row in rows.tolist():
            real = [j for j in row if j >= 0]
            assert row == [-1] * (len(row) - len(real)) + sorted(set(real))  # ascending, once each, padded on the left
            assert all(j < candidates for j in real)
    check_count(made, sum(int((rows >= 0).sum()) for rows in index), granted * heads * LAYERS)


@every_method
def test_no_paper_reading_exceeds_its_budget_and_only_released_ones_may(name):
    assert not method(name).exceeds
    made = method(name, "released")
    excess = made.allocator.excess
    assert made.exceeds >= (excess > 0), "an excess that is declared in entries is declared as one"


@every_method
@settings(max_examples=4, deadline=None, derandomize=True)
@given(**problems)
def test_a_layer_decided_alone_is_decided_as_among_the_others(name, length, heads, group, share, strict, seed):
    made = method(name, "paper", heads)
    if made.scope == "model":
        return  # such a method sees all layers before it decides
    budget = 1 + int(share * (length - 2))
    seen = prompt(length, heads, group, seed, made.needs)
    scores, summaries, types = scores_of(made, seen, budget), summaries_of(made, seen, budget), types_of(length)
    together = made.select(scores, budget, types, range(LAYERS), LAYERS, strict, summaries=summaries)
    alone = []
    for i in range(LAYERS):
        so_far = {layer: summary for layer, summary in summaries.items() if layer <= i}
        alone += made.select([scores[i]], budget, types, [i], LAYERS, strict, summaries=so_far)
    assert same(alone, together)


@every_method
@every_reading
@pytest.mark.parametrize("strict", [False, True])
def test_the_same_prompt_keeps_the_same_entries_whatever_ran_before(name, reading, strict):
    """Neither other methods, in any order, nor other samples, seeds or the state of torch change anything."""
    made = method(name, reading)
    shape = (70, 2, 3, 5)
    alone = keep(made, prompt(*shape, made.needs), 24, strict)
    crowd = prompt(*shape, union())
    for other in reversed(NAMES[NAMES.index(name) % 5 :: 5]):  # other methods on the way, the stream of torch moved
        keep(method(other), crowd, 30, strict, seed=3)
        torch.rand(3)
    keep(made, prompt(40, 2, 3, 11, union(), identity="other"), 9, strict)
    again = [keep(made, crowd, 24, strict) for _ in range(2)]
    assert same(again[0], alone) and same(again[1], alone)


@every_method
def test_the_seed_decides_stochastic_methods_alone(name):
    made, shape = method(name), (70, 2, 3, 5)
    seen = prompt(*shape, made.needs)
    first, same_seed, other_seed = (scores_of(made, seen, 24, seed) for seed in (0, 0, 1))
    assert same(first, same_seed)
    assert same(first, other_seed) == (not made.stochastic)


@every_method
def test_equal_scores_keep_the_lower_tokens(name):
    """Deterministic ties: with equal scores and nothing protected the first candidates stay."""
    made = method(name)
    if made.allocator.summary_key(9, 30) is not None or made.allocator.falls_short:
        return  # allocations that do not come from the scores are tested with their methods
    flat = [torch.ones(2, 30) for _ in range(LAYERS)]
    index = made.select(flat, 9, types_of(30), range(LAYERS), LAYERS)
    protected = made.selector.protected(30, 9, types_of(30)).expand(2, -1)
    for rows in index:
        for row, always in zip(rows.tolist(), protected.tolist(), strict=True):
            free = [j for j in row if j >= 0 and not always[j]]
            types = types_of(30).tolist()
            kinds = (0, 1) if isinstance(made.selector, ModalityQuota) else (None,)  # a quota per kind of token
            for kind in kinds:
                of_kind = [j for j in range(30) if not always[j] and kind in (None, types[j])]
                kept = [j for j in free if kind in (None, types[j])]
                assert kept == of_kind[: len(kept)]


@every_method
@every_reading
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("length", "budget"), [(1, 1), (2, 1), (6, 3), (80, 33)])
def test_half_precision_gives_finite_scores_and_the_budget(name, reading, dtype, length, budget):
    made = method(name, reading)
    seen = prompt(length, 2, 2, 3, made.needs, dtype)
    for score in scores_of(made, seen, budget):
        assert score.shape == (2, length) and score.dtype in SCORE_DTYPES and torch.isfinite(score).all()
    for summary in summaries_of(made, seen, budget).values():
        assert torch.isfinite(summary).all()
    if budget < length:
        kept = sum(int((rows >= 0).sum()) for rows in keep(made, seen, budget, False))
        check_count(made, kept, budget * 2 * LAYERS)


@every_method
def test_half_precision_keeps_the_float32_selection_up_to_near_ties(name):
    """Inputs are rounded to half precision first, so that both sides start from the same numbers."""
    made = method(name)
    if made.stochastic and name != "random":
        pytest.skip("proxies are projected in the model's dtype, which moves votes")
    seen = {}
    for dtype in (torch.float32, torch.bfloat16):
        layer = oracles.make_layer(90, 2, 2, seed=8)
        layer.key, layer.value = layer.key.bfloat16().double(), layer.value.bfloat16().double()
        obs = layer.observe(made.needs, dtype=dtype)
        obs.token_types, obs.layers = types_of(90), LAYERS
        seen[dtype] = [obs] * LAYERS
    exact, half = (keep(made, obs, 30, False) for obs in seen.values())
    for a, b in zip(exact, half, strict=True):
        ours, theirs = ({(h, j) for h, row in enumerate(x.tolist()) for j in row if j >= 0} for x in (a, b))
        assert len(ours - theirs) <= 4, "more than rounding of the queries to 8 bits can move"


# ---------------------------------------------------------------- through a model


FAMILIES = ("qwen2_5_vl", "llava_next")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


def of_model(name: str, model, reading: str = "paper") -> Compressor:
    config = model.config.get_text_config(decoder=True)
    assert config.num_hidden_layers == LAYERS
    return method(name, reading, config.num_key_value_heads)


@pytest.mark.parametrize("name", [*NAMES, *UNBUDGETED])
def test_a_budget_of_the_whole_prompt_is_the_full_cache(name, family):
    model, inputs = zoo.model(family), zoo.prompt(family)
    made, length = of_model(name, model), inputs["input_ids"].shape[1]
    if made.quantises:
        return  # fewer bits are not the full cache: tests/methods/test_kivi*
    untouched = reference.generate(model, inputs, 4)
    for budget in (length, length + 5, 1.0):
        with attach(model, made, budget=Budget.parse(budget)) as session:
            run, kept = reference.generate(model, inputs, 4), session.kept()
        assert torch.equal(run.logits, untouched.logits)
        for index in kept:
            assert torch.equal(index, torch.arange(length).expand_as(index))


@every_method
@every_reading
def test_the_stored_tensors_hold_what_was_planned(name, reading, family):
    """Counted from the cache right after the prefill."""
    model, inputs = zoo.model(family), zoo.prompt(family)
    length, made = inputs["input_ids"].shape[1], of_model(name, model, reading)
    budget = length // 3
    with attach(model, made, budget=Budget.parse(budget)) as session:
        reference.generate(model, inputs, 1)
        kept, layers = session.kept(), session.cache.layers
    heads = kept[0].shape[1]
    total = sum(int((index >= 0).sum()) for index in kept)
    if isinstance(made.decoding, Late):  # MEDA's release reduces in the first decode step
        assert all(int(layer.entries().min()) == length for layer in layers)
        return
    for index, layer in zip(kept, layers, strict=True):
        assert torch.equal(layer.entries().cpu(), (index >= 0).sum(-1))
        if made.decoding is None:
            stored = layer.slot_positions()[..., : index.shape[-1]]
            assert torch.equal(stored, index.to(stored))
    if name == "blind":
        types = inputs["input_ids"][0] == model.config.image_token_id
        assert total == min(budget, int((~types).sum())) * heads * LAYERS
        assert not types[torch.cat([index[index >= 0] for index in kept])].any()
    check_count(made, total, budget * heads * LAYERS)


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


@every_method
def test_layer_scope_frees_each_layer_during_the_prefill_and_model_scope_does_not(name, family):
    """Measured after every layer: with scope "layer" all layers so far are small, with "model" all are full until the
    last one; afterwards both are small."""
    model, inputs = zoo.model(family), zoo.prompt(family)
    made = of_model(name, model)
    length = inputs["input_ids"].shape[1]
    with attach(model, made, budget=Budget.parse(max(2, length // 8)), reserve=0) as session:
        watch = Watching(model, session)
        reference.generate(model, inputs, 1)
        watch.remove()
        final = stored_bytes(session.cache)
    config = model.config.get_text_config(decoder=True)
    heads, dim = config.num_key_value_heads, model.get_decoder().layers[0].self_attn.head_dim
    full = 2 * heads * length * dim * 4
    assert len(watch.after) == LAYERS
    assert sum(final) <= 0.6 * full * LAYERS, f"{final} bytes are stored where the full cache has {full} per layer"
    for done, held in enumerate(watch.after[:-1], 1):
        if made.scope == "model":
            assert all(bytes_ >= full for bytes_ in held[:done]), "a model-scope method holds everything until the end"
        else:
            assert held[:done] == final[:done], "a layer-scope method has reduced every layer that is prefilled"
            assert sum(held[:done]) < full * done


@every_method
def test_methods_that_need_visual_tokens_refuse_text_and_the_others_do_not(name):
    family = "qwen2_5_vl"
    model = zoo.model(family)
    made = of_model(name, model)
    text = common.encoded(family, zoo.without_visual(family, 20))
    cells = [common.cell(made, 8, protocol) for protocol in common.PROTOCOLS[:2]]
    for results in (common.together(model, family, text, cells), common.alone(model, family, text, cells)):
        for result in results:
            if made.needs_visual:
                assert result.status == "error" and "prompts with images or videos" in result.error
            else:
                assert result.status == "ok", result.error


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
