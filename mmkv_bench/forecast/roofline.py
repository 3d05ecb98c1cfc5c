"""What hardware allows a model, by arithmetic from its shape: bytes and operations of a decode step and of a prefill, the
roofline's time, and how near a measured time is to it. Standard library only.

A decode step reads every weight of the text model that takes part in it once for the whole batch, and the keys and values
of each sequence once. The vision tower takes no part in it, nor does an embedding table that is not tied to the head: of it
one row per token is read. What kernels read twice, write, or pad is their own affair: it is no useful byte.

Units: bytes, seconds, operations (one multiplication and one addition are two); bandwidths in bytes per second, rates in
operations per second; milliseconds where a name says so.
"""

from __future__ import annotations

from mmkv_bench.models.sizes import Decoder

MS = 1000.0


def step_bytes(weights: float, kv: float, batch: int = 1) -> float:
    """Useful bytes of one decode step.

    Args:
        weights: bytes of `Decoder.read` parameters; kv: bytes of keys and values of ONE sequence; batch: sequences.
    """
    return weights + batch * kv


def step_operations(decoder: Decoder, entries: float, batch: int = 1) -> float:
    """Operations of one decode step: its matrices and the head, and two products with each stored entry.

    entries: per KV head and layer, the mean over them, of one sequence.
    """
    products = 2 * (decoder.layers * decoder.matrices + decoder.table)
    return batch * (products + 4 * decoder.layers * decoder.query_heads * decoder.head_dim * entries)


def prefill_operations(decoder: Decoder, tokens: int) -> float:
    """Operations of the text model over a prompt of `tokens`, causal, with the logits of the last token alone. The vision
    tower's are not among them."""
    attention = 2 * decoder.query_heads * decoder.head_dim * tokens * (tokens + 1)
    return decoder.layers * (2 * decoder.matrices * tokens + attention) + 2 * decoder.table


def roofline_ms(nbytes: float, bandwidth: float, operations: float = 0.0, rate: float | None = None) -> float:
    """The least milliseconds of a step that reads `nbytes` at `bandwidth` (bytes/s) and, where `rate` (operations/s) is
    known, computes `operations` meanwhile."""
    return MS * max(nbytes / bandwidth, operations / rate if rate else 0.0)


def speed_up_allowed(weights: float, kv_full: float, kv_kept: float, batch: int = 1) -> float:
    """How many times faster a step with `kv_kept` bytes per sequence can be than one with `kv_full`, where reading is all
    that takes time: what no method at this budget can exceed at this batch."""
    return step_bytes(weights, kv_full, batch) / step_bytes(weights, kv_kept, batch)


def mbu(useful_bytes: float, seconds: float, bandwidth: float) -> float:
    """Model bandwidth utilisation: useful bytes per second over `bandwidth` (bytes/s, read-only), 1 at the limit."""
    return useful_bytes / seconds / bandwidth


def mfu(operations: float, seconds: float, rate: float) -> float:
    """Model FLOPs utilisation: operations per second over `rate` (operations/s, of a large product), 1 at the limit."""
    return operations / seconds / rate
