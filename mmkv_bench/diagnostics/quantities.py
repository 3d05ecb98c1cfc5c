"""Quantities of the papers' analyses: numbers of one layer of one prompt.

A function yields the `Value`s of one layer, or data from which `Quantity.finish` computes values after all layers.
`facts.length` is the prompt's length; later tokens in the observation are the full cache's answer (`analysis.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mmkv_bench.compression.numerics.attention import hide, softmax
from mmkv_bench.compression.numerics.dct import dct
from mmkv_bench.compression.numerics.entropy import cross_modal_entropy, top_mass
from mmkv_bench.compression.numerics.moments import unrotate
from mmkv_bench.compression.numerics.prefix import prefix_curves, prefix_ratios
from mmkv_bench.compression.observation import Needs

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.compression.observation import Observation

POINTS = 100  # points of a Lorenz curve
SHARES = tuple(i / 20 for i in range(1, 21))  # fractions of the keys whose attention is summed
BANDS = 128  # bands of a spectrum
OUTLIERS = 0.001  # fraction of a layer's query channels
PROXIES = 512
BUDGETS = tuple(i / 10 for i in range(1, 10))
DELTAS = (0.0125, 0.025, 0.05, 0.075, 0.1)  # tolerances of PrefixKV's Table 10, in layers
SINK = 0.3  # a head with more attention on the first token is a sink head
VISUAL_SINK = 10.0  # a visual token with this many times the median attention is a sink
EDGE, WIDTH = 10.0, 0.25  # bins of a histogram, from -10 to 10


class Value(NamedTuple):
    """One number of a layer. part: the tokens or the method that the number describes. x: position on a curve."""

    quantity: str
    value: float
    part: str = ""
    head: int | None = None
    x: float | None = None


@dataclass(frozen=True)
class PromptFacts:
    """Facts about the prompt besides a layer's tensors. Only analyses that need them have `kept` and `decoded`.

    Attributes:
        length: number of the prompt's tokens.
        kept: method and budget (`snapkv@64`) -> per layer int64 ``[Hkv, m]``, the kept entries, -1 for none.
        decoded: method and budget, or `full` -> per layer ``[n, E]``, outputs while full's answer is decoded.
    """

    length: int
    kept: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    decoded: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def of_each_layer(layers: Sequence[Sequence[Any]]) -> Iterator[tuple[int | None, Value]]:
    """Yield (number of the layer, value) for all values of all layers."""
    for layer, values in enumerate(layers):
        yield from ((layer, value) for value in values)


@dataclass(frozen=True)
class Quantity:
    """One analysis: the function that computes its numbers, and the inputs of this function.

    Attributes:
        needs: statistics to gather in the prefill.
        read: function that computes the numbers of one layer.
        figures: the papers' figures that show the quantity.
        answer: the full cache's answer is fed after the prompt.
        methods: `PromptFacts.kept` is needed, for the methods and budgets of a run.
        decoding: `PromptFacts.decoded` is needed, for the same methods and budgets.
        endless: the answer has its full length, even if an end token comes earlier.
        finish: results of `read` for all layers -> values with their layer, or None for a value of the whole model.
    """

    needs: Needs
    read: Callable[[Observation, PromptFacts], Iterator[Any]]
    figures: str
    answer: bool = False
    methods: bool = False
    decoding: bool = False
    endless: bool = False
    finish: Callable[[Sequence[Sequence[Any]]], Iterator[tuple[int | None, Value]]] = of_each_layer


def hidden_states(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield mean and population standard deviation of the query projection's inputs of one layer, over all values.

    Parts: the prompt, its text tokens, its visual tokens, and the tokens that are fed while the answer is decoded.
    """
    states, length = obs.states, facts.length
    types = torch.zeros(length) if obs.token_types is None else obs.token_types[:length].to(states.device)
    states_by_part = {
        "prompt": states[:length],
        "text": states[:length][types == 0],
        "visual": states[:length][types > 0],
    }
    states_by_part["answer"] = states[length:]
    for part, rows in states_by_part.items():
        if rows.numel():
            values = rows.double()
            yield Value("mean", float(values.mean()), part)
            yield Value("std", float(values.std(correction=0)), part)


def lorenz(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield the Lorenz curve of the attention that tokens of one layer receive, and its Gini coefficient.

    A token's attention is its column sum over all queries and query heads. At x, the curve is the share of all
    attention that the fraction x of tokens with the least attention receives, interpolated linearly. The coefficient is
    ``2 sum_i i s_i / (n sum s) - (n + 1) / n`` of the ascending sums s.
    """
    sums = obs.column_sums.double().sum(0).cpu().sort().values
    n, total = len(sums), float(sums.sum())
    curve = torch.cat([torch.zeros(1, dtype=torch.float64), sums.cumsum(0)]) / total
    for point in range(1, POINTS + 1):
        rank_position = point * n / POINTS
        rank_below = min(math.floor(rank_position), n - 1)
        yield Value(
            "lorenz",
            float(curve[rank_below] + (rank_position - rank_below) * (curve[rank_below + 1] - curve[rank_below])),
            x=point / POINTS,
        )
    rank = torch.arange(1, n + 1, dtype=torch.float64)
    yield Value("gini", float(2 * (rank * sums).sum() / (n * total) - (n + 1) / n))


def entropy(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield MEDA's cross-modal entropy (eq. 4 to 6) of one layer, in nats; nothing for a prompt with one modality."""
    types = obs.token_types
    if types is not None and bool((types > 0).any()) and bool((types == 0).any()):
        yield Value("cross_modal_entropy", cross_modal_entropy(obs.queries, obs.key, obs.scaling, types))


def cumulative_attention(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield HybridKV's cumulative attention (S*) per KV head of one layer, at 20 values of x.

    This is the share of the text queries' attention that falls on the fraction x of the prompt's keys with the most
    attention. Without token types, all queries count.
    """
    types = obs.token_types
    rows = [] if types is None else (types == 0).nonzero().flatten().tolist()
    for share in SHARES:
        top_keys = math.ceil(share * facts.length - 1e-9)
        top_key_mass = top_mass(
            obs.queries, obs.key, obs.scaling, rows or range(facts.length), top_keys, obs.sinks, obs.reach
        )
        for head, value in enumerate(top_key_mass.tolist()):
            yield Value("top_mass", value, head=head, x=share)


def power_spectrum(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield the energy spectrum of one layer's keys and values along the tokens, in 128 equal bands of frequency.

    A value is the band's share of the energy of an orthonormal DCT, summed over heads and channels. Keys are rotated,
    as stored. x is the band's middle; 1 is the highest frequency.
    """
    length = facts.length
    band_of_bin = torch.arange(length, device=obs.device) * BANDS // length
    for part, tensor in (("keys", obs.key), ("values", obs.value)):
        power = torch.zeros(length, dtype=torch.float64, device=obs.device)
        for head in tensor:
            power += dct(head.float().T).double().square().sum(0)
        shares = (
            torch.zeros(BANDS, dtype=torch.float64, device=obs.device).index_add_(0, band_of_bin, power) / power.sum()
        )
        for number, share in enumerate(shares.tolist()):
            yield Value("power", share, part, x=(number + 0.5) / BANDS)


def outlier_hits(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield the hit rate of outlier channels (MM-ShiftKV's Table 14) of one layer, by our own definition.

    The paper prints no definition. Outlier channels are the 0.1 % of the query channels before rotation (Hq * D) with
    the largest absolute value while the answer is decoded. The value is the share of these in which one of 512 proxies
    is at least as large. The proxies are drawn as the method draws them, with gamma (x) 1 and 10.
    """
    prompt, answer = obs.states[: facts.length].float(), obs.states[facts.length :]
    answer_activations = obs.project(answer).float().abs().amax(1).flatten()
    outlier_channels = answer_activations.topk(max(1, math.ceil(OUTLIERS * len(answer_activations) - 1e-9))).indices
    mean, std = prompt.mean(0), prompt.std(0, correction=0)
    noise = torch.randn((PROXIES, prompt.shape[1]), generator=obs.generator("mmshift", 0), dtype=torch.float32)
    for gamma in (1.0, 10.0):
        proxies = obs.project(mean + gamma * std * noise.to(obs.device)).float().abs().amax(1).flatten()
        yield Value(
            "outlier_hit_rate",
            float((proxies[outlier_channels] >= answer_activations[outlier_channels]).double().mean()),
            x=gamma,
        )


def histogram(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield the density of the query projection's inputs of one layer, for prompt and answer.

    Bins of .25 from -10 to 10; x is a bin's middle, the value is the share of all values in the bin divided by its
    width. `outside` is the share of values outside the bins.
    """
    for part, rows in (("prompt", obs.states[: facts.length]), ("answer", obs.states[facts.length :])):
        values = rows.double().flatten()
        values_in_range = values[(values >= -EDGE) & (values < EDGE)]
        counts = ((values_in_range + EDGE) / WIDTH).long().bincount(minlength=round(2 * EDGE / WIDTH)).tolist()
        for number, count in enumerate(counts):
            yield Value("density", count / (len(values) * WIDTH), part, x=-EDGE + (number + 0.5) * WIDTH)
        yield Value("outside", 1 - len(values_in_range) / len(values), part)


def importance(obs: Observation, facts: PromptFacts) -> Iterator[Tensor]:
    """Yield PrefixKV's importance of one layer's tokens: attention column sums over all query heads, for `prefix_search`."""
    yield obs.column_sums.double().sum(0).cpu()


def prefix_search(layers: Sequence[Sequence[Tensor]]) -> Iterator[tuple[int | None, Value]]:
    """Run PrefixKV's search for the global prefix (Algorithm 1) on the `importance` of all layers.

    Yield (layer or None, value) of two quantities:
    - `kept_ratio`: share of tokens that each layer keeps; x: budgets of 10 to 90 %.
    - `search_steps`: number of halvings at 50 % until all layers together are within delta of the budget; x: delta, in layers.
    """
    curves = prefix_curves([layer[0] for layer in layers])
    for rho in BUDGETS:
        for layer, share in enumerate(prefix_ratios(curves, rho)[0]):
            yield layer, Value("kept_ratio", share, x=rho)
    for delta in DELTAS:
        yield None, Value("search_steps", prefix_ratios(curves, 0.5, delta)[1], x=delta)


def coverage(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield the share of the decoded tokens' attention on the prompt's entries that a method keeps, for one layer.

    A mean over decoded tokens and query heads. The part is method and budget; `full` is the whole prompt.
    """
    start, heads = facts.length, obs.key.shape[0]
    mass = _attention(obs, start)[..., :start].double().reshape(heads, -1, start).mean(1)  # [Hkv,T]
    yield Value("attention_coverage", float(mass.sum(1).mean()), "full")
    for name, layers in facts.kept.items():
        kept_positions = layers[obs.layer].to(obs.device)
        kept_mass = mass.gather(1, kept_positions.clamp_min(0)).masked_fill(kept_positions < 0, 0)
        yield Value("attention_coverage", float(kept_mass.sum(1).mean()), name)


def feature_error(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield the mean absolute difference of a layer's output from the full cache's (PrefixKV's output features).

    A mean over features and decoded tokens; every method is fed the full cache's answer. The part is method and budget.
    """
    full_outputs = facts.decoded["full"][obs.layer].double()
    for name, layers in facts.decoded.items():
        if name != "full":
            yield Value("feature_error", float((layers[obs.layer].double() - full_outputs).abs().mean()), name)


def focus(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield HybridKV's cumulative focus counts per KV head of one layer: how often decoding selects the same tokens.

    At each decoded token, each query head of the KV head selects the 5 % of the prompt's keys with the most attention.
    The value at x is the share of all selections that fall on the fraction x of tokens that are selected most often. A
    head that always selects the same tokens has 1 from x = .05 on.
    """
    start, heads = facts.length, obs.key.shape[0]
    query = obs.queries[:, start:].float().reshape(heads, -1, obs.key.shape[2])  # [Hkv, g * n, D]
    top_keys = math.ceil(0.05 * start - 1e-9)
    top_positions = (query @ obs.key[:, :start].float().transpose(1, 2)).topk(top_keys).indices
    for head, where in enumerate(top_positions.flatten(1)):
        counts = where.bincount(minlength=start).sort(descending=True).values.cumsum(0).double() / len(where)
        for share in SHARES:
            yield Value("focus", float(counts[math.ceil(share * start - 1e-9) - 1]), head=head, x=share)


def sinks(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield numbers on attention sinks of one layer (Xiao et al. 2023, arXiv 2309.17453).

    Per query head: the mean attention that the later half of the prompt's queries pays to the first token. Per layer: the
    largest absolute input of attention over the median absolute input.
    """
    length, group = facts.length, obs.queries.shape[0] // obs.key.shape[0]
    first_query = length // 2
    visible_keys = range(first_query, length) if obs.reach is None else obs.reach[first_query:length]
    for head, query in enumerate(obs.queries[:, first_query:length].float()):
        scores = query @ obs.key[head // group, :length].float().T * obs.scaling
        learned_sink = None if obs.sinks is None else obs.sinks[head]
        hide(scores, visible_keys)
        mass = softmax(scores, learned_sink)[:, 0]
        yield Value("first_token_mass", float(mass.double().mean()), head=head)
    activation_sizes = obs.states[:length].float().abs()
    yield Value("activation_ratio", float(activation_sizes.max() / activation_sizes.median()))


def sink_heads(layers: Sequence[Sequence[Value]]) -> Iterator[tuple[int | None, Value]]:
    """Yield the values of `sinks` of every layer, and for the whole model the share of sink heads.

    A sink head is a query head that pays more than .3 of its attention to the first token.
    """
    yield from of_each_layer(layers)
    masses = [value.value for layer in layers for value in layer if value.quantity == "first_token_mass"]
    yield None, Value("sink_heads", sum(mass > SINK for mass in masses) / len(masses))


def vision(obs: Observation, facts: PromptFacts) -> Iterator[Value]:
    """Yield numbers on attention to visual tokens and on their keys, for one layer; nothing for fewer than two.

    One number per part:
    - `answer's attention`: share of the decoded tokens' attention on visual tokens, mean over query heads.
    - `on a tenth of them`: of that attention, the share on the tenth of the visual tokens that get most, mean over query
      heads.
    - `visual sinks`: share of visual tokens whose attention is 10 or more times the median. A token's attention is the mean
      over all heads and all queries that see the token (Visual Attention Sink, arXiv 2503.03321, defines sinks by
      activations).
    - `neighbours`: mean cosine of adjacent visual tokens' keys before rotation, minus the mean cosine of all pairs.
    - `next picture`: mean cosine of keys at the same position in the next picture with as many tokens, minus the same mean.
    """
    start, heads = facts.length, obs.key.shape[0]
    types = obs.token_types
    visual = (
        torch.empty(0, dtype=torch.long) if types is None else (types[:start] > 0).nonzero().flatten().to(obs.device)
    )
    if len(visual) < 2:
        return
    mass = _attention(obs, start)[..., visual].double().mean(1)  # [Hq,V]
    yield Value("vision", float(mass.sum(1).mean()), "answer's attention")
    top_decile_mass = mass.topk(math.ceil(len(visual) / 10), dim=1).values.sum(1)
    yield Value("vision", float((top_decile_mass / mass.sum(1).clamp_min(1e-30)).mean()), "on a tenth of them")
    seen_by = obs.key.shape[1] - visual  # number of queries that see each visual token
    if obs.reach is not None:  # earlier queries of the same picture see it too
        seen_by = obs.key.shape[1] - torch.searchsorted(obs.reach.to(obs.device), visual)
    attention_per_query = obs.column_sums.double().sum(0)[visual] / seen_by
    yield Value(
        "vision",
        float((attention_per_query >= VISUAL_SINK * attention_per_query.median()).double().mean()),
        "visual sinks",
    )
    cos, sin = obs.rotation
    keys = torch.nn.functional.normalize(
        unrotate(obs.key[:, :start], cos[:start], sin[:start]).double()[:, visual], dim=-1
    )
    n = len(visual)
    pairs = (keys.sum(1).square().sum(-1) - n) / (n * (n - 1))  # [Hkv], mean cosine of two different tokens
    adjacent_tokens = (visual[1:] - visual[:-1] == 1).nonzero().flatten()
    yield Value(
        "vision",
        float(((keys[:, adjacent_tokens] * keys[:, adjacent_tokens + 1]).sum(-1).mean(1) - pairs).mean()),
        "neighbours",
    )
    picture_tokens = torch.tensor_split(torch.arange(n), ((visual[1:] - visual[:-1] > 1).nonzero().flatten() + 1).cpu())
    if len(picture_tokens) > 1 and len({len(one) for one in picture_tokens}) == 1:
        keys_by_picture = keys.view(heads, len(picture_tokens), -1, keys.shape[-1])
        similarity = (keys_by_picture[:, 1:] * keys_by_picture[:, :-1]).sum(-1).mean((1, 2))
        yield Value("vision", float((similarity - pairs).mean()), "next picture")


def _attention(obs: Observation, start: int) -> Tensor:
    query = obs.queries[:, start:].float()
    scores = query @ obs.key.float().repeat_interleave(len(query) // len(obs.key), 0).mT * obs.scaling
    positions = torch.arange(scores.shape[2], device=obs.device)
    learned_sinks = None if obs.sinks is None else obs.sinks[:, None]
    return softmax(scores.masked_fill(positions > positions[start:, None], float("-inf")), learned_sinks)


QUANTITIES = {
    "hidden_states": Quantity(Needs(states=True), hidden_states, "MM-ShiftKV figures 1a and 6", answer=True),
    "coverage": Quantity(Needs(queries=True), coverage, "MM-ShiftKV figure 1b", answer=True, methods=True),
    "histogram": Quantity(Needs(states=True), histogram, "MM-ShiftKV figure 4", answer=True),
    "outlier_hits": Quantity(Needs(states=True), outlier_hits, "MM-ShiftKV table 14", answer=True),
    "lorenz": Quantity(Needs(column_sums=True), lorenz, "PrefixKV figures 2 and 4"),
    "prefix_search": Quantity(
        Needs(column_sums=True), importance, "PrefixKV figures 4 and 6, tables 7 and 10", finish=prefix_search
    ),
    "feature_error": Quantity(Needs(), feature_error, "PrefixKV figure 5", decoding=True),
    "entropy": Quantity(Needs(queries=True), entropy, "MEDA figure 2"),
    "cumulative_attention": Quantity(Needs(queries=True), cumulative_attention, "HybridKV figure 3"),
    "focus": Quantity(Needs(queries=True), focus, "HybridKV figure 2", answer=True, endless=True),
    "sinks": Quantity(Needs(queries=True, states=True), sinks, "no figure of the papers", finish=sink_heads),
    "vision": Quantity(
        Needs(queries=True, states=True, column_sums=True), vision, "no figure of the papers", answer=True
    ),
    "power_spectrum": Quantity(Needs(), power_spectrum, "FlashCache figures 1, 4 and 7 to 9"),
}
"""Name on the command line -> the analysis."""
