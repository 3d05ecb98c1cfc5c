"""Rules on which parts of a method make sense together.

Each rule has a sentence with what is refused, why, and what is allowed instead. Parts that no rule mentions can be combined
with all others: they interact only through scores, caps (entries per head) and indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmkv_bench.compression.allocators.compensation import Compensation
from mmkv_bench.compression.allocators.entropy import Entropy
from mmkv_bench.compression.allocators.head_pool import HeadPool
from mmkv_bench.compression.allocators.head_scores import HeadScores
from mmkv_bench.compression.allocators.hybrid import Hybrid
from mmkv_bench.compression.allocators.keep_all import KeepAll
from mmkv_bench.compression.allocators.positive import PositiveOnly
from mmkv_bench.compression.allocators.prefix import Prefix
from mmkv_bench.compression.allocators.safeguard import Safeguard
from mmkv_bench.compression.allocators.spectral import Spectral
from mmkv_bench.compression.allocators.threshold import Threshold
from mmkv_bench.compression.allocators.uniform_model import UniformModel
from mmkv_bench.compression.decoding.heavy_hitters import HeavyHitters
from mmkv_bench.compression.decoding.retrieval import ChunkRetrieval
from mmkv_bench.compression.decoding.sliding import Sliding
from mmkv_bench.compression.reducers.lookm_merge import LookMMerge
from mmkv_bench.compression.scorers.column_sums import ColumnSumScorer
from mmkv_bench.compression.scorers.deviation import DeviationScorer
from mmkv_bench.compression.scorers.mmshift import MMShiftScorer
from mmkv_bench.compression.scorers.text_prior import TextPriorScorer
from mmkv_bench.compression.selectors.modality_quota import ModalityQuota
from mmkv_bench.compression.selectors.one_set import OneSet
from mmkv_bench.compression.selectors.text_first import TextFirst
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.errors import CompatibilityError

if TYPE_CHECKING:
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.compression.scorers.base import Scorer
    from mmkv_bench.compression.selectors.base import Selector


def refuse(compressor: Compressor) -> None:
    """Raise CompatibilityError with the sentence of the first rule that the parts of a method break."""
    for objection in objections(compressor):
        raise CompatibilityError(f"{compressor.name}: {objection}")


def objections(c: Compressor) -> Iterator[str]:
    """Yield a sentence for each rule that the parts of a compressor break."""
    yield from _of_parts_without_effect(c)
    if c.scorer is not None:
        yield from _of_scores(c, c.scorer)
    yield from _of_different_values(c)
    yield from _of_decoding(c)
    yield from _of_retrieval(c)


def _name(part: object) -> str:
    return type(part).__name__


def _of_parts_without_effect(c: Compressor) -> Iterator[str]:
    if c.scorer is None and c.decoding is not None and not c.decoding.quantises:
        yield (
            f"without a scorer nothing is evicted, and the decode policy {_name(c.decoding)} does not quantise, "
            f"so this equals the full cache; allowed: a scorer with {_name(c.decoding)}, or the method full"
        )
    if c.scorer is None and c.reducer is not None and c.reducer.merges:
        yield (
            f"{_name(c.reducer)} merges evicted entries, but without a scorer none is evicted; allowed: the "
            "reducer Evict"
        )
    if c.scorer is not None and isinstance(c.allocator, KeepAll):
        yield (
            f"KeepAll keeps every entry, so the scores of {_name(c.scorer)} and the budget would have no effect; "
            "allowed: an allocator that divides the budget, such as Uniform, or no scorer"
        )
    for part in (c.allocator, c.selector):
        if part is not None and part.exceeds and not part.printed and c.reading != "released":
            yield (
                f"{part} may keep more than the budget, as a released code does; allowed: the paper's parameters, or "
                "reading=released"
            )
            break


def _of_scores(c: Compressor, scorer: Scorer) -> Iterator[str]:
    allocator, selector, reducer = c.allocator, c.selector, c.reducer
    if isinstance(allocator, HeadPool | Safeguard | Threshold) and not scorer.comparable:
        yield (
            f"{_name(allocator)} gives entries to the heads with the larger scores, but those of {_name(scorer)} "
            "do not tell heads apart; allowed: scorers of attention, votes or keys, or the allocator Uniform"
        )
    sum_rule = None
    if isinstance(allocator, HeadPool) and allocator.normalize:
        sum_rule = "HeadPool with normalize=true compares sums of scores", "normalize=false, or a scorer of attention"
    elif isinstance(allocator, Prefix) and allocator.mode == "online":
        sum_rule = "Prefix with mode=online adds scores up", "mode=offline, or a scorer of attention"
    elif isinstance(selector, ModalityQuota):
        sum_rule = "ModalityQuota divides entries by sums of scores", "a scorer of attention, or the selector TopK"
    if scorer.negative and sum_rule is not None:
        yield f"{sum_rule[0]}, but {_name(scorer)} gives negative scores; allowed: {sum_rule[1]}"
    if isinstance(allocator, PositiveOnly) and selector is not None and _protects(selector):
        yield (
            f"PositiveOnly grants entries for positive scores only, but {_name(selector)} protects tokens "
            "whatever their score, and these would take the entries; allowed: a selector that protects nothing, "
            "such as TopK with sinks=0 recents=0 window=0, or the allocator Uniform"
        )
    if isinstance(selector, OneSet) and not isinstance(allocator, UniformModel):
        yield (
            f"OneSet keeps the same tokens in all layers, but {_name(allocator)} decides layer by layer or grants "
            "layers different numbers; allowed: the allocator UniformModel"
        )
    # LOOK-M's released filter counts evicted tokens by their place in a list, one list for all heads.
    misaligned = isinstance(reducer, LookMMerge) and reducer.sources == "misaligned"
    uneven = isinstance(allocator, HeadPool | HeadScores | Hybrid | PositiveOnly | Safeguard | Threshold)
    if misaligned and uneven and getattr(reducer, "merge", None) in ("average", "weighted"):
        yield (
            "LookMMerge with sources=misaligned compares evicted tokens over heads, so every head has to evict "
            f"the same number, but {_name(allocator)} grants heads of a layer different numbers; allowed: an "
            "allocator with equal caps in all heads of a layer, or sources=aligned"
        )


def _protects(selector: Selector) -> bool:
    """Tell whether a selector keeps some tokens independently of their scores; for `TopK` without importing torch."""
    if type(selector) is TopK:
        return bool(selector.sinks or selector.recents or selector.window)
    return bool(selector.protected(8, 4, None).any())


def _of_different_values(c: Compressor) -> Iterator[str]:
    kept_window = getattr(c.selector, "window", 0)
    for part in (c.allocator, c.scorer):
        window = getattr(part, "window", 0)
        if kept_window and window and window != kept_window:
            yield (
                f"{_name(part)} has a window of {window} tokens, but {_name(c.selector)} keeps one of "
                f"{kept_window}; allowed: the same window in both, or a selector without a window (window=0)"
            )
            break
    proxies = getattr(c.scorer, "proxies", None)
    if isinstance(c.allocator, Compensation) and proxies not in (None, c.allocator.proxies):
        yield (
            f"Compensation counts what {c.allocator.proxies} proxy queries need, but {_name(c.scorer)} scores "
            f"with {proxies}; allowed: the same number of proxies in both"
        )
    if isinstance(c.allocator, Spectral) and c.allocator.dba and isinstance(c.scorer, DeviationScorer):
        scorer_values, allocator_values = ((part.gamma, part.keys) for part in (c.scorer, c.allocator))
        if scorer_values != allocator_values:
            yield (
                f"DeviationScorer filters with gamma={scorer_values[0]} keys={scorer_values[1]}, but Spectral with "
                f"gamma={allocator_values[0]} keys={allocator_values[1]}; allowed: the same filter in both"
            )


def _of_decoding(c: Compressor) -> Iterator[str]:
    decoding = c.decoding
    if isinstance(decoding, HeavyHitters):  # H2O goes on with the prompt's sums of attention, in the same unit
        share = getattr(c.selector, "share", None)
        if not (
            isinstance(c.scorer, ColumnSumScorer) or (isinstance(c.scorer, TextPriorScorer) and not c.scorer.prior)
        ):
            yield (
                "HeavyHitters adds each step's attention to the attention from the prompt, but the scores of "
                f"{_name(c.scorer)} have another unit; allowed: ColumnSumScorer"
            )
        elif share != decoding.share:
            yield (
                f"HeavyHitters keeps a share of {decoding.share} as recents, but {_name(c.selector)} "
                f"{'none' if share is None else f'a share of {share}'}; allowed: RecentShare with the same share"
            )
    sinks = getattr(c.selector, "sinks", None)
    if c.scorer is not None and isinstance(decoding, Sliding) and sinks != decoding.sinks:
        yield (
            f"Sliding never evicts the first {decoding.sinks} entries, but {_name(c.selector)} keeps {sinks or 0} "
            "sinks, so other tokens would be protected in their place; allowed: the same number of sinks in both"
        )


def _of_retrieval(c: Compressor) -> Iterator[str]:
    """Yield a sentence for each broken rule about policies that read evicted entries again."""
    retrieval_policy = c.decoding if isinstance(c.decoding, ChunkRetrieval) else None
    hybrid_allocator = (
        c.allocator if isinstance(c.allocator, Hybrid) and c.allocator.heads.classes != "static" else None
    )
    if c.decoding is not None and c.decoding.retrieves and c.reducer is not None and c.reducer.merges:
        yield (
            f"{_name(c.decoding)} can read every entry of the prompt again, but {_name(c.reducer)} has merged the "
            "evicted ones into others, so they would count twice; allowed: the reducer Evict"
        )
    elif (retrieval_policy is None) != (hybrid_allocator is None):
        yield (
            "Hybrid decides which heads are dynamic and ChunkRetrieval serves those heads; one without the other "
            "leaves heads without entries; allowed: both, or neither"
        )
    elif retrieval_policy is None or hybrid_allocator is None:
        return
    elif retrieval_policy.heads != hybrid_allocator.heads:
        yield "Hybrid and ChunkRetrieval define dynamic heads differently; allowed: the same `heads` in both"
    elif retrieval_policy.chunk != hybrid_allocator.chunk:
        yield (
            f"Hybrid counts chunks of {hybrid_allocator.chunk} tokens, but ChunkRetrieval reads chunks of "
            f"{retrieval_policy.chunk}; allowed: the same chunk size in both"
        )


def visual_parts(compressor: Compressor) -> list[str]:
    """Return the class names of the parts that treat visual tokens and text differently, and so do not suit a text model."""
    parts = (compressor.scorer, compressor.allocator, compressor.selector)
    visual = [part for part in parts if part is not None and part.needs_visual]
    scorer, allocator, selector = parts
    visual += [scorer] if isinstance(scorer, TextPriorScorer) and scorer.prior else []
    visual += [scorer] if isinstance(scorer, MMShiftScorer) and scorer.modality in ("text", "separate") else []
    visual += (
        [allocator] if isinstance(allocator, Entropy) and allocator.dynamic and allocator.entropy != "full" else []
    )
    visual += [selector] if isinstance(selector, ModalityQuota | TextFirst) else []
    return [_name(part) for part in visual]
