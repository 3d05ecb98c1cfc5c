"""Byte and entry counts of one layer for one sequence, counted from the layer's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmkv_bench.compression.cache import CompressedLayer
from mmkv_bench.compression.varlen_layer import VarlenLayer


@dataclass(frozen=True)
class LayerAccount:
    """Byte and entry counts of one layer right after the prompt was reduced, before any further token is fed."""

    entries: Tensor  # int64 [Hkv] on the CPU, see `CompressedLayer.entries`
    reachable: Tensor  # int64 [Hkv] on the CPU, see `CompressedLayer.reachable`
    device: int  # bytes of keys and values on the device
    metadata: int  # bytes of positions, scales, minima and mean keys
    host: int  # bytes of keys and values in host memory
    held: int  # bytes of all tensors, on the device and the host, free slots and buffers included
    padding: int  # bytes of `held` that store no entry
    read: int  # see `CompressedLayer.read_nbytes`
    moved: int  # see `CompressedLayer.moved_nbytes`
    useful: int  # `read` without padding


def account(layer: CompressedLayer, fed: int) -> LayerAccount:
    """Return the entry and byte counts of a layer that stores one sequence.

    fed: number of prompt tokens that are still to be fed.
    """
    entries, (device, metadata) = layer.entries()[0], layer.nbytes()
    padding, read = layer.padding_nbytes(), layer.read_nbytes(fed)
    positions = layer.positions if padding else None
    padding_position_bytes = (
        0 if positions is None else (positions.numel() - int(entries.sum())) * positions.element_size()
    )
    return LayerAccount(
        entries=entries,
        reachable=layer.reachable()[0],
        device=device,
        metadata=metadata,
        host=layer.host_nbytes(),
        held=sum(tensor.nbytes for tensor in layer.buffers()),
        padding=padding,
        read=read,
        moved=layer.moved_nbytes(),
        useful=read - (padding - padding_position_bytes),
    )


def accounts(layer: CompressedLayer, slack: int, fed: Sequence[int]) -> list[LayerAccount]:
    """Return the entry and byte counts of each row of a layer without a decode policy, as if the row were stored alone.

    Args:
        slack: number of free slots that a row would have if stored alone.
        fed: for each row, the number of prompt tokens that are still to be fed.

    Raises:
        ValueError: the layer has fewer free slots than `slack`.
    """
    if layer.stored + slack > layer.capacity:
        raise ValueError(f"the layer has {layer.capacity - layer.stored} free slots, fewer than slack={slack}")
    if isinstance(layer, VarlenLayer) and layer.folded:
        return [account(layer.single_row(row, slack), coming) for row, coming in enumerate(fed)]
    counted = layer.entries()
    widths, heads, slot = counted.amax(-1).tolist(), counted.shape[1], layer.slot_nbytes
    position_bytes = 0 if layer.positions is None else layer.positions.element_size()
    layer_accounts = []
    for entries, width, count, coming in zip(counted, widths, counted.sum(-1).tolist(), fed, strict=True):
        stored, padding_slots = heads * width, heads * width - count
        read = (stored + heads * (coming + 1)) * slot
        layer_accounts.append(
            LayerAccount(
                entries=entries,
                reachable=entries,
                device=stored * slot,
                metadata=stored * position_bytes,
                host=0,
                held=(stored + heads * slack) * (slot + position_bytes),
                padding=padding_slots * (slot + position_bytes),
                read=read,
                moved=0,
                useful=read - padding_slots * slot,
            )
        )
    return layer_accounts
