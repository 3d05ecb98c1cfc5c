"""Promise: where a picture's tokens see each other to its end (Gemma 3), scores are those of the attention that is computed.

The references are stock attention over masked keys, the probabilities that stock transformers gives of itself, and dense
softmaxes in float64 under the mask of blocks, written as transformers' documentation says it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from mmkv_bench.compression.attended_prefix import picture_ends
from mmkv_bench.compression.compressor import full
from mmkv_bench.compression.numerics import attention, entropy
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.scorers.kvpress import PressScorer
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.session import Session, attach
from mmkv_bench.devices import Device
from mmkv_bench.diagnostics import quantities
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.facts import state_bytes
from mmkv_bench.generation.unshared_generation import generate_alone
from mmkv_bench.protocols import SINGLE, protocol
from tests import reference, zoo
from tests.core import parts
from tests.each import each
from tests.generation import common

NAME, GROUP, WINDOW, TOLERANCE = "gemma3_vl", zoo.HEADS, 24, 2e-6
PROTOCOLS = tuple(name for name in SINGLE if not (protocol(name).prefills_again or protocol(name).streams))


# ------------------------------------------------------------------------------------------------- nothing is evicted


@pytest.mark.slow
@each("base", ["sdpa", "eager"])
def test_full_is_bit_identical_to_the_untouched_model_alone_and_in_a_padded_batch(base):
    """Prefill and decode; without its token types the model would answer otherwise."""
    model = zoo.model(NAME, base)
    for inputs in (zoo.prompt(NAME), zoo.batch([zoo.prompt(NAME), zoo.prompt(NAME, 1, before=2)])):
        stock = reference.generate(model, inputs, 6)
        causal = reference.generate(model, {key: one for key, one in inputs.items() if key != "token_type_ids"}, 6)
        assert float((stock.logits - causal.logits).abs().max()) > 0.1
        for made, budget in ((full(), None), (parts.keep_all(), parts.budget(1))):
            with attach(model, made, budget=budget) as session:
                run = reference.generate(model, inputs, 6)
            assert torch.equal(run.logits, stock.logits) and torch.equal(run.tokens, stock.tokens)
            assert len(session.latest_cache.compressed) == 2 and len(session.latest_cache.states) == 2


# ------------------------------------------------------------------------------------------------- against the oracle


@pytest.mark.slow
@each("rule", PROTOCOLS, keep=2)
def test_every_scorer_answers_as_masked_stock_attention_and_budgets_count_full_layers(rule):
    model, inputs, prompt = zoo.model(NAME), zoo.prompt(NAME), common.encoded(NAME)
    context = common.context_cut(prompt, common.family(NAME))
    cut = context if protocol(rule).cuts else None
    end = protocol(rule).lengths(prompt.length, cut).candidates
    moved = []
    for made in common.registry(model=NAME).values():
        if made.needs.replay or made.decoding is not None or type(made.reducer) is not Evict:
            continue
        budget = None if made.unbudgeted else parts.budget(12)
        out = generate_alone(model, inputs, made, budget, rule, context=cut, max_new_tokens=4)
        kept = out.session.kept()
        assert [index.shape[:2] for index in kept] == [(1, 1)] * 2
        assert made.unbudgeted or made.exceeds or sum(index.shape[2] for index in kept) <= 2 * 12
        stock = reference.masked_generate(model, inputs, reference.keep_of(kept, end), end, 4)
        assert float((torch.stack(out.logits) - stock.logits).abs().max()) <= TOLERANCE
        moved.append(float((stock.logits[-1] - reference.stock(NAME).logits[3]).abs().max()))
    assert len(moved) > 12 and max(moved) > 0.02, "evictions must matter"


@pytest.mark.slow
def test_every_method_forks_as_it_runs_alone():
    """Pictures of every method; windows and merged entries too."""
    model, prompt = zoo.model(NAME), common.encoded(NAME)
    methods = [
        made
        for made in common.registry(model=NAME).values()
        if not made.needs.replay and (made.decoding is None or not made.decoding.moves_queries)
    ]
    cells = [
        common.cell(made, None if made.unbudgeted else (5, "40%")[number % 2], rule)
        for number, made in enumerate(methods)
        for rule in {"paper", "paper" if made.needs.answer else PROTOCOLS[number % len(PROTOCOLS)]}
    ]
    forks = common.assert_forks_equal_alone(model, NAME, prompt, cells)
    assert len(methods) > 20 and len({tuple(fork.token_ids) for fork in forks}) > 3
    assert {fork.bytes_state for fork in forks if fork.cell.split("/")[1] == "paper"} == {
        state_bytes(common.family(NAME), prompt.length, "float32")
    }


# --------------------------------------------------------------------------------------------------- what scorers see


def blocks(ids: torch.Tensor) -> torch.Tensor:
    """bool `[T, T]`: each token sees those up to itself and those of its own picture."""
    picture, number, before = [], 0, False
    for token in ids.tolist():
        number += token == zoo.IMAGE and not before
        before = token == zoo.IMAGE
        picture.append(number if before else 0)
    return torch.tensor([[k <= q or (picture[q] > 0 and picture[q] == picture[k]) for k in range(len(picture))]
                         for q in range(len(picture))])  # fmt: skip


@dataclass(frozen=True)
class Seen(parts.RandomScores):
    """Notes the statistics of attention that scorers read, and how far rows see."""

    seen: list = field(default_factory=list, compare=False)
    needs = Needs(tail_queries=WINDOW, column_sums=True, queries=True, states=True)

    def score(self, obs, budget, seed):
        top = entropy.top_mass(obs.queries, obs.key, obs.scaling, [7, 20, 41], 5, None, obs.reach)
        mean = entropy.causal_entropy(obs.queries, obs.key, obs.scaling, None, obs.reach)
        apart = WindowScorer(WINDOW, pool=3, pooling="max", heads="last").score(obs, 2 * WINDOW, 0)
        rounded = WindowScorer(WINDOW, pool=1, score_rounding="model")._rounded_scores(obs, WINDOW)
        first = torch.tensor([one.value for one in quantities.sinks(obs, obs)][:-1])  # the last is of no attention
        self.seen.append((obs.reach, obs.column_sums, obs.window_mass(WINDOW), top, mean, apart, rounded, first))
        return super().score(obs, budget, seed)


@torch.no_grad()
def test_statistics_of_a_layer_are_those_of_the_probabilities_of_stock_attention():
    """Of a context that ends behind a picture, so that the window lies in it; alone, and as the padded row of a batch."""
    model = zoo.model(NAME, "eager")
    whole, longer = zoo.prompt(NAME), zoo.prompt(NAME, 1, before=9)
    cut = {key: one[:, :44] if one.ndim == 2 else one for key, one in whole.items()}
    weights = model(**cut, output_attentions=True).attentions[1::2]
    seen_by = blocks(cut["input_ids"][0])
    for inputs in (cut, zoo.batch([longer, cut])):
        spy = Seen()
        with attach(model, parts.compressor(scorer=spy), parts.budget(5)):
            model(**inputs, use_cache=True)
        rows = len(inputs["input_ids"])
        for (reach, sums, mass, top, mean, apart, rounded, first), wanted in zip(
            spy.seen[rows - 1 :: rows], weights, strict=True
        ):
            p = wanted[0].double()
            assert torch.equal(torch.arange(44) <= reach[:, None], seen_by)
            torch.testing.assert_close(sums[0].double(), p.sum((0, 1)), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(mass[0].double(), p[:, -WINDOW:].mean((0, 1)), atol=1e-6, rtol=1e-5)
            late = p[:, -WINDOW:].mean(1)
            late[:, :-WINDOW] = torch.nn.functional.max_pool1d(late[:, :-WINDOW], 3, 1, 1)
            torch.testing.assert_close(apart[0].double(), late.mean(0), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(rounded[0].double(), p[:, -WINDOW:].mean((0, 1)), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(first.double(), p[:, 22:, 0].mean(1), atol=1e-6, rtol=1e-5)
            best = p[:, [7, 20, 41]].topk(5).values.sum(-1).mean()
            torch.testing.assert_close(top[0], best, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(torch.tensor(mean).double(), torch.special.entr(p).sum(-1).mean())


def test_every_statistic_equals_a_dense_softmax_and_is_another_number_without_blocks(monkeypatch):
    """In tiles of two sizes."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.tensor([5] * 4 + [zoo.IMAGE] * 9 + [6] * 2 + [zoo.IMAGE] * 7 + [7] * 2)
    total, heads, group, dim = len(ids), 2, 3, 8
    query, key = (
        2 * torch.randn(heads * group, total, dim, generator=draw),
        torch.randn(heads, total, dim, generator=draw),
    )
    reach, scaling = picture_ends((ids == zoo.IMAGE).int()[None])[0], dim**-0.5
    assert torch.equal(torch.arange(total) <= reach[:, None], blocks(ids))
    scores = query.double() @ key.double().repeat_interleave(group, 0).mT * scaling
    p = scores.masked_fill(~blocks(ids), float("-inf")).softmax(-1).unflatten(0, (heads, group))
    late, rows = p[:, :, -6:], [3, 5, 14, 20]
    top = p[:, :, rows].topk(4).values.sum(-1).mean((1, 2))
    wanted = {
        "column_sums": p.sum((1, 2)),
        "window_mass": late.mean((1, 2)),
        "half_window": late.mean(2).flatten(0, 1),
        "causal_entropy": torch.special.entr(p).sum(-1).mean(),
        "top_mass": top,
    }

    def statistics(reach):
        tail, last = query[:, -6:], None if reach is None else reach[-6:]
        return {
            "column_sums": attention.column_sums(query, key, scaling, reach=reach),
            "window_mass": attention.window_mass(tail, key, scaling, reach=last),
            "half_window": attention.rounded_window_mass(tail, key, scaling, reach=last),
            "causal_entropy": torch.tensor(entropy.causal_entropy(query, key, scaling, reach=reach)),
            "top_mass": entropy.top_mass(query, key, scaling, rows, 4, reach=reach),
        }

    for tile in (64, 1 << 20):
        monkeypatch.setattr(Device, "tile", tile)
        made, causal = statistics(reach), statistics(None)
        for name, one in wanted.items():
            torch.testing.assert_close(made[name].double(), one, atol=2e-6, rtol=2e-6, msg=name)
            assert not torch.allclose(causal[name].double(), one, atol=1e-3, rtol=1e-3), name
    pieces = [(0, 13), (13, 22), (22, 24)]
    sums = torch.zeros(heads, total)
    for start, end in pieces:
        sums[:, :end] += attention.column_sums(
            query[:, start:end], key[:, :end], scaling, start, reach=reach[start:end]
        )
    torch.testing.assert_close(sums.double(), wanted["column_sums"], atol=2e-6, rtol=2e-6)


# ----------------------------------------------------------------------------------------------------------- refusals


def chunked(cuts: list[int], told: bool = True) -> list[torch.Tensor]:
    """Prefill in chunks that end at `cuts` and at the end; returns what is kept. told: which tokens are visual."""
    model, inputs, embeds = zoo.model(NAME), zoo.prompt(NAME), []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: embeds.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    types, total = inputs["token_type_ids"], inputs["input_ids"].shape[1]
    options = {"token_types": types} if told else {}
    with attach(model, parts.window(), parts.budget(9), prompt_length=total, **options) as session, torch.no_grad():
        cache = session.new_cache()
        for start, end in zip([0, *cuts], [*cuts, total], strict=True):
            model(
                inputs_embeds=embeds[0][:, start:end],
                token_type_ids=types[:, :end],
                past_key_values=cache,
                use_cache=True,
            )
        return session.kept()


def test_a_chunk_that_begins_inside_a_picture_is_refused_and_one_between_pictures_is_not():
    whole = chunked([])
    for cuts in ([23], [5, 44], [24, 25, 26]):
        assert all(torch.equal(one, other) for one, other in zip(chunked(cuts), whole, strict=True))
    for cuts in ([12], [7], [23, 42]):
        with pytest.raises(UnsupportedError, match="begins inside a picture.*feed each picture in one chunk"):
            chunked(cuts)
    with pytest.raises(UnsupportedError, match="attend to later tokens"):
        chunked([], told=False)


def test_what_pictures_that_see_themselves_cannot_follow_is_refused():
    model, prompt, registry = zoo.model(NAME), common.encoded(NAME), common.registry(model=NAME)
    for rule, words in (("masked", "hides evicted tokens from a second prefill"), ("stream", "keep a window")):
        (row,) = common.together(model, NAME, prompt, [common.cell(parts.window(), 9, rule)])
        assert row.status == "error" and words in row.error
    with pytest.raises(UnsupportedError, match="appends the context a second time"):
        attach(model, registry["kvzip"], parts.budget(9))
    with pytest.raises(UnsupportedError, match="decode=eager"):
        Session(model, fixed=True)
    observed = SimpleNamespace(sinks=None, reach=torch.tensor([1, 1]))
    with pytest.raises(UnsupportedError, match="supports only causal attention"):
        PressScorer._ask(SimpleNamespace(press="SnapKVPress"), observed, None, 0)
