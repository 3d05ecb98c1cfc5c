"""Join caches of single sequences: a batch whose sequences were prefilled and compressed one by one."""

from __future__ import annotations

from collections.abc import Sequence

from mmkv_bench.compression.cache import CompressedCache, CompressedLayer
from mmkv_bench.compression.decoding.rows import RowsLayer
from mmkv_bench.compression.folded import FoldedLayer


def join(caches: Sequence[CompressedCache], reserve: int) -> CompressedCache:
    """Return one cache with a row for each of several caches of one sequence, which are empty afterwards.

    Layer by layer, so that never more than one layer is held twice. Where lengths differ, shorter heads are padded on the
    left, or stand back to back where a device reads them so; layers with a decode policy's state stay as they are, side by side.

    Args:
        caches: all of them have been shown as many tokens; reserve: slots that will be appended (a policy's layer has its
            own).
    """
    layers = []
    while caches[0].layers:
        rows = [cache.layers.pop(0) for cache in caches]
        layers.append(_joined(rows, reserve))
    return CompressedCache.of(layers)


def _joined(rows: Sequence[CompressedLayer], reserve: int) -> CompressedLayer:
    seen = {row.seen for row in rows}
    assert len(seen) == 1, f"sequences of one batch have been shown the same number of tokens, not {sorted(seen)}"
    kind = type(rows[0])
    if kind not in (CompressedLayer, FoldedLayer):
        return RowsLayer(rows)
    whole = all(row.positions is None for row in rows)
    held = [(row.keys[0], row.values[0], None if whole else row.slot_positions()[0]) for row in rows]
    return kind.from_rows(held, rows[0].seen, reserve)
