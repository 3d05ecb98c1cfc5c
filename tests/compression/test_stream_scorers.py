"""Methods made for streams against plain loops, and what repeated evictions do to the ages that stay."""

from __future__ import annotations

import pytest
import torch

from mmkv_bench.compression.observation import Frames, Needs
from mmkv_bench.compression.scorers.even_frames import EvenFramesScorer
from mmkv_bench.compression.scorers.infinipot_v import InfiniPotVScorer
from mmkv_bench.compression.scorers.random import RandomScorer
from mmkv_bench.compression.scorers.reservoir import ReservoirScorer
from mmkv_bench.errors import ConfigError
from tests.compression import oracles
from tests.each import each

CELLS, PATCHES, TEXT = 4, 6, 3
LENGTH = TEXT + CELLS * PATCHES


def frames() -> Frames:
    """Three tokens of text, then pairs of frames of four cells each."""
    number = torch.tensor([-1] * TEXT + [patch for patch in range(PATCHES) for _ in range(CELLS)])
    cell = torch.tensor([0] * TEXT + list(range(CELLS)) * PATCHES)
    return Frames(number, cell, CELLS)


def seen(kept: torch.Tensor | None = None, seed: int = 0):
    """A layer of two heads; kept: int64 [2, S], the tokens that are left of it."""
    layer = oracles.make_layer(LENGTH, 2, 2, seed=seed)
    observation = layer.observe(Needs())
    if kept is None:
        kept = torch.arange(LENGTH).expand(2, -1)
    place = kept[..., None].expand(-1, -1, observation.key.shape[-1])
    key, value = observation.key.gather(1, place), observation.value.gather(1, place)
    observation._seen = observation.length = kept.shape[1]
    observation._key, observation._value = key, value
    return observation.stream_view(kept, frames())


def some_left(seed: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(LENGTH, generator=drawn)[:17].sort().values for _ in range(2)])


@each("kept", [None, *map(some_left, range(5))])
def test_infinipot_v_takes_text_recent_frames_the_least_repeated_and_large_values_in_this_order(kept):
    obs, budget, told = seen(kept), 12, frames()
    score = InfiniPotVScorer(alpha=0.75, recent=0.2).score(obs, budget, 0)
    for head in range(2):
        tokens = obs.tokens[head].tolist()
        number, cell = [int(told.number[t]) for t in tokens], [int(told.cell[t]) for t in tokens]
        unit = torch.nn.functional.normalize(obs.key[head].float(), dim=-1)
        visual = [slot for slot in range(len(tokens)) if number[slot] >= 0]
        r = max(1, int(len(visual) * 0.2 / CELLS))
        newest = int(told.number[obs.tokens].max())
        recent = [slot for slot in visual if number[slot] > newest - r]
        past = [slot for slot in visual if slot not in recent]

        def distinct(slot, recent=recent, cell=cell, unit=unit):
            same = [float(unit[slot] @ unit[other]) for other in recent if cell[other] == cell[slot]]
            return -sum(same) / max(1, len(same))

        tar = sorted(past, key=distinct, reverse=True)[: max(0, budget - round(0.25 * budget) - len(recent))]
        norm = obs.value[head].float().norm(dim=-1)
        text = [slot for slot in range(len(tokens)) if number[slot] < 0]
        tiers = {**dict.fromkeys(tar, 1), **dict.fromkeys(recent, 2), **dict.fromkeys(text, 3)}
        order = sorted(range(len(tokens)), key=lambda slot: (-tiers.get(slot, 0), -float(norm[slot])))
        assert score[head].sort(descending=True, stable=True).indices.tolist() == order


def test_infinipot_v_without_frames_is_the_value_norm_and_says_so():
    obs = oracles.make_layer(20, 2, 2, seed=1).observe(Needs())
    norm = obs.value.double().norm(dim=-1)
    scorer = InfiniPotVScorer()
    assert torch.allclose(scorer.score(obs, 8, 0), norm / norm.amax(-1, keepdim=True))
    assert scorer.observed_fallbacks(obs, 8, 0) == ("no_frames",) and not scorer.observed_fallbacks(seen(), 8, 0)
    assert scorer.observed_fallbacks(seen(), 2, 0) == ("text_over_budget",)
    with pytest.raises(ConfigError, match="are not both shares"):
        InfiniPotVScorer(alpha=1.5)


def test_even_frames_keep_every_second_then_every_fourth_frame():
    score = EvenFramesScorer().score(seen(), 8, 0)[0]
    kept = score.sort(descending=True, stable=True).indices
    numbers = frames().number[kept]
    assert numbers[:TEXT].tolist() == [-1] * TEXT
    assert numbers[TEXT::CELLS].tolist() == [0, 4, 2, 1, 5, 3]
    long = EvenFramesScorer().score(oracles.make_layer(64, 1, 1, seed=0).observe(Needs()), 8, 0)[0]
    assert sorted(long.topk(8).indices.tolist()) == list(range(0, 64, 8))
    assert sorted(long.topk(12).indices.tolist()) == sorted([*range(0, 64, 8), 4, 20, 36, 52])


def ages(scorer, draws: int = 60) -> torch.Tensor:
    """How often tokens of each fifth of a stream of 200 are left of 20, over two heads and many samples."""
    counts = torch.zeros(5)
    for seed in range(draws):
        tokens, rounds = torch.arange(20).expand(2, -1), 0
        for last in range(40, 201, 20):
            tokens = torch.cat([tokens, torch.arange(last - 20, last).expand(2, -1)], 1)
            obs = oracles.make_layer(40, 2, 1, seed=0).observe(Needs(), identity=f"sample {seed}")
            obs._rounds = rounds
            score = scorer.score(obs.stream_view(tokens, None), 20, 0)
            tokens, rounds = tokens.gather(1, score.topk(20, -1).indices.sort(-1).values), rounds + 1
        counts += torch.bincount((tokens // 40).flatten(), minlength=5)
    return counts / counts.sum()


def test_a_reservoir_is_uniform_over_ages_and_repeated_draws_are_not():
    assert (ages(ReservoirScorer()) - 0.2).abs().max() < 0.03
    repeated = ages(RandomScorer())
    assert repeated[-1] > 0.5 and repeated[0] < 0.05


def test_a_token_keeps_its_number_in_a_reservoir():
    obs = oracles.make_layer(40, 2, 1, seed=0).observe(Needs())
    whole = ReservoirScorer().score(obs, 20, 0)
    tokens = torch.stack([torch.arange(0, 40, 2), torch.arange(1, 40, 2)])
    assert float(whole.min()) >= 0 and float(whole.max()) < 1 and len(whole.unique()) == 80
    later = oracles.make_layer(20, 2, 1, seed=0).observe(Needs())
    later._rounds = 7
    assert torch.equal(ReservoirScorer().score(later.stream_view(tokens, None), 20, 0), whole.gather(1, tokens))
    assert not torch.equal(ReservoirScorer().score(obs, 20, 1), whole)
