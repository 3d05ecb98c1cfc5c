"""MadaKV: proxy mass, quotas per modality and the carry from layer to layer against loops, and through models."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.allocators.compensation import Compensation
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.scorers.tail_mass import TailMassScorer
from mmkv_bench.compression.selectors.modality_quota import ModalityQuota
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.methods.build import build_compressor
from tests import cover, reference, zoo
from tests.compression import oracles
from tests.core import parts
from tests.each import each
from tests.generation import common
from tests.oracles import madakv as oracle

LAYERS = 3
few = settings(max_examples=15, deadline=None, derandomize=True)
many = settings(max_examples=cover.examples(200), deadline=None, derandomize=True)


def shipped(**parameters) -> Compressor:
    node = copy.deepcopy(method_defaults(["madakv"])["madakv"])
    for name, value in parameters.items():
        node[name] = value
    return build_compressor("madakv", node, "paper")


def rows_of(index) -> list[list[list[int]]]:
    return [[[j for j in row if j >= 0] for row in layer.tolist()] for layer in index]


# ---------------------------------------------------------------- proxy mass


@few
@given(
    length=st.one_of(st.integers(1, 6), st.integers(1, 60)),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    proxies=st.sampled_from([1, 4, 32]),
    cuts=st.lists(st.integers(1, 59), max_size=3),
    seed=st.integers(0, 10**6),
)
def test_scores_are_the_attention_of_the_last_queries(length, kv_heads, group, proxies, cuts, seed):
    layer, scorer = oracles.make_layer(length, kv_heads, group, seed=seed), TailMassScorer(proxies)
    want = oracle.proxy_mass(layer.query.float(), layer.key, layer.scaling, proxies)
    for budget in (1, 9):  # nothing is reserved for proxies, so the budget does not change them
        got = scorer.score(layer.observe(scorer.needs, cuts), budget, 0)
        assert got.dtype == torch.float32 and got.shape == want.shape
        assert ((got - want).abs() <= 2e-5 * want + 1e-9).all()
    assert scorer.window_effective(1, length) == min(proxies, length)
    assert scorer.fallbacks(1, length) == (("window_reduced",) if length < proxies else ())


# ---------------------------------------------------------------- quotas


@st.composite
def problems(draw):
    heads, n = draw(st.integers(1, 3)), draw(st.integers(0, 40))
    if draw(st.booleans()):  # few values: ties everywhere
        values = draw(st.lists(st.integers(0, 3), min_size=heads * n, max_size=heads * n))
        scores = torch.tensor(values, dtype=torch.float32).view(heads, n)
    else:
        g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
        scores = torch.rand(heads, n, generator=g) ** 4
    types = torch.tensor(draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=n, max_size=n)), dtype=torch.int64)
    caps = torch.tensor(draw(st.lists(st.integers(0, n + 2), min_size=heads, max_size=heads)))
    return scores, types, caps


@many
@given(problem=problems(), sorted_before=st.booleans())
def test_each_head_keeps_its_quota_of_either_modality(problem, sorted_before):
    scores, types, caps = problem
    n, none = scores.shape[1], torch.zeros(scores.shape[1], dtype=torch.bool)
    order = ModalityQuota.order(scores) if sorted_before else None
    (got,) = rows_of([ModalityQuota().select(scores, caps, none, order, types)])
    caps = caps.clamp_max(n).tolist()
    assert got == [oracle.keep(row, types.tolist(), cap) for row, cap in zip(scores.tolist(), caps, strict=True)]
    assert [len(row) for row in got] == caps


@many
@given(problem=problems(), recents=st.integers(1, 12))
def test_protected_tokens_count_towards_their_own_quota(problem, recents):
    scores, types, caps = problem
    n = scores.shape[1]
    selector = ModalityQuota(recents=recents)
    protected = selector.protected(n, 4, types)
    (got,) = rows_of([selector.select(scores, caps, protected, None, types)])
    for row, kept, cap in zip(scores.tolist(), got, caps.clamp_max(n).tolist(), strict=True):
        last = [j for j in range(n) if j >= n - recents]
        last = last[max(0, len(last) - cap) :]
        assert len(kept) == cap and set(last) <= set(kept)
        phi_v, _ = oracle.quota(row, types.tolist(), cap)
        forced = sum(1 for j in last if types[j])
        visual = sum(1 for j in kept if types[j])
        # the quota, moved only as far as the protected tokens of either modality ask for
        assert visual == min(max(phi_v, forced), cap - (len(last) - forced))
        for kind in (True, False):
            free = [j for j in range(n) if bool(types[j]) == kind and j not in last]
            best = sorted(free, key=lambda j: (-row[j], j))
            mine = [j for j in kept if j in free]
            assert mine == sorted(best[: len(mine)])


def test_quotas_by_hand():
    """w_v = 0.6, w_t = 0.4: of two entries 1.2 are visual, of three 1.8, of five 3 of which two exist."""
    scores, types = torch.tensor([[0.4, 0.2, 0.3, 0.1, 0.0]]), torch.tensor([1, 2, 0, 0, 0])
    none = torch.zeros(5, dtype=torch.bool)
    for cap, kept in ((0, []), (1, [0]), (2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4])):
        (rows,) = rows_of([ModalityQuota().select(scores, torch.tensor([cap]), none, None, types)])
        assert rows == [kept]
    # plain top-k would keep the text token 2 here; half of the mass is visual, so half of the entries are
    scores = torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.4]])
    (rows,) = rows_of([ModalityQuota().select(scores, torch.tensor([2]), none, None, torch.tensor([1, 1, 1, 1, 0]))])
    assert rows == [[0, 4]]


def test_heads_of_one_layer_divide_their_entries_differently():
    scores = torch.tensor([[3.0, 3, 1, 1], [1, 1, 5, 5]])
    none = torch.zeros(4, dtype=torch.bool)
    caps = torch.tensor([2, 2])
    (rows,) = rows_of([ModalityQuota().select(scores, caps, none, None, torch.tensor([1, 1, 0, 0]))])
    assert rows == [[0, 1], [2, 3]]  # 1.5 visual entries, halves up, and 1 / 3


@each("types", [None, torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.int64)])
def test_a_single_modality_gets_everything_and_the_row_says_so(types):
    scores, caps, none = torch.rand(2, 6), torch.tensor([2, 4]), torch.zeros(6, dtype=torch.bool)
    got = ModalityQuota().select(scores, caps, none, None, types)
    assert torch.equal(got, TopK(recents=0).select(scores, caps, none))
    assert ModalityQuota().fallbacks(2, 6, types) == ("single_modality",)
    assert ModalityQuota().fallbacks(2, 6, torch.tensor([0, 1, 0, 0, 0, 0])) == ()


def test_scores_that_are_no_mass_are_refused():
    none = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="allowed: scorers of attention mass"):
        ModalityQuota().select(-torch.ones(1, 3), torch.tensor([1]), none, None, torch.tensor([0, 1, 1]))


# ---------------------------------------------------------------- compensation


@few
@given(
    length=st.integers(1, 80),
    theta=st.sampled_from(["0.5", "0.9", "1"]),
    proxies=st.sampled_from([1, 8, 32]),
    visual=st.floats(0, 1),
    even=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_needs_are_the_fewest_tokens_that_cover_either_modality(length, theta, proxies, visual, even, seed):
    layer, allocator = oracles.make_layer(length, 2, 2, seed=seed), Compensation(float(theta), proxies)
    if even:
        layer.key = layer.key[:, :1].expand(-1, length, -1)  # equal masses, which meet theta exactly
    obs = layer.observe(allocator.needs)
    obs.token_types = (torch.rand(length, generator=torch.Generator().manual_seed(seed)) < visual).long()
    psi = TailMassScorer(proxies).score(obs, 4, 0)
    got = allocator.summary(obs, 4, 0)
    assert got.dtype == torch.float64 and got.device.type == "cpu"
    want = [oracle.need(row, obs.token_types.tolist(), theta) for row in psi.tolist()]
    slack = [oracle.need(row, obs.token_types.tolist(), str(float(theta) * (1 - 1e-6))) for row in psi.tolist()]
    assert all(low <= mine <= high for low, mine, high in zip(slack, got.tolist(), want, strict=True))
    if not even and theta != "1":
        assert got.tolist() == want


def test_needs_by_hand():
    """Ten text tokens of equal mass: nine of them hold 0.9 of it, not ten."""
    layer, allocator = oracles.make_layer(10, 1, 1), Compensation(0.9, 1)
    layer.key = layer.key[:, :1].expand(-1, 10, -1)
    obs = layer.observe(allocator.needs)
    assert allocator.summary(obs, 4, 0).tolist() == [9]
    obs.token_types = torch.tensor([1] * 5 + [0] * 5)
    assert allocator.summary(obs, 4, 0).tolist() == [10]  # 4.5 of 5, twice


@many
@given(
    data=st.data(),
    n=st.integers(0, 120),
    n_layers=st.sampled_from([1, 2, 3, 5, 28]),
    heads=st.sampled_from([1, 2, 4]),
    share=st.floats(0, 1),
    granted=st.booleans(),
)
def test_layers_settle_what_they_need_with_the_layers_behind(data, n, n_layers, heads, share, granted):
    budget = int(share * (n + 5))
    column = st.lists(st.integers(0, n + 1), min_size=heads, max_size=heads)
    needs = data.draw(st.lists(column, min_size=n_layers, max_size=n_layers))
    allocator = Compensation(carry="granted" if granted else "printed")
    scores = [torch.zeros(heads, n)] * n_layers
    summaries = {i: torch.tensor(one, dtype=torch.float64) for i, one in enumerate(needs)}
    context = Context(max(1, budget), n, summaries=summaries)
    got = allocator.caps(scores, budget, range(n_layers), n_layers, context)
    assert all(c.dtype == torch.int64 and c.device.type == "cpu" and c.shape == (heads,) for c in got)
    caps = [int(c[0]) for c in got]
    assert [c.tolist() for c in got] == [[cap] * heads for cap in caps]
    assert caps == oracle.layer_budgets(needs, budget, n, granted)
    assert max(caps) <= n and min(caps) >= min(1, budget, n)
    whole = min(budget, n) * n_layers
    assert sum(caps) <= whole == allocator.allowance(budget, n, range(n_layers), n_layers)
    if granted:
        assert sum(caps) == whole
    for i in range(n_layers):  # decided as the prefill passes, with what is known by then
        known = replace(context, summaries={j: summaries[j] for j in range(i + 1)})
        assert int(allocator.caps([scores[i]], budget, [i], n_layers, known)[0][0]) == caps[i]


@each(
    ("carry", "needs", "budget", "n", "caps"),
    [
        ("granted", [10, 10, 10], 10, 50, [10, 10, 10]),
        ("granted", [14, 10, 3], 10, 50, [14, 10, 6]),  # phi: 10, 8, 6; the last one takes what is left
        ("granted", [40, 40, 3], 10, 50, [28, 1, 1]),  # nobody behind falls below one entry
        ("granted", [2, 2, 2], 10, 12, [6, 12, 12]),  # what does not fit behind stays in front
        ("granted", [2.5, 3.5, 0], 3, 9, [3, 4, 2]),  # halves up
        ("printed", [14, 10, 3], 10, 50, [10, 8, 6]),  # 10, 10 - 4 / 2, 8 - 2 / 1: six entries stay unused
        ("printed", [2, 2, 2], 10, 50, [10, 14, 6]),  # 10, 14, 26: cut where the total ends
        ("printed", [10, 10, 10], 10, 50, [10, 10, 10]),
    ],
)
def test_carries_by_hand(carry, needs, budget, n, caps):
    found = Compensation(carry=carry).layer_caps([Fraction(need) for need in needs], budget, n, len(needs))
    assert found == caps


def test_the_compensation_is_per_head_although_it_adds_up_over_heads():
    """Two heads that need 12 each of 10: K = 4, and the layers behind pay 2 per head, not 4."""
    context = Context(10, 50, summaries={0: torch.tensor([12.0, 12.0]), 1: torch.tensor([0.0, 0.0])})
    scores = [torch.zeros(2, 50)] * 2
    assert [c.tolist() for c in Compensation().caps(scores, 10, [0, 1], 2, context)] == [[12, 12], [8, 8]]


def test_a_layer_without_its_predecessors_is_refused():
    context = Context(2, 9, summaries={1: torch.tensor([1.0])})
    with pytest.raises(ValueError, match="needs of layer 0 are missing"):
        Compensation().caps([torch.zeros(1, 9)], 2, [1], 3, context)


# ---------------------------------------------------------------- the method


def wanted(psi: list[torch.Tensor], types: list[int], budget: int, strict: bool, granted=True) -> list[list[list[int]]]:
    """The oracle's whole method from psi `[Hkv, T]` of every layer."""
    n, allowed = len(types) - int(strict), budget - int(strict)
    needs = [[oracle.need(row, types, "0.9") for row in layer.tolist()] for layer in psi]
    caps = oracle.layer_budgets(needs, allowed, n, granted)
    return [
        [oracle.keep(row[:n], types[:n], cap) for row in layer.tolist()] for layer, cap in zip(psi, caps, strict=True)
    ]


@few
@given(
    length=st.integers(2, 120),
    heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 3]),
    share=st.floats(0, 1),
    strict=st.booleans(),
    granted=st.booleans(),
    visual=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_the_method_keeps_what_the_loops_keep(length, heads, group, share, strict, granted, visual, seed):
    made = shipped(carry="granted" if granted else "printed")
    budget = 1 + int(share * (length - 2))
    types = (torch.rand(length, generator=torch.Generator().manual_seed(seed)) < visual).long()
    seen = [oracles.make_layer(length, heads, group, seed=seed + i).observe(made.needs, layer=i) for i in range(LAYERS)]
    for obs in seen:
        obs.token_types = types
    scores = [made.scorer.score(obs, budget, 0) for obs in seen]
    summaries = {i: made.allocator.summary(obs, budget, 0) for i, obs in enumerate(seen)}
    together = rows_of(made.select(scores, budget, types, range(LAYERS), LAYERS, strict, summaries=summaries))
    assert together == wanted(scores, types.tolist(), budget, strict, granted)
    kept = sum(len(row) for rows in together for row in rows)
    assert kept == (budget - int(strict)) * heads * LAYERS or not granted
    for i in range(LAYERS):
        known = {j: summaries[j] for j in range(i + 1)}
        alone = made.select([scores[i]], budget, types, [i], LAYERS, strict, summaries=known)
        assert rows_of(alone) == together[i : i + 1]


def test_shipped_defaults_are_the_documented_ones_and_one_parameter_reaches_all_parts():
    made = shipped()
    assert made.scorer == TailMassScorer(32) and made.allocator == Compensation(0.9, 32, "granted")
    assert made.selector == ModalityQuota(recents=0) and made.scope == "layer" and not made.needs_visual
    config = compose(["method=madakv", "methods.madakv.proxies=8", "methods.madakv.theta=0.5"])
    changed = build_compressor("madakv", config.methods["madakv"], "paper")
    assert (changed.scorer, changed.allocator) == (TailMassScorer(8), Compensation(0.5, 8))
    node = method_defaults(["madakv"])["madakv"]
    assert replace(build_compressor("madakv", node, "released"), reading="paper") == made


@each(
    ("build", "message"),
    [
        (lambda: TailMassScorer(proxies=0), "proxies is 0; allowed: 1 or more"),
        (lambda: Compensation(proxies=-1), "proxies is -1"),
        (lambda: Compensation(theta=0), "theta is 0; allowed: a share"),
        (lambda: Compensation(theta=1.2), "theta is 1.2"),
        (lambda: Compensation(carry="grant"), "did you mean 'granted'"),
        (lambda: ModalityQuota(recents=-1), "recents is -1"),
    ],
)
def test_impossible_parameters_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


# ---------------------------------------------------------------- through models

FAMILIES = ("qwen2_5_vl", "llava_next", "internvl_qwen3")


def proxy_attention(family, inputs, proxies: int = 32) -> list[torch.Tensor]:
    """psi `[Hkv, T]` of every layer from the attention maps that stock eager attention returns."""
    model = zoo.model(family, "eager")
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    zoo.set_attention(model, "sdpa")
    heads = model.config.get_text_config(decoder=True).num_key_value_heads
    return [m[0, :, -proxies:].double().mean(1).view(heads, -1, m.shape[-1]).mean(1) for m in maps]


def types_of(model, inputs) -> list[int]:
    return (inputs["input_ids"][0] == getattr(model.config, "image_token_id", -1)).int().tolist()


@each("strict", [False, True])
@each("carry", ["granted", "printed"])
@cover.few("family", FAMILIES, keep=2, first=1)
def test_kept_sets_of_a_model_are_the_oracles(family, carry, strict):
    model, inputs = zoo.model(family), zoo.prompt(family)
    length = inputs["input_ids"].shape[1]
    protocol = "strict" if strict else "paper"
    with attach(model, shipped(carry=carry), parts.budget(length // 3), protocol) as session, torch.no_grad():
        model(**inputs, use_cache=True)
        kept = rows_of([index[0] for index in session.kept()])
    types = types_of(model, inputs)
    want = wanted(proxy_attention(family, inputs), types, length // 3, strict, carry == "granted")
    assert kept == want
    assert len({sum(types[j] for j in row) for rows in want for row in rows}) > 2, "all heads divide alike"


@cover.few("family", FAMILIES, keep=2, first=1)
def test_decoding_equals_full_attention_with_the_evicted_entries_masked(family):
    model, inputs = zoo.model(family), zoo.prompt(family)
    length = inputs["input_ids"].shape[1]
    with attach(model, shipped(), parts.budget("30%")) as session:
        run = reference.generate(model, inputs, 6)
        kept = session.kept()
    masked = reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 6)
    assert (run.logits - masked.logits).abs().max() <= 2e-6
    assert torch.equal(run.tokens, masked.tokens)


@cover.few("family", FAMILIES, keep=2, first=1)
def test_layers_are_freed_one_after_the_other_during_the_prefill(family):
    """While layer l attends, those before it hold their share only, and all of them nothing beyond the budget."""
    model, inputs = zoo.model(family), zoo.prompt(family)
    length = inputs["input_ids"].shape[1]
    budget, seen = length // 4, []
    hooks = []
    with attach(model, shipped(), parts.budget(budget)) as session, torch.no_grad():
        for layer in session.attentions:
            hooks.append(
                layer.register_forward_pre_hook(
                    lambda module, args: seen.append(
                        [stored.keys.shape[2] for stored in session.cache.layers[: module.layer_idx]]
                    )
                )
            )
        model(**inputs, use_cache=True)
        caps = [max(len(row) for row in index[0].tolist()) for index in session.kept()]
        slack = session.cache.layers[0].keys.shape[2] - caps[0]
    for hook in hooks:
        hook.remove()
    assert seen == [[cap + slack for cap in caps[:i]] for i in range(zoo.LAYERS)]
    assert sum(caps) == budget * zoo.LAYERS


@pytest.mark.full
@cover.few("family", FAMILIES, first=2)
def test_forks_answer_as_the_method_alone(family):
    variants = [shipped(), shipped(carry="printed", theta=0.6), shipped(proxies=4, recents=2)]
    cells = [
        common.cell(replace(made, name=f"madakv{i}"), budget, protocol)
        for i, made in enumerate(variants)
        for budget in (1, 9, "40%")
        for protocol in common.PROTOCOLS
    ]
    forks = common.assert_forks_equal_alone(zoo.model(family), family, common.encoded(family), cells)
    assert len({fork.kept_digest for fork in forks}) > len(cells) // 2


def test_a_text_prompt_is_one_modality():
    model, inputs = zoo.model("llama"), zoo.prompt("llama")
    with attach(model, shipped(), parts.budget(12)) as session, torch.no_grad():
        model(**inputs, use_cache=True)
        kept, said = rows_of([index[0] for index in session.kept()]), session.listener.fallbacks
    types = [0] * inputs["input_ids"].shape[1]
    assert kept == wanted(proxy_attention("llama", inputs), types, 12, strict=False)
    assert said == [("single_modality",)]
