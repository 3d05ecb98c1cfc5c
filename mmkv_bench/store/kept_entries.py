"""The kept entries of a row as text: `<layers>x<KV heads>x<tokens>:`, then one bit per layer, head and token, compressed by
zlib, in base64.

A head's bits follow the prompt's tokens in order, padded to whole bytes, the first token in the highest bit. For a merging
method the bits mark the entries that others were merged into. `digest` must equal `kept_digest` of the same row.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence

import numpy as np

from mmkv_bench.errors import StoreError


def packed(kept: Sequence[Sequence[np.ndarray]], tokens: int) -> str:
    """Return the kept entries as a text.

    kept: per layer and KV head the kept positions in the prompt, int [m].
    tokens: number of prompt tokens.
    """
    bits = np.zeros((len(kept), len(kept[0]), tokens), dtype=bool)
    for layer, heads in enumerate(kept):
        for head, places in enumerate(heads):
            bits[layer, head, places] = True
    data = zlib.compress(np.packbits(bits, axis=-1).tobytes(), 9)
    return f"{'x'.join(map(str, bits.shape))}:{base64.b64encode(data).decode()}"


def unpacked(text: str) -> np.ndarray:
    """Return the text as bool [layers, KV heads, tokens]. Raises StoreError for a text that `packed` did not write."""
    try:
        shape, _, data = text.partition(":")
        layers, heads, tokens = map(int, shape.split("x"))
        packed_bits = np.frombuffer(zlib.decompress(base64.b64decode(data, validate=True)), np.uint8)
        bits = np.unpackbits(packed_bits.reshape(layers, heads, -(-tokens // 8)), axis=-1, count=tokens)
    except (ValueError, zlib.error) as problem:
        raise StoreError(
            f"kept_indices {text[:40]!r} does not decode to kept entries ({problem}); see store/kept_entries.py"
        ) from None
    return bits.astype(bool)


def digest(bits: np.ndarray) -> str:
    """Return a digest (16 hex digits) of the kept positions of all layers and heads, computed as in `generation/result.py`."""
    running = hashlib.sha256()
    for head in bits.reshape(-1, bits.shape[-1]):
        running.update(np.flatnonzero(head).astype("<i4").tobytes() + b"|")
    return running.hexdigest()[:16]
