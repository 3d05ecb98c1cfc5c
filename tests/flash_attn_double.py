"""A double of the flash-attn package (2.8): its signatures as documented, what its kernels refuse, and their numbers, by SDPA.

    with installed() as package:                    # as on a machine with flash-attn, whose kernels run on the CPU
        ... attention="flash_attention_2" ...
    package.calls                                   # what the kernels read

Causal masks are aligned with the newest query and key, and a query that sees nothing gives zero, as documented.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mmkv_bench import devices
from mmkv_bench.compression import flash
from mmkv_bench.devices import Device

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Call:
    """One call: queries of a sequence; slots that were read, of all sequences and KV heads."""

    new: int
    read: int


class Package(ModuleType):
    """`import flash_attn`. dtypes: those that its kernels take."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]):
        super().__init__("flash_attn")
        self.__spec__ = ModuleSpec("flash_attn", None)
        self.dtypes, self.calls = dtypes, []

    def flash_attn_func(
        self,
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        assert not dropout_p and window_size == (-1, -1) and alibi_slopes is None and not return_attn_probs
        start = torch.zeros(len(q), dtype=torch.int32, device=q.device)
        return self._attended(q, k, v, start, start + k.shape[1], softmax_scale, causal, softcap)

    def flash_attn_with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, block_table, alibi_slopes)
        assert all(one is None for one in unused) and window_size == (-1, -1) and not return_softmax_lse
        for counts in (cache_seqlens, cache_leftpad):
            assert counts.dtype == torch.int32 and counts.is_contiguous() and counts.shape == (len(q),)
            assert counts.device == q.device
        return self._attended(q, k_cache, v_cache, cache_leftpad, cache_seqlens, softmax_scale, causal, softcap)

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, scale: float, causal: bool, softcap: float
    ) -> Tensor:
        """q `[B, n, Hq, D]`; k, v `[B, S, Hkv, D]`, of which sequence b has the slots from start[b] to end[b]."""
        batch, new, heads, width = q.shape
        assert k.shape == v.shape and k.shape[0] == batch and k.shape[3] == width <= 256 and width % 8 == 0
        assert heads % k.shape[2] == 0 and q.dtype == k.dtype == v.dtype and q.dtype in self.dtypes
        assert all(one.stride(-1) == 1 for one in (q, k, v)) and q.device == k.device == v.device
        assert not softcap, "no supported family has it"
        self.calls.append(Call(new, int((end - start).sum()) * k.shape[2]))
        slots = torch.arange(k.shape[1], device=q.device)
        newest = end[:, None] - new + torch.arange(new, device=q.device) if causal else end[:, None] - 1
        seen = (slots >= start[:, None, None]) & (slots <= newest[..., None])
        q, k, v = (one.float().transpose(1, 2) for one in (q, k, v))
        output = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale, enable_gqa=True)
        return output.masked_fill(~seen.any(-1)[:, None, :, None], 0).transpose(1, 2).to(self.dtypes[0])


class WithFlash(Device):
    """A host that flash-attn has kernels for."""

    runs_flash_attention = True


@contextmanager
def installed(exact: bool = True) -> Iterator[Package]:
    """The package is there, and has kernels for the CPU; `exact`: of float32 alone, so that results are compared as numbers."""
    package = Package((torch.float32,) if exact else (torch.bfloat16,))
    names = ("float32",) if exact else flash.DTYPES
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(devices.KINDS, cpu=WithFlash),
        mock.patch.object(flash, "DTYPES", names),
    ):
        # `mock.patch.dict` would forget what is imported meanwhile.
        patch.setitem(sys.modules, "flash_attn", package)
        yield package
