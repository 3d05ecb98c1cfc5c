"""The simulated device itself: it computes as the CPU does and refuses what a real one would refuse."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch

from mmkv_bench import devices
from tests.second_device import PLACE, Far, MixedDevices, Race, far, near, second_device, there


@pytest.fixture
def device():
    with second_device() as made:
        yield made


def some(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


REFUSED = {
    "addition": lambda here, away: away + here,
    "addition in place": lambda here, away: here.add_(away),
    "a single value of the device in a tensor of the host": lambda here, away: here.clamp_(min=away.sum()),
    "product": lambda here, away: here @ away.T,
    "concatenation": lambda here, away: torch.cat([here, away]),
    "stacking single values": lambda here, away: torch.stack([here.sum(), away.sum()]),
    "choice": lambda here, away: torch.where(here > 0, away, away),
    "gathering by the host's index": lambda here, away: away.gather(0, (here > 9).long()),
    "the host indexed by the device": lambda here, away: here[(away > 0).nonzero()[:, 0]],
    "writing under a mask": lambda here, away: away.__setitem__(away > 0, here[away.cpu() > 0]),
    "scattered addition": lambda here, away: away.index_add_(0, torch.arange(len(here)), away.clone()),
    "attention": lambda here, away: torch.nn.functional.scaled_dot_product_attention(
        *[away[None, None]] * 2, here[None, None]
    ),
    "a layer left behind": lambda here, away: torch.nn.Linear(here.shape[1], 2)(away),
    "an embedding": lambda here, away: torch.nn.functional.embedding((here > 0).long(), away),
    "an output": lambda here, away: torch.add(away, away, out=here),
    "reading as numpy": lambda here, away: away.numpy(),
    "an array of it": lambda here, away: numpy.asarray(away),
}


@pytest.mark.parametrize("what", REFUSED)
def test_mixing_is_refused(device, what):
    here, away = some(3, 4), far(some(3, 4))
    with pytest.raises(TypeError if "reading" in what or "array" in what else MixedDevices):
        REFUSED[what](here, away)


ALLOWED = {
    "single values of the host": lambda t: (t + torch.tensor(2.0)) * torch.tensor(3) + torch.where(t > 0, torch.tensor(1.0), t),
    "a mask filled with one": lambda t: t.masked_fill(t > 0, torch.tensor(-1.0)),
    "the host's indices": lambda t: t[torch.tensor([2, 0])] + t[[1, 1]] + t[[True, False, True]],
    "slices": lambda t: t[1:, None, ..., :-1].transpose(0, 2).contiguous(),
    "writing": lambda t: written(t.clone()),
    "copies": lambda t: torch.empty_like(t).copy_(t.cpu()),
    "new tensors beside it": lambda t: t.new_zeros(2) + torch.ones(2, device=t.device) + t.new_tensor([1.0, 2.0]),
    "sequences": lambda t: torch.arange(4, device=t.device) + torch.tensor([4], device=t.device),
    "other dtypes": lambda t: t.to(torch.float64).to(t.device, torch.float32).half().float().to(t),
    "sorting": lambda t: t.sort(dim=-1, descending=True, stable=True).indices,
    "several results": lambda t: torch.cat([part.amax(-1) for part in t.split(2, dim=1)]),
    "complex views": lambda t: filtered(t),
    "attention": lambda t: torch.nn.functional.scaled_dot_product_attention(*[t[None, None]] * 3, is_causal=True),
    "a comparison": lambda t: torch.full((), float(torch.equal(t, t)), device=t.device) * int(t.argmax()),
}  # fmt: skip


def filtered(t: torch.Tensor) -> torch.Tensor:
    bins = torch.fft.rfft(t)
    turned = bins[:1].conj()
    return torch.fft.irfft(bins.mul_(turned), n=4) + turned.imag.sum()


def written(t: torch.Tensor) -> torch.Tensor:
    t[0] = torch.arange(4.0)  # of the host, copied into a slice
    t[1:, 2] = 7
    t[t > 5] = torch.tensor(0.5)
    view = t.view(-1)
    view[:2].add_(1).mul_(2)
    return t


@pytest.mark.parametrize("what", ALLOWED)
def test_everything_else_is_what_the_cpu_computes_and_stays_on_the_device(device, what):
    expected = ALLOWED[what](some(3, 4))
    found = ALLOWED[what](far(some(3, 4)))
    assert isinstance(found, Far) and found.device == PLACE and found.is_cuda
    assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected)


def test_the_memory_of_two_devices_is_never_the_same(device):
    here = torch.zeros(3)
    away = here.to("cuda")
    back = away.cpu()
    assert away.to(PLACE) is away and here.cpu() is here and away.cuda() is away
    here += 1
    away += 2
    assert (here.tolist(), away.tolist(), back.tolist()) == ([1] * 3, [2] * 3, [0] * 3)


def test_views_and_tensors_written_in_place_share_memory(device):
    t = far(torch.zeros(2, 3))
    assert t.add_(1) is t
    t[:, 1:].mul_(5)
    t.T[0].fill_(9)
    assert t.tolist() == [[9, 5, 5], [9, 5, 5]]


def test_a_models_copy_moves_with_what_was_tied_and_the_model_stays(device):
    model = torch.nn.Sequential(
        torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False), torch.nn.BatchNorm1d(4)
    ).eval()
    model[1].weight = model[0].weight
    copied = there(model)
    assert copied[1].weight is copied[0].weight
    assert all(isinstance(one, Far) for one in [*copied.parameters(), *copied.buffers()])
    assert not any(isinstance(one, Far) for one in [*model.parameters(), *model.buffers()])
    ids = torch.tensor([3, 1])
    assert torch.equal(copied(ids.to(PLACE)).cpu(), model(ids))
    assert copy.deepcopy(copied)[0].weight.device == PLACE


def test_bytes_are_counted_as_an_allocator_counts_them(device):
    memory = device.memory
    a = torch.ones(100, device=PLACE)
    view = a[3:].view(-1)
    assert memory.held().allocated == 400
    b = (a * 2 + 1).sum()
    assert memory.peak().allocated >= 800
    del a
    assert memory.held().allocated == 400 + b.nbytes, "the view is left"
    del view
    reserved = memory.held().reserved
    assert reserved >= 800
    device.release()
    memory.restart()
    assert memory.held() == memory.peak() == (b.nbytes, b.nbytes)
    torch.ones(10**6)
    assert memory.peak().allocated == b.nbytes, "the host's memory is not the device's"


def test_work_beside_the_main_line_is_not_done_before_somebody_waits(device):
    away, host = torch.ones(4, device=PLACE), torch.zeros(4)
    lane = device.lane()
    with lane:
        made = away * 2
        made += 1
        host.copy_(made, non_blocking=True)
    for use in (lambda: made + 1, lambda: made[0], made.cpu, lambda: host + 1, lambda: host.add_(1)):
        with pytest.raises(Race):
            use()
    lane.settle()
    assert host.tolist() == [3] * 4
    with pytest.raises(Race):
        made.sum()
    lane.join()
    assert made.sum() == 12
    back = host.to(PLACE, non_blocking=True)
    assert (host + 1).tolist() == [4] * 4, "the host may read what the device reads"
    with pytest.raises(Race):
        torch.add(host, 1, out=host)
    device.synchronise()
    host += 1
    assert back.tolist() == [3] * 4


def test_a_device_of_a_size_runs_out_of_memory():
    with second_device(limit=1000) as device:
        kept = torch.zeros(200, device=PLACE)
        with pytest.raises(torch.OutOfMemoryError):
            kept + 1
        del kept
        torch.zeros(240, device=PLACE)
        assert device.memory.held().allocated < 1000
    with second_device():
        torch.zeros(10**4, device=PLACE)


def test_the_device_object_is_there_while_the_device_is(device):
    assert devices.kind_of("auto") == "cuda" and devices.at("cuda:0").name() == "second device"
    waited = device.waits
    asked = devices.at(PLACE)
    first, second = asked.mark(), asked.mark()
    assert device.waits == waited and not second.done, "marks do not wait"
    assert asked.between(first, second) >= 0 and second.done
    asked.now()
    assert device.waits == waited + 1
    buffer = asked.host_buffer(2, 3, dtype=torch.float16)
    assert device.buffers[-1] is buffer and not isinstance(buffer, Far)
    assert (asked.foreign_processes(), asked.throttled(), asked.waits_for_launches()) == ((), (), False)


def test_nothing_is_left_of_it_and_nothing_of_torch_is_replaced():
    before = devices.KINDS["cuda"], torch.cuda._lazy_init, torch.cuda.is_available(), torch.zeros
    with second_device(), pytest.raises(KeyError):
        raise KeyError
    assert (devices.KINDS["cuda"], torch.cuda._lazy_init, torch.cuda.is_available(), torch.zeros) == before
    assert type(torch.zeros(2) + 1) is torch.Tensor and near(torch.ones(1)).item() == 1
