"""`attention=flash_attention_2`: functions of the flash-attn package, called by this package's attention function.

The causal kernel takes no mask: the newest query belongs to a head's last slot, and each query sees the slots up to its
own, except padding on the left. So the logical mask of a forward only marks padding, `[B, 1, 1, seen]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from mmkv_bench import devices
from mmkv_bench.devices.requirements import FLASH, check_flash_attn
from mmkv_bench.errors import UnsupportedError

NAME = "mmkv_fa2"  # no "flash" in the name: transformers would look for such a kernel on the hub
DTYPES = ("bfloat16", "float16")
WIDEST_HEAD = 256


def check(attention: str | None, place: torch.device | str, dtype: torch.dtype | str, compiled: bool = False) -> None:
    """Raise an error for settings that flash-attn does not support. No effect for another attention implementation.

    Args:
        place, dtype: device and precision of the model.
        compiled: whether decode steps will be compiled.

    Raises:
        ConfigError: the package is not installed.
        UnsupportedError: no CUDA device, another precision, a compiled decode step.
    """
    if attention != FLASH:
        return
    kind, precision = torch.device(place).type, str(dtype).removeprefix("torch.")
    check_flash_attn()
    if not devices.at(place).runs_flash_attention:
        raise UnsupportedError(
            f"model.attention={FLASH} runs on a CUDA device, but the model is on {kind}; allowed on {kind}: sdpa, "
            "eager; choose model.attention=sdpa"
        )
    if precision not in DTYPES:
        raise UnsupportedError(
            f"model.attention={FLASH} cannot compute in {precision}; allowed: {', '.join(DTYPES)}; set model.dtype to one of "
            "them, or choose model.attention=sdpa"
        )
    if compiled:
        raise UnsupportedError(
            f"model.attention={FLASH} cannot be recorded as a graph, which decode=compiled needs; choose "
            "decode=eager, or model.attention=sdpa"
        )


def check_head(width: int) -> None:
    """Raise UnsupportedError for heads (`head_dim` channels) that flash-attn's kernels cannot read."""
    if width % 8 or width > WIDEST_HEAD:
        raise UnsupportedError(
            f"model.attention={FLASH} has no kernel for heads of {width} channels; allowed: multiples of 8 up to "
            f"{WIDEST_HEAD}; choose model.attention=sdpa"
        )


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """Return the attention mask of one forward for flash-attn; transformers calls it as a mask function.

    Args:
        attention_mask: bool `[B, seen]`, False where a token is padding.

    Returns:
        bool `[B|1, 1, 1, seen]`, False where a token is padding. None without padding, except when several tokens are fed
        to a cache that has entries.

    Raises:
        UnsupportedError: a mask that is not causal.
    """
    if mask_function is not causal_mask_function:
        raise UnsupportedError(
            f"this model needs a mask that is not only causal, which model.attention={FLASH} does not support; "
            "choose model.attention=sdpa"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        return attention_mask[:, None, None, :kv_length]
    if q_length in (1, kv_length):
        return None
    return torch.ones(1, 1, 1, kv_length, dtype=torch.bool, device=device)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend by flash-attn. Each query sees the slots up to its own, except padding on the left.

    Args:
        query: `[B, Hq, n, D]` of the n newest slots.
        key, value: `[B, Hkv, slots, D]`, read in place.
        mask: bool `[B|1, Hkv|1, 1, slots]`, False at the padding, which is on the left; None: no padding.

    Returns:
        Output `[B, n, Hq, D]`, and None for the weights.
    """
    from flash_attn import flash_attn_func, flash_attn_with_kvcache

    kernel_arguments = {"softmax_scale": scaling, "causal": True, "softcap": softcap or 0.0}
    batch, heads, new_tokens = query.shape[0], key.shape[1], query.shape[2]
    if mask is None:
        return flash_attn_func(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **kernel_arguments
        ), None
    padding = (~mask).sum(-1, dtype=torch.int32)[..., 0]  # [B|1, Hkv|1]
    padded_per_head = padding.shape[1] == heads > 1
    if padded_per_head:  # each head becomes a sequence: views, no copies
        query = query.unflatten(1, (heads, -1)).flatten(0, 1)
        key, value = key.flatten(0, 1)[:, None], value.flatten(0, 1)[:, None]
    padding = padding.expand(batch, -1).reshape(-1)
    output = flash_attn_with_kvcache(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        cache_seqlens=torch.full_like(padding, key.shape[2]),
        cache_leftpad=padding,
        **kernel_arguments,
    )
    if padded_per_head:
        output = output.unflatten(0, (batch, heads)).transpose(1, 2).reshape(batch, new_tokens, -1, output.shape[-1])
    return output, None
