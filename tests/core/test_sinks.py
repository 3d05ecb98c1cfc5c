"""Promise: learned sinks (gpt-oss) take their share of every softmax that is scored: a probability that goes to no key.

The references are the probabilities that stock transformers gives of itself, and dense softmaxes in float64 over the keys and one
more column.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from mmkv_bench.compression.compressor import full
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.accumulating_layer import AccumulatingLayer
from mmkv_bench.compression.decoding.base import Start
from mmkv_bench.compression.listeners import AnswerAttention
from mmkv_bench.compression.numerics import attention, entropy, proxies
from mmkv_bench.compression.numerics.moments import average_rotation, expected_logits
from mmkv_bench.compression.numerics.ordering import nucleus
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.scorers.expected_attention import ExpectedAttentionScorer
from mmkv_bench.compression.session import Session, attach
from mmkv_bench.devices import Device
from tests import reference, zoo
from tests.core import parts
from tests.generation import common

NAME, WINDOW, GROUP = "gpt_oss", 7, 4


@dataclass(frozen=True)
class Seen(parts.RandomScores):
    """Notes the statistics of attention that scorers read."""

    seen: list = field(default_factory=list, compare=False)
    needs = Needs(tail_queries=WINDOW, column_sums=True, queries=True)

    def score(self, obs, budget, seed):
        top = entropy.top_mass(obs.queries, obs.key, obs.scaling, [30, 50], 5, obs.sinks)
        self.seen.append((obs.column_sums, obs.window_mass(WINDOW), top))
        return super().score(obs, budget, seed)


@torch.no_grad()
def stock_weights(model, inputs, **options):
    """Probabilities `[Hkv, g, n, S]`, float64, of the layers that are compressed."""
    weights = model(**inputs, output_attentions=True, **options).attentions[1::2]
    return [one[0].double().unflatten(0, (-1, GROUP)) for one in weights]


def test_statistics_of_a_layer_are_those_of_the_probabilities_of_stock_attention():
    model, inputs, spy = zoo.model(NAME), zoo.prompt(NAME), Seen()
    weights = stock_weights(model, inputs)
    with attach(model, parts.compressor(scorer=spy), parts.budget(5)), torch.no_grad():
        model(**inputs, use_cache=True)
    for (sums, mass, top), wanted in zip(spy.seen, weights, strict=True):
        torch.testing.assert_close(sums.double(), wanted.sum((1, 2)), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mass.double(), wanted[:, :, -WINDOW:].mean((1, 2)), atol=1e-6, rtol=1e-5)
        best = wanted[:, :, [30, 50]].topk(5).values.sum(-1).mean((1, 2))
        torch.testing.assert_close(top, best, atol=1e-6, rtol=1e-5)
        shares = wanted.sum(-1).mean(2)
        assert float(shares.max() - shares.min()) > 0.2, "heads give different shares to their sinks"


def test_attention_of_an_answer_counts_them():
    model, inputs = zoo.model(NAME), zoo.prompt(NAME)
    length = inputs["input_ids"].shape[1]
    answer = AnswerAttention(length)
    with attach(model, full()) as session:
        session.answer = answer
        tokens = reference.generate(model, inputs, 5).tokens
    whole = zoo.inputs_of(NAME, [*inputs["input_ids"][0].tolist(), *tokens[0, :-1].tolist()])
    for layer, weights in enumerate(stock_weights(model, whole)):
        wanted = weights[:, :, length:, :length].sum(2).mean(1)
        torch.testing.assert_close(answer.mass(layer).double(), wanted, atol=1e-5, rtol=1e-5)


def test_a_decode_policy_that_adds_attention_up_counts_them():
    """H2O's layer: one token more, against a dense softmax."""
    query, key, scaling, sinks = tensors(rows=1, length=12)
    start = Start(
        layer=0, n_layers=1, key=key[:, :11], value=key[:, :11], index=torch.arange(11).expand(2, -1), kept_key=key[:, :11],
        kept_value=key[:, :11], scores=torch.zeros(2, 11), context=Context(11, 11), pad=0, seen=11, acts_from=99,
        scaling=scaling, reserve=4, sinks=sinks,
    )  # fmt: skip
    layer = AccumulatingLayer.of(start, lambda entries: 1)
    layer.update(key[None, :, 11:], key[None, :, 11:])
    layer.attended(query[None], scaling)
    wanted = dense(query, key, scaling, sinks, causal=True).sum((1, 2))
    torch.testing.assert_close(layer.attention_sums.double(), wanted, atol=1e-6, rtol=1e-5)


def tensors(rows, length, heads=2, dim=8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(heads * GROUP, rows, dim, generator=draw)
    key = 2 * torch.randn(heads, length, dim, generator=draw)
    return query, key, dim**-0.5, torch.linspace(-3, 6, heads * GROUP)


def dense(query, key, scaling, sinks, causal):
    """float64 `[Hkv, g, n, T]`; causal rows are the last of the prompt."""
    rows, length = query.shape[1], key.shape[1]
    scores = query.double() @ key.double().repeat_interleave(GROUP, 0).transpose(1, 2) * scaling
    if causal:
        scores.masked_fill_(torch.ones(rows, length, dtype=torch.bool).triu_(length - rows + 1), float("-inf"))
    column = sinks.double()[:, None, None].expand(-1, rows, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1].unflatten(0, (-1, GROUP))


def statistics(query, key, scaling, sinks):
    """Every statistic of attention, float64."""
    square, grouped = (query, key[:, -24:], scaling), (query, key, scaling, 6)
    made = {
        "column_sums": attention.column_sums(query, key, scaling, 16, sinks),
        "half_window": attention.rounded_window_mass(query, key, scaling, sinks),
        "group_mass": torch.cat([*proxies.group_mass(*grouped, sinks=sinks)], 2),
        "apart": torch.cat([*proxies.group_mass(*grouped, per_query_head=True, sinks=sinks)], 2),
        "total_mass": proxies.total_mass(*grouped, sinks=sinks),
        "group_votes": proxies.group_votes(*grouped, 0.8, sinks=sinks),
        "top_mass": entropy.top_mass(*square, range(24), 3, sinks),
        "causal_entropy": torch.tensor(entropy.causal_entropy(*square, sinks)),
    }
    return {name: one.double() for name, one in made.items()}


def test_every_statistic_equals_a_dense_softmax_with_one_more_column(monkeypatch):
    """In tiles of two sizes; without the column each of them is another number."""
    query, key, scaling, sinks = tensors(rows=24, length=40)
    causal, all_seen = (dense(query, key, scaling, sinks, causal=way) for way in (True, False))
    grouped = all_seen.unflatten(2, (6, 4)).sum(3)
    square = dense(query, key[:, -24:], scaling, sinks, causal=True)
    wanted = {
        "column_sums": causal.sum((1, 2)),
        "half_window": causal.mean(2).flatten(0, 1),
        "group_mass": grouped.mean(1, keepdim=True),
        "apart": grouped,
        "total_mass": grouped.mean(1).sum(1),
        "group_votes": nucleus(grouped.mean(1, keepdim=True).float(), 0.8, "left").sum((1, 2)).double(),
        "top_mass": square.topk(3).values.sum(-1).mean((1, 2)),
        "causal_entropy": torch.special.entr(square).sum(-1).mean(),
    }
    for tile in (64, 1 << 20):
        monkeypatch.setattr(Device, "tile", tile)
        counted, dropped = statistics(query, key, scaling, sinks), statistics(query, key, scaling, None)
        for name, one in wanted.items():
            torch.testing.assert_close(counted[name], one, atol=2e-5, rtol=2e-5, msg=name)
            assert not torch.allclose(dropped[name], one, atol=1e-2, rtol=1e-2), name


def test_expected_attention_counts_them_beside_expected_scores():
    """Heads that give much to their sink weigh less in the mean over a KV head's query heads."""
    model, inputs, scores = zoo.model(NAME), zoo.prompt(NAME), []

    @dataclass(frozen=True)
    class Noted(ExpectedAttentionScorer):
        def score(self, obs, budget, seed):
            moved = average_rotation(obs.query_mean, obs.query_covariance, *obs.rope(torch.arange(1, self.future + 1)))
            logits = expected_logits(obs.key, *moved, obs.scaling).double()
            column = logits.amax(-1) + torch.linspace(-4, 4, GROUP)
            obs.sinks = column.float().flatten()
            wanted = torch.cat([logits, column[..., None]], -1).softmax(-1)[..., :-1].mean(1)
            scores.append((super().score(obs, budget, seed), wanted * obs.value.double().norm(dim=-1)))
            return scores[-1][0]

    with attach(model, parts.compressor(scorer=Noted(sinks=0)), parts.budget(5)), torch.no_grad():
        model(**inputs, use_cache=True)
    assert len(scores) == 2
    for made, wanted in scores:
        torch.testing.assert_close(made.double(), wanted, atol=1e-4, rtol=1e-3)


def layer_scores(compressors, budget: int) -> dict[str, torch.Tensor]:
    """Scores of the first compressed layer under each method, and what allocators divide the budget by, in one prefill."""
    made: dict[str, torch.Tensor] = {}

    class Scoring:
        needs = Needs()
        for one in compressors.values():
            needs = needs | one.needs

        def layer_done(self, prompt, layer, observations):
            for name, one in compressors.items() if layer == 0 else ():
                made[name] = one.score(observations[0], budget, 0)
                if (summary := one.summary(observations[0], budget, 0)) is not None:
                    made[f"{name} divides"] = summary

        def prompt_done(self, prompt):
            """Nothing is evicted."""

        def kept(self):
            return []

    model, inputs = zoo.model(NAME), zoo.prompt(NAME)
    with Session(model, Scoring()), torch.no_grad():
        model(**inputs, use_cache=True)
    return made


WITHOUT_ATTENTION = {
    *("random", "reservoir", "streamingllm", "local", "keydiff", "flashcache", "infinipot_v", "blind", "even_frames"),
    *("flashcache divides", "meda divides"),  # by spectra of keys; by maps between modalities that no model computes
}
"""Methods whose scores and budgets are of keys, values or places."""


def test_every_method_that_reads_attention_is_moved_by_the_sinks_of_its_layer_and_no_other_is():
    """The layer's input is the same: sinks act behind its queries and keys."""
    methods = {
        key: one
        for key, one in common.for_text(common.registry(model=NAME)).items()
        if not (one.unbudgeted or one.needs.replay)
    }
    votes = methods["mmshift"]
    methods["mmshift votes"] = replace(
        votes, scorer=replace(votes.scorer, lam=0.0)
    )  # without the last query's attention
    sinks = zoo.full_attention(zoo.model(NAME))[0].sinks
    before = sinks.detach().clone()
    try:
        with torch.no_grad():
            sinks.copy_(torch.linspace(0, 400, zoo.HEADS))  # beside the scores of spread proxies, too
        counted = layer_scores(methods, 12)
        with torch.no_grad():
            sinks.fill_(-1e4)
        without = layer_scores(methods, 12)
    finally:
        with torch.no_grad():
            sinks.copy_(before)
    unmoved = {name for name, one in counted.items() if torch.equal(one, without[name])}
    assert len(methods) > 15 and "hybridkv divides" in counted and unmoved == WITHOUT_ATTENTION & set(counted)
