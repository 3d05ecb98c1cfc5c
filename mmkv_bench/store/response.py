"""The columns of a `responses` row that generation fills. Each column is declared in this file only.

A new column needs a field with default, meaning and unit. It must be nullable, because older rows lack it. The schema,
`docs/rows.md`, and the code that makes and checks rows read the fields.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from mmkv_bench.errors import StoreError

STATUSES = ("ok", "oom", "timeout", "nan", "error")


def _column(
    doc: str, default: Any = None, *, unit: str = "", required: str = "no", counted: bool = False, **more: Any
) -> Any:
    """Declare a field of `Response` with its column's attributes (see `schema.SchemaColumn` and `COUNTED`)."""
    metadata = {"doc": doc, "unit": unit, "required": required, "counted": counted, **more}
    if default is list:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


_required_if_ok = partial(_column, required="ok")
_always_required = partial(_column, required="always")
_tokens = partial(_column, unit="tokens", counted=True)
_entries = partial(_column, unit="entries", counted=True)
_bytes = partial(_column, unit="bytes", counted=True)
_seconds = partial(_column, unit="seconds")


@dataclass
class Response:
    """The answer of one cell to one sample, with one field per column of `responses` that generation fills."""

    cell: str = _always_required("hash of the cell: model, data, prompt, method, budget, protocol, seed, numerics", "")
    status: str = _always_required("status of generation; only ok rows have an answer", "ok", allowed=STATUSES)
    error: str | None = _column("message of the failure; null if ok, and only then")
    fallback: list[str] = _column(
        "reasons why less was done than configured, see Fallbacks; may be empty", list, required="always"
    )
    answer: str | None = _required_if_ok("decoded answer; null unless ok")
    token_ids: list[int] = _column(
        "generated token ids, with the end token when it was generated", list, unit="token ids", required="ok"
    )
    n_tokens: int = _required_if_ok("generated tokens", 0, unit="tokens")
    tokens_from_compressed: int = _tokens(
        "generated tokens that were decoded from the compressed cache", 0, required="ok"
    )
    finish_reason: str | None = _required_if_ok("reason why decoding stopped", allowed=("eos", "stop", "length"))
    prompt_tokens: int = _tokens("tokens of the whole prompt", 0, required="ok")
    context_tokens: int = _tokens("tokens the budget applies to (T): the prompt, or its context", 0, required="ok")
    visual_tokens: int = _tokens("image and video tokens of the prompt", 0, required="ok")
    question_text_before_cut: int = _tokens("protocols that cut the prompt: non-template text tokens before the cut", 0)
    budget_entries: int | None = _column("C, planned entries per KV head (average); null for full", unit="entries")
    entries_asked: int | None = _column("C x layers x KV heads; null for full", unit="entries")
    entries_planned: int = _entries(
        "entries selected to be kept, the re-fed token of strict included, summed over layers and KV heads", 0
    )
    entries_resident: int = _entries("entries counted in the stored tensors after compression", 0, required="ok")
    entries_reachable: int = _entries(
        "entries a decode step may read, those on the host included; methods that evict after a token has attended read "
        "that token's own on top",
        0,
    )
    entries_appended: int = _entries(
        "entries of prompt tokens fed after compression and counted apart (the question)", 0
    )
    entries_end: int = _entries(
        "entries after the last token: counted in the stored tensors (own, and methods that act while decoding), or "
        "resident plus appended plus decoded (group)",
        0,
    )
    kept: list[list[int]] = _column("entries after compression, [layer][KV head]", list, unit="entries", required="ok")
    kept_digest: str | None = _required_if_ok(
        "first 16 hex digits of the sha256 of the kept indices; slim rows: of a seeded tenth"
    )
    kept_indices: str | None = _column(
        "keep=indices: places in the prompt of the kept entries, by layer and KV head, packed (`store/response.py`)"
    )
    bytes_device: int = _bytes(
        "bytes of K and V kept where the model computes, after compression: padding to a layer's longest head is "
        "included, slots for tokens to come are not",
        0,
    )
    bytes_host: int = _bytes("bytes of K and V on the host after compression, staging buffers included", 0)
    bytes_metadata: int = _bytes("bytes of positions, scales, minima, mean keys of chunks", 0)
    bytes_full: int = _bytes("bytes of the full K and V of the context_tokens", 0)
    bytes_held: int | None = _bytes(
        "bytes of all tensors that the cell's cache holds on device and host when the answer begins to be decoded, as if "
        "it were decoded by itself: entries, metadata, padding, slots reserved for what is still fed, and the buffers of "
        "decode policies; null in older rows"
    )
    bytes_padding: int | None = _bytes(
        "those of bytes_held that stand for no entry because heads of a layer are padded to its longest, or chunks to "
        "their size; null in older rows"
    )
    bytes_read_step: int | None = _bytes(
        "bytes of stored K and V, padding, scales, minima and mean keys included, that attention reads when the answer's "
        "first fed token is decoded, that token's own included: C + 1 entries per head and the question; null in older rows"
    )
    bytes_moved_step: int | None = _bytes(
        "bytes of K and V that a decode step copies from host memory to where the model computes; null in older rows"
    )
    bytes_state: int | None = _bytes(
        "bytes of sliding windows and of recurrent and convolution states at the end of the prefill, in layers that are not "
        "compressed: part of bytes_held and bytes_read_step alone; 0 where every layer is compressed; null in older rows"
    )
    window_effective: int | None = _column("observation window used, if the budget shortened it", unit="tokens")
    encode_s: float | None = _seconds("time of the processor (images and text to tensors)")
    vision_s: float | None = _seconds("time of the vision tower; contained in prefill_s")
    prefill_s: float | None = _seconds("time of the prompt's forward pass")
    compress_s: float | None = _seconds("time of scoring, allocation, selection and reduction")
    decode_s: float | None = _seconds("time of all decode steps")
    ttft_s: float | None = _seconds("time to first token; null when not measured")
    tpot_s: float | None = _seconds("time per output token after the first; null when not measured")
    peak_device_bytes: int | None = _column("peak device memory (CUDA); null on CPU", unit="bytes")
    peak_resident_bytes: int | None = _column("peak resident set of the process (CPU); null on CUDA", unit="bytes")
    measured: str = _always_required(
        "owner of the times and peaks: the fork group, or the cell alone", "group", allowed=("group", "own")
    )
    forced_kl: list[float] | None = _column(
        "fidelity: KL(full || this cell) at each token of full's greedy answer (same protocol; of a continuation the "
        "reference's), teacher-forced; under paper the first is 0, being the full prefill's; full's own: a second pass; "
        "null: unmeasured",
        unit="nats",
    )
    forced_agree: list[bool] | None = _column(
        "fidelity: at each of these tokens, whether full and this cell rank the same token first"
    )
    reference_nll: list[float] | None = _column(
        "-log probability of each token of the dataset's reference answer, teacher-forced; the end token is left out",
        unit="nats",
    )
    reference_samples: list[str] | None = _column(
        "(full) answers sampled at temperature 0.2 with stored seeds: the reference of rouge_l_sampled, and a second sample"
    )
    fork_group: str | None = _column("forks with the same value shared one prefill")
    fork_batch: int | None = _column("rows per decode batch that were requested", unit="rows")
    fork_rows: int | None = _column("rows of the batch this fork decoded in", unit="rows")
    question_number: int | None = _column(
        "number of the question among those about its document, from 0; null if the dataset has no such groups"
    )
    question_known: str | None = _column(
        "what a compression for several questions knew: numbers of questions of the document, or `none`, `generic`, "
        "`paraphrase`; under `turns` those asked so far, in their order; null under other protocols"
    )
    compression_reused: bool | None = _column(
        "prefill, scores and selection, and with them their times, are those that an earlier question of the document made; "
        "null under other protocols"
    )
    entries_max: int | None = _entries(
        "protocol=stream and turns: most entries of a KV head after an eviction, over chunks, or turns so far, and layers; null "
        "elsewhere"
    )
    entries_peak: int | None = _entries(
        "protocol=stream and turns: most entries of a KV head before an eviction, at most the cap and a chunk or turn; null "
        "elsewhere"
    )
    eviction_rounds: int | None = _column(
        "protocol=stream and turns: chunks or turns after which entries were evicted; null elsewhere",
        unit="chunks",
        counted=True,
    )
    entries_evicted: int | None = _entries(
        "protocol=stream and turns: entries that were evicted after them, summed over layers and KV heads; null elsewhere"
    )
    frames_left: str | None = _column(
        "protocol=stream: frames of which some KV head of some layer holds an entry when the question comes, numbered from 0 "
        "in the order in which the model reads them: `0-3,8-9`; null elsewhere and for a text"
    )
    ask_at: float | None = _column(
        "protocol=stream: share of the stream after which the question was asked, in whole chunks (`context_tokens` are read); "
        "null elsewhere and in older rows"
    )


COUNTED = tuple(one.name for one in fields(Response) if one.metadata["counted"])
"""Columns that count what was fed and stored. They are null in a row that failed before counting."""


# The column `kept_indices`


def pack_kept(kept: Sequence[Sequence[np.ndarray]], tokens: int) -> str:
    """Return the kept cache entries of one answer as text.

    The text is `<layers>x<KV heads>x<tokens>:`, then one bit per layer, head and token, compressed by zlib, in base64.
    Each head's bits are padded to whole bytes, the first token in the highest bit. For a merging method, bits mark the
    entries into which others were merged.

    kept: per layer and KV head, the kept positions in the prompt, int [m].
    tokens: number of prompt tokens.
    """
    kept_mask = np.zeros((len(kept), len(kept[0]), tokens), dtype=bool)
    for layer, heads in enumerate(kept):
        for head, places in enumerate(heads):
            kept_mask[layer, head, places] = True
    compressed_bits = zlib.compress(np.packbits(kept_mask, axis=-1).tobytes(), 9)
    return f"{'x'.join(map(str, kept_mask.shape))}:{base64.b64encode(compressed_bits).decode()}"


def unpack_kept(text: str) -> np.ndarray:
    """Convert the text of `pack_kept` to a mask, bool [layers, KV heads, tokens]. Raises StoreError for other text."""
    try:
        shape, _, encoded_bits = text.partition(":")
        layers, heads, tokens = map(int, shape.split("x"))
        packed_bits = np.frombuffer(zlib.decompress(base64.b64decode(encoded_bits, validate=True)), np.uint8)
        kept_mask = np.unpackbits(packed_bits.reshape(layers, heads, -(-tokens // 8)), axis=-1, count=tokens)
    except (ValueError, zlib.error) as problem:
        raise StoreError(
            f"kept_indices {text[:40]!r} does not decode to kept entries ({problem}); see store/response.py"
        ) from None
    return kept_mask.astype(bool)


def digest_of_kept(bits: np.ndarray) -> str:
    """Return the `kept_digest` of a mask of kept entries, bool [layers, KV heads, tokens]."""
    sha256 = hashlib.sha256()
    for head in bits.reshape(-1, bits.shape[-1]):
        sha256.update(np.flatnonzero(head).astype("<i4").tobytes() + b"|")
    return sha256.hexdigest()[:16]
