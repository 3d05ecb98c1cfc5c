"""Every ablation of MM-ShiftKV (tables 5 to 13) and every switch of its release against a float64 oracle."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.calibrate.artefact import Calibrations
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.numerics.ordering import break_ties
from mmkv_bench.compression.scorers.last_query import LastQueryScorer
from mmkv_bench.compression.scorers.mmshift import MMShiftScorer
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.config.files import conf_dir
from mmkv_bench.errors import CalibrationError, ConfigError, UnsupportedError
from mmkv_bench.methods.build import build_compressor
from tests import cover, reference, zoo
from tests.compression import oracles
from tests.each import each
from tests.oracles import mmshift as oracle

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
N, GROUPS, SIZE, WIDTH = 12, 3, 4, 12  # WIDTH is that of `oracles.make_layer`
LAYERS = 4  # of an observation made by `oracles.Layer.observe`
CALIBRATION = {
    "gamma": [1.5, 4.0, 0.5, 2.0],
    "mean": [[0.1 * layer - 0.03 * e for e in range(WIDTH)] for layer in range(LAYERS)],
}
shapes = {
    "length": st.integers(1, 300),
    "kv_heads": st.sampled_from([1, 2]),
    "group": st.sampled_from([1, 2, 3]),
    "number": st.integers(0, 10**6),
}


def kinds_of(length: int, mix: str) -> list[int]:
    """Text, an image or a video in the middle, text; or one kind alone."""
    if mix in ("text", "image"):
        return [int(mix == "image")] * length
    return [2 * (length // 4 <= t < length // 2) + (length // 2 <= t < length - length // 5) for t in range(length)]


def observed(scorer, layer, kinds, index=0, cuts=(), identity="sample", dtype=torch.float32):
    seen = layer.observe(scorer.needs, cuts, layer=index, identity=identity, dtype=dtype)
    seen.token_types = torch.tensor(kinds)
    return seen


def expected_masses(scorer, layer, kinds, index, seed, identity="sample"):
    """The oracle's group masses and anchor for a scorer's parameters."""
    anchor = oracle.last_attention(layer.query[:, -1].float(), layer.key, layer.scaling)
    if index < scorer.plain_layers:
        states, groups = layer.hidden[-1:].expand(oracle.COPIES, -1), 1
        places = [1 + i for i in range(oracle.COPIES)]
    else:
        eps, groups = oracle.noise(scorer.samples, layer.hidden.shape[1], seed, identity, index), scorer.groups
        gamma = scorer.gamma
        if scorer.expansion == "layer":
            gamma = (list(scorer.layer_gamma) or scorer.calibration["gamma"])[index]
        states = oracle.states(
            layer.hidden,
            kinds,
            eps,
            groups,
            gamma=gamma,
            statistics=scorer.statistics,
            centring=scorer.centring,
            modality=scorer.modality,
            last=scorer.last_tokens,
            other_mean=scorer.calibration["mean"][index] if scorer.centring == "global" else None,
        )
        size = scorer.samples // groups
        tiled = scorer.offsets == "tiled"
        places = [groups * (1 + i % size) if tiled else 1 + i for i in range(scorer.samples)]
    queries = layer.project(states)
    for i, place in enumerate(places):
        queries[:, i] = oracles.turn(queries[:, i : i + 1], torch.tensor([layer.length - 1 + place]))[:, 0]
    mass = oracle.group_masses(
        queries,
        layer.key,
        layer.scaling,
        groups,
        gqa=scorer.gqa,
        drop_last=scorer.drop_last_key,
        anchor=anchor if scorer.anchor_in_groups else None,
    )
    return mass, anchor


# ---------------------------------------------------------------- the scores


@PROPERTY
@given(
    **shapes,
    cuts=st.lists(st.integers(1, 299), max_size=3),
    mix=st.sampled_from(["both", "text", "image"]),
    index=st.integers(0, LAYERS - 1),
    seed=st.integers(0, 2),
    gamma=st.sampled_from([0.0, 1.0, 3.0]),
    lam=st.sampled_from([0.0, 1.0, 50.0]),
    statistics=st.sampled_from(["elementwise", "scalar"]),
    centring=st.sampled_from(["sample", "none", "global"]),
    gqa=st.sampled_from(["probability", "vote"]),
    offsets=st.sampled_from(["consecutive", "tiled"]),
    anchored=st.booleans(),
    drop=st.booleans(),
    modality=st.sampled_from(["unified", "vision", "text", "separate"]),
    factors=st.sampled_from([None, "calibrated", (1.0, 0.5, 2.0, 3.0)]),
    last=st.sampled_from([0, 1, 9, 512]),
    plain=st.sampled_from([0, 2]),
)
def test_the_mass_without_votes_equals_its_formula(
    length, kv_heads, group, number, cuts, mix, index, seed, gamma, lam, statistics, centring, gqa, offsets, anchored,
    drop, modality, factors, last, plain,
):  # fmt: skip
    layer, kinds = oracles.make_layer(length, kv_heads, group, seed=number), kinds_of(length, mix)
    scorer = MMShiftScorer(
        N,
        GROUPS,
        gamma,
        lam=lam,
        statistics=statistics,
        centring=centring,
        gqa=gqa,
        offsets=offsets,
        anchor_in_groups=anchored,
        drop_last_key=drop,
        voting="none",
        modality=modality,
        expansion="global" if factors is None else "layer",
        layer_gamma=factors if isinstance(factors, tuple) else (),
        last_tokens=last,
        plain_layers=plain,
        calibration=CALIBRATION,
    )
    obs = observed(scorer, layer, kinds, index, cuts)
    if modality == "vision" and not any(kinds) and index >= plain:
        with pytest.raises(UnsupportedError, match="statistics from visual tokens"):
            scorer.score(obs, 8, seed)
        return
    got = scorer.score(obs, 8, seed)
    assert got.dtype == (torch.float64 if lam else torch.float32) and got.shape == (kv_heads, length)
    assert torch.isfinite(got).all()
    want = oracle.summed(*expected_masses(scorer, layer, kinds, index, seed), lam)
    assert ((got.double() - want).abs() <= 5e-4 * want + 1e-5).all()


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    **shapes,
    mix=st.sampled_from(["both", "image"]),
    index=st.integers(0, LAYERS - 1),
    tau=st.sampled_from([0.5, 0.8, 0.95]),
    cover=st.sampled_from(["left", "right"]),
    centring=st.sampled_from(["sample", "global"]),
    modality=st.sampled_from(["unified", "vision", "separate"]),
    layerwise=st.booleans(),
    last=st.sampled_from([0, 9]),
    plain=st.sampled_from([0, 2]),
)
def test_votes_equal_their_definition_under_every_ablation(
    length, kv_heads, group, number, mix, index, tau, cover, centring, modality, layerwise, last, plain
):
    layer, kinds = oracles.make_layer(length, kv_heads, group, seed=number), kinds_of(length, mix)
    if not any(kinds):
        return
    scorer = MMShiftScorer(
        N,
        GROUPS,
        3.0,
        tau,
        lam=0.0,
        centring=centring,
        cover=cover,
        modality=modality,
        expansion="layer" if layerwise else "global",
        last_tokens=last,
        plain_layers=plain,
        calibration=CALIBRATION,
    )
    got = scorer.score(observed(scorer, layer, kinds, index), 8, 0).double()
    assert torch.equal(got, got.round())
    mass, _ = expected_masses(scorer, layer, kinds, index, 0)
    sure, possible = torch.zeros(kv_heads, length), torch.zeros(kv_heads, length)
    for h in range(kv_heads):
        for row in mass[h, 0]:
            inside, maybe = oracles.sure_and_possible(row, tau, cover, slack=2e-4)
            sure[h] += inside
            possible[h] += maybe
    assert (got >= sure).all() and (got <= possible).all()
    assert float((possible - sure).sum()) <= max(2.0, 0.03 * float(possible.sum())), "the oracle leaves little open"


# ---------------------------------------------------------------- the rows of the paper's tables


def shipped(**changes):
    """The scorer that `methods.mmshift.<name>=<value>` gives."""
    return built("mmshift", "paper", changes).scorer


def built(name: str, reading: str = "paper", changes=None):
    default = method_defaults([name])[name]
    words = [f"methods.{name}.{key}={value}" for key, value in (changes or {}).items()]
    node = compose([f"method={name}", *words]).methods[name]
    return build_compressor(name, node, reading, default)


@pytest.mark.full
@each(
    ("table", "row", "changes", "want"),
    [
        (5, "+ Samp.", {"voting": "none", "gamma": 1}, MMShiftScorer(voting="none", gamma=1.0)),
        (5, "+ Var. Exp.", {"voting": "none"}, MMShiftScorer(voting="none")),
        (5, "+ GVote", {}, MMShiftScorer()),
        (6, "gamma", {"gamma": 20}, MMShiftScorer(gamma=20.0)),
        (7, "tau", {"tau": 0.99}, MMShiftScorer(tau=0.99)),
        (8, "N", {"samples": 128}, MMShiftScorer(samples=128)),
        (
            10,
            "layer-wise",
            {"expansion": "layer", "layer_gamma": "[13.0,22.0]"},
            MMShiftScorer(expansion="layer", layer_gamma=(13.0, 22.0)),
        ),
        (11, "none", {"centring": "none"}, MMShiftScorer(centring="none")),
        (12, "no anchor", {"lambda": 0}, MMShiftScorer(lam=0.0)),
        (12, "oversized", {"lambda": 50}, MMShiftScorer(lam=50.0)),
        (13, "vision", {"modality": "vision"}, MMShiftScorer(modality="vision")),
        (13, "text", {"modality": "text"}, MMShiftScorer(modality="text")),
        (13, "separate", {"modality": "separate"}, MMShiftScorer(modality="separate")),
    ],
)
def test_every_ablation_is_an_option_of_the_command(table, row, changes, want):
    assert shipped(**changes) == want, f"table {table}, {row}"


def test_the_shipped_experiment_has_every_table_once():
    config, default = compose(["experiment=mmshift_ablations"]), method_defaults(["mmshift"])["mmshift"]
    assert {name.partition("_")[0] for name in config.variants} == {f"t{n}" for n in (5, 6, 7, 8, 10, 11, 12, 13)}
    built_ones = {}
    for name, changes in config.variants.items():
        assert changes["base"] == "mmshift"
        node = default | changes
        built_ones[name] = build_compressor(name, node, "paper", default).scorer
    assert len({one.key(64, 500) for one in built_ones.values()}) == len(built_ones)
    assert MMShiftScorer().key(64, 500) not in {one.key(64, 500) for one in built_ones.values()}


def test_last_attn_is_what_remains_without_proxies():
    """Table 5's first row: no weight on the proxies leaves the ranking of the last query's attention."""
    layer = oracles.make_layer(50, 2, 3, seed=3)
    scorer = MMShiftScorer(N, GROUPS, 3.0, lam=1e6, voting="none")
    mixed = scorer.score(observed(scorer, layer, [0] * 50), 8, 0)
    last = LastQueryScorer()
    alone = last.score(last_obs := layer.observe(last.needs), 8, 0)
    assert last_obs.length == 50
    assert torch.allclose(mixed / 1e6, alone.double(), atol=1e-4)


def test_mass_follows_strength_where_votes_do_not():
    """Two keys in every covering set get equal votes, however different their mass is."""
    layer = oracles.make_layer(2, 1, 1, seed=5)
    layer.key[0, 0], layer.key[0, 1] = torch.eye(8)[0] * 2, torch.zeros(8)
    layer.wq, layer.bq = layer.wq * 0, torch.eye(8)[0].double()
    flat = (torch.ones(2, 8), torch.zeros(2, 8))
    votes = MMShiftScorer(2, 2, lam=0.0, tau=0.99)
    obs = observed(votes, layer, [0, 0])
    obs._future_rope = lambda offsets: flat
    assert votes.score(obs, 1, 0).tolist() == [[2.0, 2.0]]
    first, second = replace(votes, voting="none").score(obs, 1, 0)[0].tolist()
    share = 1 / (1 + torch.exp(torch.tensor(-2 * 8**-0.5)).item())  # logits 2 / sqrt(8) and 0
    assert first == pytest.approx(2 * share, rel=1e-5) and second == pytest.approx(2 - 2 * share, rel=1e-5)


def peaked(length: int, heads: int, seed: int):
    """A layer whose last query looks at few keys: most anchors are far below the steps of float32 at its votes."""
    layer = oracles.make_layer(length, heads, 2, seed=seed)
    return replace(layer, wq=layer.wq * 12, bq=layer.bq * 12)


@each("lam", [1.0, 50.0, 0.0])
def test_kept_entries_are_those_of_votes_then_anchors_then_places(lam):
    """Neither float32 nor a float64 sum alone orders them: the anchors go down to 1e-30."""
    swallowed = {torch.float32: 0, torch.float64: 0}
    for seed in range(3):
        layer = peaked(300, 2, seed)
        voted, method = MMShiftScorer(64, 8, 3.0, lam=0.0), built("mmshift")
        obs = observed(voted, layer, [0] * 300)
        votes, anchor = voted.score(obs, 64, seed), obs.last_attention()
        assert torch.equal(votes, votes.round()) and float(votes.max()) >= 4
        scores = replace(voted, lam=lam).score(obs, 64, seed)
        kept = replace(method, scorer=replace(voted, lam=lam)).select([scores], 64, None, [0], 1)[0].tolist()
        for h in range(2):
            order = oracle.ranked(votes[h].tolist(), anchor[h].tolist(), lam)
            others = [t for t in order if t != 299]
            assert kept[h] == sorted([*others[:63], 299])
            assert (-scores[h]).argsort(stable=True).tolist() == order
            for dtype in swallowed:
                total = votes[h].to(dtype) + lam * anchor[h].to(dtype)
                swallowed[dtype] += (-total).argsort(stable=True).tolist() != order
    assert lam == 0 or all(swallowed.values()), "the test tells nothing: sums alone find the same order"


def test_only_votes_whose_ties_are_broken_anew_have_a_new_version():
    versions = {
        name: built("mmshift", reading, changes).version
        for name, reading, changes in (
            ("paper", "paper", {}),
            ("lambda 0", "paper", {"lambda": 0}),
            ("released", "released", {}),
        )
    }
    assert versions == {"paper": 2, "lambda 0": 1, "released": 1}


@settings(max_examples=cover.examples(100), deadline=None, derandomize=True)
@given(
    pairs=st.lists(
        st.tuples(
            st.sampled_from([0.0, 5e-324, 1.0, 1 + 2**-52, 1 + 2**-51, 31.999, 32.0]) | st.floats(0, 1600),
            st.sampled_from([0.0, 1e-45, 1e-30, 1e-8, 1.0]),
        ),
        max_size=40,
    ),
)
def test_ties_are_broken_by_the_second_number_and_by_nothing_else(pairs):
    score = torch.tensor([pair[0] for pair in pairs], dtype=torch.float64)
    breaker = torch.tensor([pair[1] for pair in pairs], dtype=torch.float64)
    got = break_ties(score.view(1, -1), breaker.view(1, -1))[0].tolist()
    for i, (a, mine) in enumerate(zip(pairs, got, strict=True)):
        assert mine >= a[0] and mine - a[0] <= 2.0**-52 * len(pairs) * max(a[0], 5e-324 * 2.0**52)
        for b, other in zip(pairs[:i], got[:i], strict=True):
            assert (mine > other, mine == other) == (a > b, a == b)


def test_separate_statistics_alternate_between_the_kinds():
    """Without spread a proxy is its group's mean: the image's in groups 0 and 2, the text's in group 1."""
    layer, kinds = oracles.make_layer(20, 1, 1, seed=1), kinds_of(20, "both")
    scorer = MMShiftScorer(N, GROUPS, gamma=0.0, modality="separate")
    states = scorer._states(observed(scorer, layer, kinds), 0).double()
    visual = torch.tensor(kinds) > 0
    image, text = layer.hidden[visual].mean(0), layer.hidden[~visual].mean(0)
    want = torch.stack([image] * SIZE + [text] * SIZE + [image] * SIZE)
    assert torch.allclose(states, want, atol=1e-6) and not torch.allclose(image, text, atol=0.05)


@each(
    ("modality", "last", "kinds", "fallback"),
    [
        ("unified", 0, [0, 0, 0], ()),
        ("separate", 0, [0, 1, 0], ()),
        ("separate", 0, [0, 0, 0], ("single_modality",)),
        ("separate", 0, [1, 1, 1], ("single_modality",)),
        ("separate", 1, [0, 1, 0], ("single_modality",)),
        ("text", 0, [0, 0, 0], ()),
        ("text", 0, [2, 2, 2], ("single_modality",)),
        ("vision", 0, [2, 2, 2], ()),
        ("vision", 1, [0, 1, 0], ("single_modality",)),
    ],
)
def test_statistics_of_one_kind_alone_are_recorded(modality, last, kinds, fallback):
    scorer = MMShiftScorer(N, GROUPS, modality=modality, last_tokens=last)
    assert scorer.fallbacks(2, 3, torch.tensor(kinds)) == fallback
    assert scorer.needs_visual == (modality == "vision")
    one = oracles.make_layer(3, 1, 1)
    assert torch.isfinite(scorer.score(observed(scorer, one, kinds), 2, 0)).all()


def test_unknown_kinds_of_tokens_are_refused_where_they_matter():
    layer = oracles.make_layer(9, 1, 1)
    scorer = MMShiftScorer(N, GROUPS, modality="text")
    with pytest.raises(UnsupportedError, match="allowed: modality=unified"):
        scorer.score(layer.observe(scorer.needs), 4, 0)


def test_statistics_of_the_last_tokens_are_those_of_a_shorter_prompt():
    layer = oracles.make_layer(40, 1, 2, seed=9)
    some = MMShiftScorer(N, GROUPS, last_tokens=7)
    tail = replace(layer, hidden=layer.hidden[-7:], key=layer.key[:, -7:], value=layer.value[:, -7:])
    mean, std = some._moments(observed(some, layer, [0] * 40))
    whole = tail.observe(MMShiftScorer().needs)
    assert torch.allclose(mean, whole.hidden_mean, atol=1e-6) and torch.allclose(std, whole.hidden_std, atol=1e-6)


# ---------------------------------------------------------------- refusals


@each(
    ("build", "words"),
    [
        (lambda: MMShiftScorer(centring="global"), "centring=global needs statistics of other prompts"),
        (lambda: MMShiftScorer(expansion="layer"), "expansion=layer without layer_gamma needs statistics"),
        (lambda: MMShiftScorer(layer_gamma=(1.0,)), "no effect with expansion=global"),
        (lambda: MMShiftScorer(expansion="layer", layer_gamma=(1.0, -2.0)), "layer_gamma is -2.0"),
        (lambda: MMShiftScorer(groups=1, modality="separate"), "groups=2 or more"),
        (lambda: MMShiftScorer(last_tokens=-1), "last_tokens is -1"),
        (lambda: MMShiftScorer(plain_layers=-1), "plain_layers is -1"),
        (lambda: MMShiftScorer(voting="group"), "did you mean 'groups'"),
        (lambda: MMShiftScorer(modality="visual"), "allowed: separate, text, unified, vision"),
        (lambda: MMShiftScorer(expansion="local"), "allowed: global, layer"),
    ],
)
def test_what_an_ablation_lacks_is_said(build, words):
    with pytest.raises(ConfigError) as refused:
        build()
    assert words in str(refused.value)


@each(
    ("scorer", "words"),
    [
        (MMShiftScorer(N, GROUPS, expansion="layer", layer_gamma=(1.0,)), "1 factors, but the model has 4 layers"),
        (MMShiftScorer(N, GROUPS, centring="global", calibration={"mean": [[0.0]] * 4}), "for 4 layers of 1 features"),
    ],
)
def test_factors_of_another_model_are_refused(scorer, words):
    with pytest.raises(ConfigError, match=words):
        scorer.score(observed(scorer, oracles.make_layer(9, 1, 1), [0] * 9), 4, 0)


def test_statistics_of_other_prompts_come_from_the_models_own_artefact():
    """`calibration=auto` finds the committed one of the embedded model; no other ablation asks for any."""
    committed = json.loads((conf_dir() / "calibration" / "tiny" / "mmshift.json").read_text())
    known = Calibrations("tiny", committed["model_fingerprint"])
    default = method_defaults(["mmshift"])["mmshift"]

    def scorer(*words, calibrations=known):
        node = compose(["method=mmshift", *(f"methods.mmshift.{word}" for word in words)]).methods["mmshift"]
        return build_compressor("mmshift", node, "paper", default, calibrations).scorer

    for words in (("centring=global",), ("expansion=layer",)):
        made = scorer(*words, "calibration=auto")
        assert made.calibration == committed["data"] and known.taken() == {"mmshift": committed["checksum"][:16]}
    assert len(committed["data"]["mean"]) == len(committed["data"]["gamma"]) == 4
    scorer("expansion=layer", "layer_gamma=[1.0,2.0]", "calibration=auto")
    scorer("calibration=auto")
    assert known.taken() == {}, "who reads no statistics of other prompts asks for none"
    unknown = scorer("centring=global", "calibration=auto", "samples=12", "groups=3", calibrations=None)
    with pytest.raises(CalibrationError, match="no model is known"):
        unknown.score(observed(unknown, oracles.make_layer(9, 1, 1), [0] * 9), 4, 0)
    with pytest.raises(CalibrationError, match="was made for model tiny"):
        scorer("centring=global", "calibration=auto", calibrations=Calibrations("tiny", "other"))


# ---------------------------------------------------------------- half precision, and through models


ABLATIONS = {
    "mass": {"voting": "none"},
    "vision": {"modality": "vision"},
    "separate": {"modality": "separate", "statistics": "scalar"},
    "layerwise": {"expansion": "layer", "layer_gamma": (2.0, 1.0, 3.0, 0.5)},
    "global": {"centring": "global", "calibration": CALIBRATION},
    "llava": {"last_tokens": 512, "plain_layers": 2},
}


@each("changes", ABLATIONS.values())
def test_half_precision_gives_finite_scores_that_are_not_in_half_precision(changes):
    scorer = MMShiftScorer(N, GROUPS, **changes)
    for dtype, length in product((torch.float16, torch.bfloat16), (1, 2, 40)):
        kinds = [1, *kinds_of(length - 1, "both")]
        got = scorer.score(observed(scorer, oracles.make_layer(length, 2, 2), kinds, 1, dtype=dtype), 1, 0)
        assert got.dtype in (torch.float32, torch.float64) and torch.isfinite(got).all(), (dtype, length)


FAMILIES = ("qwen2_5_vl", "llava_next", "internvl_qwen3")


def stock_layers(model, inputs, steps: int):
    """Per layer (hidden [T,E], keys [Hkv,T,D], cos, sin [T + steps, D]) of stock greedy decoding, no code under test."""
    calls = {layer: [] for layer in range(zoo.LAYERS)}

    def note(module, args, kwargs):
        calls[module.layer_idx].append((kwargs["hidden_states"][0], *(x[0] for x in kwargs["position_embeddings"])))

    hooks = [block.self_attn.register_forward_pre_hook(note, with_kwargs=True) for block in model.get_decoder().layers]
    cache = reference.generate(model, inputs, steps + 1).cache
    for hook in hooks:
        hook.remove()
    length = inputs["input_ids"].shape[1]
    for layer, seen in calls.items():
        hidden, cos, sin = (torch.cat(parts) for parts in zip(*seen, strict=True))
        yield hidden[:length].double(), cache.layers[layer].keys[0, :, :length].double(), cos.double(), sin.double()


def turned(query, cos, sin):
    """Half-split rotary embedding of [Hq,D]."""
    half = query.shape[-1] // 2
    return query * cos + torch.cat([-query[:, half:], query[:, :half]], -1) * sin


@torch.no_grad()
def oracle_sets(model, inputs, changes, budget: int):
    """Which tokens every head of every layer keeps, and the scores that say so, from the stock model's own states."""
    ids = inputs["input_ids"][0]
    kinds = ((ids == zoo.IMAGE).long() + 2 * (ids == zoo.VIDEO).long()).tolist()
    found = []
    for index, (hidden, key, cos, sin) in enumerate(stock_layers(model, inputs, 24)):
        module, length = model.get_decoder().layers[index].self_attn, len(kinds)

        def queries(states, module=module):
            rows = module.q_proj(states.float()).view(len(states), -1, module.head_dim)
            return (module.q_norm(rows) if hasattr(module, "q_norm") else rows).double()

        last = turned(queries(hidden[-1:])[0], cos[length - 1], sin[length - 1])
        anchor = oracle.last_attention(last, key, module.scaling)
        plain = index < changes.get("plain_layers", 0)
        groups = 1 if plain else GROUPS
        if plain:
            proxies = hidden[-1:].expand(oracle.COPIES, -1)
        else:
            proxies = oracle.states(
                hidden,
                kinds,
                oracle.noise(N, hidden.shape[1], 0, "prompt", index),
                groups,
                gamma=changes["layer_gamma"][index] if "layer_gamma" in changes else 3.0,
                modality=changes.get("modality", "unified"),
                last=changes.get("last_tokens", 0),
            )
        rows = queries(proxies)
        moved = torch.stack([turned(row, cos[length + i], sin[length + i]) for i, row in enumerate(rows)], 1)
        score = oracle.summed(oracle.group_masses(moved, key, module.scaling, groups), anchor, 1.0)
        kept = oracles.select(score, [budget] * len(key), [t == length - 1 for t in range(length)])
        found.append([(set(row), scores.tolist()) for row, scores in zip(kept, score, strict=True)])
    return found


@pytest.mark.slow
@cover.few("family", FAMILIES, first=1)
@each(
    "changes",
    [
        {"modality": "separate"},
        {"modality": "vision", "last_tokens": 12},
        {"expansion": "layer", "layer_gamma": (2.0, 1.0, 3.0)},
        {"last_tokens": 20, "plain_layers": 1},
    ],
)
def test_a_model_keeps_what_the_oracle_keeps(family, changes):
    """Through hooks, projections and rotations of three families; masses are compared because they have no ties."""
    model, inputs = zoo.model(family), zoo.prompt(family)
    budget = inputs["input_ids"].shape[1] // 3
    base = built("mmshift")
    scorer = MMShiftScorer(N, GROUPS, 3.0, voting="none", **changes)
    with attach(model, replace(base, scorer=scorer), budget=Budget.parse(budget)) as session:
        reference.generate(model, inputs, 1)
        kept = session.kept()
    last = inputs["input_ids"].shape[1] - 1  # kept whatever its score
    for index, heads in zip(kept, oracle_sets(model, inputs, changes, budget), strict=True):
        for row, (want, scores) in zip(index[0].tolist(), heads, strict=True):
            edge = min(scores[place] for place in want - {last})
            moved = {place for place in set(row) ^ want if scores[place] != pytest.approx(edge, rel=2e-5)}
            assert len(row) == len(want) and not moved, (
                "only scores within rounding of the last kept one may change places"
            )
