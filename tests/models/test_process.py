"""Promise: a small model computes with one thread, unless somebody says otherwise; whoever calls keeps what they had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmkv_bench.models.load import SMALL, computing_with, threads_for


def loaded(parameters: int, device: str = "cpu"):
    weights = [torch.empty(parameters, device="meta")]
    return SimpleNamespace(model=SimpleNamespace(parameters=lambda: weights), device=torch.device(device))


@pytest.fixture
def three():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_small_models_take_one_thread_and_what_is_said_goes_before(monkeypatch, three):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_for(loaded(SMALL - 1), None) == 1
    assert threads_for(loaded(SMALL), None) == threads_for(loaded(1, "cuda"), None) == 3
    assert threads_for(loaded(1), 2) == threads_for(loaded(SMALL), 2) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_for(loaded(1), None) == 3 and threads_for(loaded(1), 2) == 2


def test_the_callers_threads_come_back_also_after_an_error(three):
    with computing_with(1):
        assert torch.get_num_threads() == 1
    with pytest.raises(ValueError, match="broken"), computing_with(2):
        raise ValueError("broken")
    assert torch.get_num_threads() == 3
