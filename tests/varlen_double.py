"""A double of torch's `varlen_attn`, whose kernels are for CUDA devices: its signature, what they refuse, and their numbers.

with reading() as kernel:                       # as on a device that reads heads back to back, in float32
    ... heads of different lengths ...
kernel.read                                     # slots that each call read
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import varlen_attn as true

from mmkv_bench import devices
from mmkv_bench.compression import varlen_layer
from mmkv_bench.devices import Device


@dataclass
class Kernel:
    """What is called. read: slots, and widest: `max_k` of each call."""

    dtypes: tuple[torch.dtype, ...]
    read: list[int] = field(default_factory=list)
    widest: list[int] = field(default_factory=list)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux=None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert torch._C._get_flash_sdp_enabled() and not torch._C._get_cudnn_sdp_enabled(), SDPBackend.FLASH_ATTENTION
        assert return_aux is block_table is num_splits is None and window_size in ((-1, -1), (-1, 0))
        assert query.dtype == key.dtype == value.dtype and query.dtype in self.dtypes
        assert query.device == key.device == value.device and all(one.stride(-1) == 1 for one in (query, key, value))
        (total, heads, width), (slots, kv_heads, _) = query.shape, key.shape
        assert key.shape == value.shape == (slots, kv_heads, width) and width % 8 == 0 and width <= 256
        assert enable_gqa or heads == kv_heads
        sequences = len(cu_seq_q) - 1
        for counts in (cu_seq_q, cu_seq_k, seqused_k):
            assert counts.dtype == torch.int32 and counts.is_contiguous() and counts.device == query.device
            assert counts.shape == (sequences + (counts is not seqused_k),)
        queries, starts, used = cu_seq_q.tolist(), cu_seq_k.tolist(), seqused_k.tolist()
        assert queries[-1] == total and starts[-1] <= slots, "cumulative lengths end within the tensors"
        assert all(start + length <= end for start, length, end in zip(starts, used, starts[1:], strict=False))
        assert max(used) <= max_k and max(b - a for a, b in zip(queries, queries[1:], strict=False)) <= max_q
        self.read.append(sum(used) * kv_heads)
        self.widest.append(max_k)
        output = torch.empty_like(query)
        for first, last, start, length in zip(queries, queries[1:], starts, used, strict=False):
            output[first:last] = _one(
                query[first:last],
                key[start : start + length],
                value[start : start + length],
                scale,
                window_size == (-1, 0),
            )
        return output


def _one(query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool) -> Tensor:
    """query `[n, Hq, D]` of the newest of the sequence's keys `[L, Hkv, D]`."""
    new, length = len(query), len(key)
    assert not causal or new <= length
    seen = torch.ones(new, length, dtype=torch.bool, device=query.device)
    if causal:
        seen = seen.tril(length - new)
    query, key, value = (one.float().transpose(0, 1)[None] for one in (query, key, value))
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)


class BackToBack(Device):
    """A host that has such a kernel."""

    reads_heads_back_to_back = True


@contextmanager
def reading(dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Iterator[Kernel]:
    """The host's kernel, and that of any other device, reads heads back to back in these precisions."""
    kernel = Kernel(dtypes)
    assert [*inspect.signature(kernel).parameters] == [*inspect.signature(true).parameters]
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = kernel
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(devices.KINDS, cpu=BackToBack),
        mock.patch.object(varlen_layer, "DTYPES", dtypes),
    ):
        # `mock.patch.dict` would forget what is imported meanwhile.
        patch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        yield kernel
