"""What a layer holds of one sequence, counted from its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmkv_bench.compression.cache import CompressedLayer


@dataclass(frozen=True)
class LayerAccount:
    """Counted right after the reduction, before anything is fed [bytes].

    Attributes:
        entries, reachable: int64 `[Hkv]` on the CPU, see `CompressedLayer`.
        device, host: K and V; metadata: positions, scales, minima, mean keys.
        held: all tensors of the layer, wherever they are, slack and buffers included.
        padding: of these, what stands for no entry. read, moved: see `CompressedLayer.read_nbytes`, `moved_nbytes`; useful: of
            `read`, what is no padding.
    """

    entries: Tensor
    reachable: Tensor
    device: int
    metadata: int
    host: int
    held: int
    padding: int
    read: int
    moved: int
    useful: int


def account(layer: CompressedLayer, fed: int) -> LayerAccount:
    """Of a layer of one sequence, on which `fed` tokens of the prompt are still to be fed before the answer's first."""
    entries, (device, metadata) = layer.entries()[0], layer.nbytes()
    padding, read = layer.padding_nbytes(), layer.read_nbytes(fed)
    positions = layer.positions if padding else None
    empty = 0 if positions is None else (positions.numel() - int(entries.sum())) * positions.element_size()
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
        useful=read - (padding - empty),
    )


def by_itself(layer: CompressedLayer, row: int, width: int, slack: int) -> CompressedLayer:
    """One row of a layer without policy as it would be stored alone: a view, only to be counted.

    Args:
        width: entries of the row's longest head; slack: free slots that it would have.

    Raises:
        ValueError: the layer has fewer free slots.
    """
    if layer.stored + slack > layer.capacity:
        raise ValueError(f"{layer.capacity - layer.stored} free slots cannot show {slack}")
    return layer.view(row, slice(layer.stored - width, layer.stored + slack), width)
