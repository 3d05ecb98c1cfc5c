"""Promise: distributions are compared piece by piece, which changes no number and bounds what float64 copies hold."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmkv_bench.generation.fidelity import divergence, negative_log_likelihood
from tests.each import each

BOUND = 256 << 20  # bytes


class Float64(TorchDispatchMode):
    """Counts the bytes of float64 tensors that are alive, and their peak. A view counts once more, never less."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
            size = made.numel() * made.element_size()
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(made, self._gone, size)
        return made

    def _gone(self, size: int) -> None:
        self.alive -= size


def logits(rows: int, tokens: int, vocabulary: int, dtype: torch.dtype = torch.float32):
    """Of a full cache and of `rows` forks, and the tokens that are asked for."""
    made = torch.Generator().manual_seed(rows * tokens)
    full = torch.randn(tokens, vocabulary, generator=made).mul_(4).to(dtype)
    forks = full + torch.randn(rows, tokens, vocabulary, generator=made).to(dtype)
    return full, forks, torch.randint(vocabulary, (tokens,), generator=made)


# pieces of tokens, rows one by one; one token, pieces of rows; all in one piece; pieces of both; no token
SHAPES = [(1, 60, 152064), (3, 29, 152064), (40, 1, 152064), (2, 3, 50), (7, 1000, 1500), (1, 0, 50)]


@pytest.mark.full
@each("shape", SHAPES)
def test_pieces_give_what_all_at_once_gives(shape):
    full, forks, tokens = logits(*shape)
    log_p, log_q = full.double().log_softmax(-1), forks.double().log_softmax(-1)
    kl, agree = divergence(full, forks)
    assert kl.dtype == torch.float64 and kl.shape == agree.shape == shape[:2]
    torch.testing.assert_close(kl, (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-12, atol=1e-13)
    assert torch.equal(agree, forks.argmax(-1) == full.argmax(-1))
    picked = [[-row[i, token] for i, token in enumerate(tokens)] for row in log_q]
    nll = negative_log_likelihood(forks, tokens)
    torch.testing.assert_close(nll, torch.tensor(picked, dtype=torch.float64).view(shape[:2]), rtol=1e-12, atol=1e-13)


def test_a_token_that_the_full_cache_rules_out_adds_nothing():
    full, forks = torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([[[0.0, 0.0, -torch.inf]], [[0.0, 0.0, 5.0]]])
    kl, _ = divergence(full, forks)
    assert kl[0, 0] == 0.0 and kl[1, 0] == pytest.approx(torch.tensor(2 + torch.e**5).log().item() - 0.6931471805599453)


@pytest.mark.full
@each("shape", [(1, 120, 152064), (60, 2, 152064), (9, 13, 152064)])
def test_float64_copies_hold_no_more_than_256_mib(shape):
    full, forks, tokens = logits(*shape, dtype=torch.bfloat16)
    for measure in (lambda: divergence(full, forks), lambda: negative_log_likelihood(forks, tokens)):
        with Float64() as float64:
            measure()
        assert 0 < float64.peak <= BOUND
    with Float64() as float64:
        full.double().log_softmax(-1)
    assert float64.peak >= 2 * 8 * full.numel(), "the counter sees copies"
