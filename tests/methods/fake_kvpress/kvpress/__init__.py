"""A stand-in for NVIDIA's kvpress with the interface that the adapter relies on, and presses of the test's own."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@dataclass
class BasePress:
    def post_init_from_model(self, model):
        """Nothing."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        raise NotImplementedError

    def forward_hook(self, module, input, kwargs, output):
        raise AssertionError("the adapter hooks nothing")

    @contextmanager
    def __call__(self, model):
        raise AssertionError("the adapter drives nothing")


@dataclass
class ScorerPress(BasePress):
    compression_ratio: float = 0.0

    def __post_init__(self):
        assert 0 <= self.compression_ratio < 1, "the ratio is a fraction"

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        raise NotImplementedError

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        raise AssertionError("the adapter evicts by itself")


@dataclass
class LoudPress(ScorerPress):
    """Keys with a large first channel stay, `first` of the prompt too. Checks everything it is given."""

    first: int = 2
    power: float = 1.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        length = keys.shape[2]
        cos, sin = kwargs["position_embeddings"]
        assert hidden_states.shape[:2] == (1, length) and hidden_states is not None
        assert cos.shape == sin.shape == (1, length, module.head_dim) and keys.shape == values.shape
        assert attentions is None and int(kwargs["cache_position"][-1]) == length - 1
        queries = module.q_proj(hidden_states)
        assert queries.shape == (1, length, module.config.num_attention_heads * module.config.head_dim)
        assert module.k_proj(hidden_states).shape == (1, length, keys.shape[1] * module.head_dim)
        ahead = torch.arange(length, length + 3)[None]
        assert module.rotary_emb(queries, ahead)[0].shape == (1, 3, module.head_dim)
        assert int(length * (1 - self.compression_ratio)) == LoudPress.expected, "the ratio is not the budget's"
        score = keys[..., 0].abs() ** self.power
        score[:, :, : self.first] = score.max() + 1
        return score


LoudPress.expected = 12


@dataclass
class DicePress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.rand(keys.shape[:-1])


@dataclass
class FlatPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[0, 0, :, 0]


@dataclass
class PickyPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert keys.shape[2] > 10**6, "the prompt is too short for me"


class AroundPress(ScorerPress):
    def __init__(self, press: ScorerPress, factor: float = -1.0):
        self.press, self.factor = press, factor

    def post_init_from_model(self, model):
        self.press.post_init_from_model(model)

    def score(self, *arguments):
        return self.factor * self.press.score(*arguments)

    @property
    def compression_ratio(self):
        return self.press.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, value):
        self.press.compression_ratio = value


@dataclass
class TablePress(ScorerPress):
    def post_init_from_model(self, model):
        raise AssertionError("loads a table")


@dataclass
class HookPress(ScorerPress):
    def forward_hook(self, module, input, kwargs, output):
        raise AssertionError


@dataclass
class DrivePress(BasePress):
    @contextmanager
    def __call__(self, model):
        raise AssertionError


@dataclass
class MergePress(BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        raise AssertionError


class _Masking(BasePress):
    def __init__(self, press: ScorerPress, alpha_safeguard: float = 0.2):
        assert isinstance(press, ScorerPress), "it wants a press that scores"
        self.press, self.alpha_safeguard = press, alpha_safeguard

    compression_ratio = AroundPress.compression_ratio

    def post_init_from_model(self, model):
        raise AssertionError("the adapter hands no model over")

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        raise AssertionError("the adapter evicts by itself")


class AdaKVPress(_Masking):
    """Named like one of the library's."""


class QFilterPress(ScorerPress):
    """Named like one of the library's, which reads filters of the hub."""


@dataclass
class EdgesPress(ScorerPress):
    """The first and last tokens stay whatever happens, of the others those with a large first channel."""

    first: int = 0
    last: int = 0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        score = keys[..., 0].abs()
        score[:, :, : self.first] = score.max() + 1
        score[:, :, keys.shape[2] - self.last :] = score.max() + (self.first == 0)
        return score


def _wrapped(function):
    def wrapper(*arguments, **options):
        raise AssertionError("the library's import changed the attention of every model")

    return wrapper


for _name, _function in ALL_ATTENTION_FUNCTIONS.items():
    ALL_ATTENTION_FUNCTIONS[_name] = _wrapped(_function)
