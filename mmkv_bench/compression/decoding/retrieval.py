"""Chunk retrieval: dynamic heads keep all entries in host memory and fetch the chunks that a step needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mmkv_bench.compression.allocators.hybrid import HeadClasses
from mmkv_bench.compression.decoding.base import DecodePolicy, Start
from mmkv_bench.compression.parameter_checks import check_least, check_words
from mmkv_bench.errors import UnsupportedError

if TYPE_CHECKING:
    from mmkv_bench.compression.decoding.retrieval_layer import RetrievalLayer


@dataclass(frozen=True)
class ChunkRetrieval(DecodePolicy):
    """HybridKV's dynamic heads (section 3.3, appendix A, figure 6): nothing is deleted, chunks are read on demand.

    After the prefill the n candidates of a dynamic head go to host memory in chunks; the mean key of each chunk stays
    on the device. Each step fetches the chunks with the largest ``q . mean key`` (q averaged over the g query heads),
    as many as the head's granted entries can hold. They are attended to together with all later tokens. Keys carry the
    rotation of their own positions. The selector's choice for a dynamic head fills the head's buffer until the first
    step, and otherwise only says how many entries the head may read.

    Args:
        heads: which heads are dynamic, as in the allocator.
        chunk: tokens per chunk. A head that may read fewer entries than this has chunks of as many tokens as it may
            read.
        partial: the prompt's last, incomplete chunk is "ranked" like any other, by the mean of its tokens, or always
            "visible" as one of the head's chunks.

    A step is one forward pass, also if it feeds several tokens (the question of ``query_agnostic``): one choice by
    their mean query. No code was released. Open in the paper and chosen here: incomplete chunks, several query tokens,
    and query heads that share a KV head.
    """

    heads: HeadClasses = field(default_factory=HeadClasses)
    chunk: int = 8
    partial: Literal["ranked", "visible"] = "ranked"

    retrieves = True

    @property
    def idle(self) -> bool:
        return self.heads.classes == "static"

    def __post_init__(self) -> None:
        check_words(self)
        check_least(self, 1, "tokens", "chunk")

    def layer(self, start: Start) -> RetrievalLayer:
        from mmkv_bench.compression.decoding.retrieval_layer import Pages, RetrievalLayer

        layer = RetrievalLayer.from_rows(
            [(start.kept_key, start.kept_value, start.positions)], start.seen, start.reserve
        )
        heads = self.heads.dynamic(start.context.summaries)[start.layer].nonzero().flatten().to(start.key.device)
        granted = (start.index[heads] >= 0).sum(-1)
        width, candidates = int(granted.max()) if len(heads) else 0, start.key.shape[1]
        if not width:  # no dynamic heads, or none with entries to read
            return layer
        if width != int(granted.min()):
            raise UnsupportedError(
                "the dynamic heads of a layer were granted different numbers of entries; use the hybrid allocator"
            )
        chunk = min(self.chunk, width)
        slots = -(-candidates // chunk) if width >= candidates else width // chunk
        pages = Pages(start.key[heads], start.value[heads], chunk, slots)
        layer.offload(heads, pages, width, start.pad, self.partial == "visible" and bool(candidates % chunk))
        return layer
