"""PrefixKV's family through models of three families: what is kept, what every later token sees, and forks.

The reference is stock eager attention over a full cache under a mask that changes from step to step.
"""

from __future__ import annotations

import functools
from fractions import Fraction

import pytest
import torch

from mmkv_bench.compression.allocators.prefix import Prefix
from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.decoding.fixed_distance import FixedDistance
from mmkv_bench.compression.decoding.sliding import Sliding
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.reducers.feature_merge import FeatureMerge
from mmkv_bench.compression.reducers.position_merge import PositionMerge
from mmkv_bench.compression.scorers.layer_mean import LayerMeanScorer
from mmkv_bench.compression.scorers.recency import RecencyScorer
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.errors import ConfigError
from mmkv_bench.families.facts import context_length, model_facts
from mmkv_bench.generation.unshared_generation import generate_alone
from tests import cover, reference, zoo
from tests.core import parts
from tests.each import each
from tests.generation import common
from tests.oracles import prefix as oracle

FAMILIES = ("qwen2_5_vl", "llava_next", "internvl")  # mrope and GQA, MHA, one-dimensional GQA
TOKENS = 12
PROFILE = {"grid": [0.1, 0.5], "ratios": [[0.2, 0.06, 0.04], [0.8, 0.4, 0.3]]}
ENDS = TopK(sinks=1, recents=1)

every_family = cover.few("name", FAMILIES)
every_protocol = each("protocol", common.PROTOCOLS)


def prefixkv(decoding=None, reducer=None, online=True, ranking="importance", **allocation) -> Compressor:
    allocator = Prefix("online", **allocation) if online else Prefix(calibration=PROFILE, **allocation)
    return Compressor("prefixkv", LayerMeanScorer(ranking), allocator, ENDS, reducer or Evict(), "paper", decoding)


def uniform(decoding=None, reducer=None, scorer=None) -> Compressor:
    return Compressor("uniform", scorer or LayerMeanScorer(), Uniform(), ENDS, reducer or Evict(), "paper", decoding)


def context_of(name: str, protocol: str) -> int | None:
    inputs = zoo.prompt(name)
    return context_length(inputs["input_ids"], model_facts(zoo.config(name))) if protocol == "query_agnostic" else None


def run(name: str, made: Compressor, budget, protocol: str = "paper", tokens: int = TOKENS):
    """Tokens and logits of one answer, the kept indices, the cache at the end, and the cut of the protocol."""
    model, inputs, context = zoo.model(name), zoo.prompt(name), context_of(name, protocol)
    output = generate_alone(model, inputs, made, parts.budget(budget), protocol, context=context, max_new_tokens=tokens)
    length = inputs["input_ids"].shape[1]
    done = reference.Run(output.sequences[:, length:], torch.stack(output.logits), output.session.cache)
    return done, output.session.kept(), {"paper": length, "strict": length - 1}.get(protocol, context)


@functools.cache
def importance(name: str, length: int | None = None) -> list[list[float]]:
    """I_l of the stock model's own attention matrices, float64; of the first `length` tokens."""
    model, inputs = zoo.model(name, "eager"), zoo.prompt(name)
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    zoo.model(name)
    return [a[0, :, :length, :length].double().mean(0).sum(0).tolist() for a in attentions]


# ---------------------------------------------------------------- what is kept


@every_family
@every_protocol
@each("method", ["online", "offline", "uniform", "released"])
def test_kept_sets_equal_the_oracles_on_the_stock_models_attention(name, protocol, method):
    context = context_of(name, protocol)
    scores = importance(name, context)
    total = len(scores[0])
    budget = total // 3
    if method == "released":
        made = Compressor(
            "elastic", LayerMeanScorer("permutation"), Uniform(unused=1), ENDS, PositionMerge(1, 1), "released"
        )
    else:
        made = uniform() if method == "uniform" else prefixkv(online=method == "online")
    _, kept, cut = run(name, made, budget, protocol, tokens=1)
    strict = int(protocol == "strict")
    n, granted = total - strict, budget - strict
    if method == "released":
        if strict:
            return  # the release has no such protocol
        want = [oracle.released_kept(row, budget, 1) for row in scores]
    else:
        curves = [oracle.cumulative(row[:n]) for row in scores]
        caps = {
            "online": lambda: oracle.online_caps(curves, granted, Fraction("0.0125"), 0),
            "offline": lambda: oracle.offline_caps(
                list(map(str, PROFILE["grid"])), [list(map(str, row)) for row in PROFILE["ratios"]], granted, n
            ),
            "uniform": lambda: [granted] * len(scores),
        }[method]()
        want = [oracle.top(row, cap, n, budget) for row, cap in zip(scores, caps, strict=True)]
        assert method != "offline" or len(set(caps)) > 1
    assert [[j for j in head if j >= 0] for layer in kept for head in layer[0].tolist()] == [
        row for row, layer in zip(want, kept, strict=True) for _ in range(layer.shape[1])
    ]


# ---------------------------------------------------------------- what later tokens see


def seen_by_answer(kept, protocol: str, cut: int, length: int, hold: str, which, slack: int = 0):
    """Per layer and head: what each answer token sees, itself included."""
    again = int(protocol == "strict")
    prompt = cut + again
    layers = []
    for layer in kept:
        heads = []
        for row in layer[0].tolist():
            stored = [j for j in row if j >= 0]
            growth = Fraction(len(stored) + again + slack, prompt) if hold == "ratio" else Fraction(0)
            before = stored + list(range(cut, length))
            heads.append(oracle.decoded(before, length, TOKENS, which, growth, slack))
        layers.append(heads)
    return layers


def changing(keep, cut: int, length: int, seen):
    """The protocol's own rule for the prompt's rows, `seen` for those of the answer."""
    before = reference.visible(keep, cut)

    def rule(layer: int, queries: torch.Tensor, columns: int) -> torch.Tensor:
        allowed = before(layer, queries, columns)
        for row, position in enumerate(queries.tolist()):
            if position >= length:
                for head, steps in enumerate(seen[layer]):
                    allowed[0, head, row] = False
                    allowed[0, head, row, steps[position - length]] = True
        return allowed

    return rule


def masked(name: str, rule) -> reference.Run:
    model = zoo.model(name)
    with reference.masked(model, rule) as cache:
        return reference.generate(model, zoo.prompt(name), TOKENS, past_key_values=cache)


def close(done: reference.Run, other: reference.Run, tolerance: float = 2e-6):
    assert (done.logits - other.logits).abs().max() <= tolerance
    assert torch.equal(done.tokens, other.tokens)


POLICIES = {
    "newest": (FixedDistance(distance=3), "ratio", oracle.newest(3)),
    "newest_size": (FixedDistance(distance=5, hold="size"), "size", oracle.newest(5)),
    "newest_clipped": (FixedDistance(hold="size"), "size", oracle.newest(25)),
    "itself": (FixedDistance(distance=0, hold="size"), "size", oracle.newest(0)),
    "prefill": (FixedDistance(distance=3, anchor="prefill"), "ratio", oracle.fixed(3)),
    "prefill_half": (FixedDistance(distance=99, anchor="prefill", hold="size"), "size", oracle.fixed(99)),
    "window": (Sliding(), "size", oracle.window(1)),
    "window_grows": (Sliding(sinks=2, hold="ratio"), "ratio", oracle.window(2)),
}


STEPS = [(policy, "paper") for policy in POLICIES]
STEPS += [(policy, protocol) for policy in ("newest", "prefill_half", "window") for protocol in common.PROTOCOLS[1:]]


@pytest.mark.slow
@cover.cases(FAMILIES, STEPS, each=6, keep=2)
def test_decoding_sees_what_the_mask_of_each_step_shows(name, combinations):
    for ((policy, protocol),) in combinations:
        with cover.case(policy, protocol):
            _decodes_as_masked(name, policy, protocol)


def _decodes_as_masked(name: str, policy: str, protocol: str) -> None:
    decoding, hold, which = POLICIES[policy]
    made = uniform(decoding, scorer=RecencyScorer()) if policy.startswith("window") else prefixkv(decoding)
    length = zoo.prompt(name)["input_ids"].shape[1]
    done, kept, cut = run(name, made, "30%", protocol)
    seen = seen_by_answer(kept, protocol, cut, length, hold, which)
    keep = reference.keep_of(kept, cut)
    close(done, masked(name, changing(keep, cut, length, seen)))
    unevicted = masked(name, reference.visible(keep, cut))
    if policy != "itself":
        assert (done.logits - unevicted.logits).abs().max() > 1e-3, "the policy evicted nothing that matters"
    for layer, heads in zip(done.cache.layers, seen, strict=True):
        # The last token of an answer is never fed. What its predecessor saw is what is stored, but for one eviction.
        assert layer.entries()[0].tolist() == layer.entry_counts()
        after = [len(steps[TOKENS - 1]) - 1 for steps in heads]
        assert layer.entry_counts() == after
        assert layer.seen == length + TOKENS - 1


@every_family
@each(
    ("policy", "protocol"), [("newest", "paper"), ("newest", "strict"), ("prefill", "paper"), ("window_grows", "paper")]
)
def test_ragged_heads_evict_each_at_its_own_pace(name, policy, protocol):
    decoding, hold, which = POLICIES[policy]
    made = Compressor("ragged", parts.RandomScores(), parts.HeadRagged(), TopK(recents=1), Evict(), "paper", decoding)
    length = zoo.prompt(name)["input_ids"].shape[1]
    done, kept, cut = run(name, made, "40%", protocol)
    assert len({count for layer in kept for count in (layer[0] >= 0).sum(-1).tolist()}) > 2
    seen = seen_by_answer(kept, protocol, cut, length, hold, which)
    close(done, masked(name, changing(reference.keep_of(kept, cut), cut, length, seen)))
    for layer, heads in zip(done.cache.layers, seen, strict=True):
        assert layer.entries()[0].tolist() == [len(steps[TOKENS - 1]) - 1 for steps in heads]


@pytest.mark.full
@each(("budget", "protocol"), [(1, "paper"), (1, "strict"), (2, "strict"), (3, "paper")])
@each("policy", ["newest_size", "prefill", "prefill_half", "window", "newest_clipped"])
def test_budgets_of_a_few_entries_decode_as_masked(budget, policy, protocol):
    name = "internvl"
    decoding, hold, which = POLICIES[policy]
    length = zoo.prompt(name)["input_ids"].shape[1]
    done, kept, cut = run(name, uniform(decoding), budget, protocol)
    seen = seen_by_answer(kept, protocol, cut, length, hold, which)
    close(done, masked(name, changing(reference.keep_of(kept, cut), cut, length, seen)))


def test_a_window_holds_its_size_and_a_ratio_follows_the_answer():
    name = "llava_next"
    length = zoo.prompt(name)["input_ids"].shape[1]
    made = uniform(Sliding(), scorer=RecencyScorer())
    done, kept, _ = run(name, made, 10)
    for layer in done.cache.layers:
        assert (layer.entries() == 10).all()
        fed = length + TOKENS - 1
        assert layer.slot_positions()[0, 0].tolist() == [0, *range(fed - 9, fed)]
    grown, kept, _ = run(name, uniform(FixedDistance(distance=3)), "50%")
    share = Fraction(length // 2, length)
    for layer in grown.cache.layers:
        allowed = float(length // 2 + share * (TOKENS - 1))
        assert (layer.entries() > allowed - 1).all() and (layer.entries() < allowed + 1).all()


def test_slack_is_room_before_the_first_eviction():
    name = "internvl"
    length = zoo.prompt(name)["input_ids"].shape[1]
    decoding = FixedDistance(distance=3, anchor="prefill", hold="ratio", slack=1)
    done, kept, cut = run(name, uniform(decoding), "30%")
    # The place is 3 before the end of one entry more than the prompt left, so 2 before its own.
    seen = seen_by_answer(kept, "paper", cut, length, "ratio", oracle.fixed(2), slack=1)
    close(done, masked(name, changing(reference.keep_of(kept, cut), cut, length, seen)))
    without = seen_by_answer(kept, "paper", cut, length, "ratio", oracle.fixed(3))
    assert any(len(a) > len(b) for x, y in zip(seen, without, strict=True) for a, b in zip(x[0], y[0], strict=True))


# ---------------------------------------------------------------- released positions


@every_family
@each("anchor", ["newest", "prefill"])
def test_cached_positions_rotate_queries_at_the_size_of_layer_0(name, anchor):
    """PrefixKV's layer 0 holds most, so its queries sit far behind those of a uniform budget."""
    made = prefixkv(FixedDistance(distance=3, anchor=anchor, positions="cached"))
    length = zoo.prompt(name)["input_ids"].shape[1]
    done, kept, cut = run(name, made, "30%")
    which = {"newest": oracle.newest(3), "prefill": oracle.fixed(3)}[anchor]
    seen = seen_by_answer(kept, "paper", cut, length, "ratio", which)
    sizes = [len(steps) - 1 for steps in seen[0][0]]  # of layer 0 before the token is appended
    assert sizes[0] == kept[0].shape[2] < length
    model = zoo.model(name)

    def misplace(module, args, kwargs):
        past, positions = kwargs["past_key_values"].get_seq_length(), kwargs["position_ids"]
        if past < length:
            return None
        wrong = torch.full_like(positions, sizes[past - length])
        if positions.ndim == 3 and positions.shape[0] == 4:
            wrong[0] = positions[0]
        return args, dict(kwargs, position_ids=wrong)

    hook = model.get_decoder().register_forward_pre_hook(misplace, with_kwargs=True)
    try:
        wrong = masked(name, changing(reference.keep_of(kept, cut), cut, length, seen))
    finally:
        hook.remove()
    close(done, wrong)
    right = masked(name, changing(reference.keep_of(kept, cut), cut, length, seen))
    assert torch.equal(done.logits[0], right.logits[0]) or (done.logits[0] - right.logits[0]).abs().max() < 2e-6
    assert (done.logits[1:] - right.logits[1:]).abs().max() > 1e-2, "the positions made no difference"


# ---------------------------------------------------------------- merging


@every_family
@each("protocol", ["paper", "strict"])
@each("metric", ["position", "feature"])
def test_merged_caches_decode_as_their_cluster_means(name, protocol, metric):
    reducer = {"position": PositionMerge(), "feature": FeatureMerge()}[metric]
    done, kept, cut = run(name, prefixkv(reducer=reducer), "30%", protocol, tokens=5)
    model, inputs = zoo.model(name), zoo.prompt(name)
    ids, length = inputs["input_ids"], inputs["input_ids"].shape[1]
    keep = reference.keep_of(kept, cut)
    with (
        torch.no_grad(),
        reference.masked(model, lambda layer, q, s: torch.ones(1, kept[layer].shape[1], len(q), s).bool()) as cache,
    ):
        first = model(**inputs, past_key_values=cache, use_cache=True).logits[:, -1]
    if protocol == "strict":
        cache.crop(-1)
    else:
        ids = torch.cat([ids, first.argmax(-1, keepdim=True)], 1)
        assert (done.logits[0] - first).abs().max() <= 2e-6  # the first token comes from the full cache
    moved = 0.0
    for layer, index in zip(cache.layers, kept, strict=True):
        for head, row in enumerate(index[0].tolist()):
            row = [j for j in row if j >= 0]
            keys = layer.keys[0, head, :cut].clone()
            near = (
                (lambda m, row=row: oracle.by_position(row, m))
                if metric == "position"
                else (lambda m, row=row, keys=keys: oracle.by_feature(row, m, keys))
            )
            groups = oracle.clusters(row, cut, near)
            for entries in (layer.keys, layer.values):
                means = oracle.merged(entries[0, head, :cut].clone(), groups).float()
                moved = max(moved, float((entries[0, head, row] - means).abs().max()))
                entries[0, head, row] = means
    assert moved > 0.1
    steps = 5 - int(protocol == "paper")
    restricted = reference.visible(keep, cut)
    with reference.masked(model, restricted):
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=steps,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    logits = torch.stack(output.logits)
    assert (done.logits[-steps:] - logits).abs().max() <= 4e-6
    assert torch.equal(done.tokens, output.sequences[:, length:])


# ---------------------------------------------------------------- parameters


@each(
    "make",
    [
        lambda: FixedDistance(distance=-1),
        lambda: FixedDistance(anchor="oldest"),
        lambda: FixedDistance(hold="none"),
        lambda: FixedDistance(positions="true"),
        lambda: FixedDistance(slack=-1),
        lambda: Sliding(sinks=-1),
        lambda: Sliding(hold="all"),
    ],
)
def test_senseless_policies_are_refused(make):
    with pytest.raises(ConfigError):
        make()


@each(
    ("policy", "entries", "start", "slot"),
    [
        (FixedDistance(), 100, 90, 74),  # 25 places before the newest, which is place 99
        (FixedDistance(), 27, 26, 1),
        (FixedDistance(), 20, 19, 1),  # too short: after the first token
        (FixedDistance(), 2, 1, 0),  # never the newest one for its own sake
        (FixedDistance(distance=0), 20, 19, 19),
        (FixedDistance(anchor="prefill"), 100, 90, 65),
        (FixedDistance(anchor="prefill"), 140, 90, 65),  # stays where it was
        (FixedDistance(anchor="prefill"), 27, 26, 1),
        (FixedDistance(anchor="prefill"), 26, 25, 12),  # half of what the prompt left
        (Sliding(), 11, 10, 1),
        (Sliding(sinks=4), 11, 10, 4),
        (Sliding(sinks=4), 4, 3, 2),
        (Sliding(sinks=1), 2, 1, 0),
    ],
)
def test_slots_by_hand(policy, entries, start, slot):
    assert policy.slot(entries, start) == slot
