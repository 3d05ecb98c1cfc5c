"""Rules on which parts of a method make sense together.

A rule is named by what it refuses. It looks at the built parts of one method and returns an objection (what is refused, why, and
what is allowed instead) or None. Parts that no rule names go with all others: they meet through scores, caps and indices alone.
"""

from __future__ import annotations

from collections.abc import Callable
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
    from mmkv_bench.compression.selectors.base import Selector

Rule = Callable[["Compressor"], str | None]


def refuse(compressor: Compressor) -> None:
    """Raise CompatibilityError with the first objection of a rule."""
    for rule in RULES:
        objection = rule(compressor)
        if objection is not None:
            raise CompatibilityError(f"{compressor.name}: {objection}")


def _name(part: object) -> str:
    return type(part).__name__


def nothing_to_do(c: Compressor) -> str | None:
    if c.scorer is None and c.decoding is not None and not c.decoding.quantises:
        return (
            f"nothing is evicted without a scorer, and the decode policy {_name(c.decoding)} does not quantise: that is "
            "the full cache; allowed: a scorer beside it, or the method full"
        )
    return None


def nothing_to_merge(c: Compressor) -> str | None:
    if c.scorer is None and c.reducer is not None and c.reducer.merges:
        return f"{_name(c.reducer)} merges evicted entries and without a scorer none is evicted; allowed: Evict"
    return None


def budget_without_effect(c: Compressor) -> str | None:
    if c.scorer is not None and isinstance(c.allocator, KeepAll):
        return (
            f"KeepAll keeps every entry, and the scores of {_name(c.scorer)} and the budget would decide nothing; allowed: "
            "an allocator that divides the budget, such as Uniform, or no scorer"
        )
    return None


def excess_outside_released(c: Compressor) -> str | None:
    for part in (c.allocator, c.selector):
        if part is not None and part.exceeds and not part.printed and c.reading != "released":
            return (
                f"{part} may keep more than the budget, as a released code does; allowed: the paper's parameters, or "
                "reading=released"
            )
    return None


def incomparable_heads(c: Compressor) -> str | None:
    if c.scorer is not None and isinstance(c.allocator, HeadPool | Safeguard) and not c.scorer.comparable:
        return (
            f"{_name(c.allocator)} gives entries to the heads with the larger scores, and those of {_name(c.scorer)} do not "
            "tell heads apart; allowed: scorers of attention, votes or keys, or the allocator Uniform"
        )
    return None


def sums_of_negative_scores(c: Compressor) -> str | None:
    if c.scorer is None or not c.scorer.negative:
        return None
    if isinstance(c.allocator, HeadPool) and c.allocator.normalize:
        return (
            f"HeadPool with normalize=true compares sums of scores, and {_name(c.scorer)} gives negative ones; allowed: "
            "normalize=false, or a scorer of attention"
        )
    if isinstance(c.allocator, Prefix) and c.allocator.mode == "online":
        return (
            f"Prefix with mode=online adds scores up, and {_name(c.scorer)} gives negative ones; allowed: mode=offline, or "
            "a scorer of attention"
        )
    if isinstance(c.selector, ModalityQuota):
        return (
            f"ModalityQuota divides entries by sums of scores, and {_name(c.scorer)} gives negative ones; allowed: a "
            "scorer of attention, or the selector TopK"
        )
    return None


def protected_worthless_tokens(c: Compressor) -> str | None:
    if isinstance(c.allocator, PositiveOnly) and c.selector is not None and _protects(c.selector):
        return (
            f"PositiveOnly grants entries for positive scores alone, and {_name(c.selector)} protects tokens whatever "
            "their score, which would take the place of these; allowed: a selector that protects nothing, such as TopK "
            "with sinks=0 recents=0 window=0, or the allocator Uniform"
        )
    return None


def _protects(selector: Selector) -> bool:
    """Return True where tokens stay whatever their score; for `TopK` its parameters tell, without torch."""
    if type(selector) is TopK:
        return bool(selector.sinks or selector.recents or selector.window)
    return bool(selector.protected(8, 4, None).any())


def different_windows(c: Compressor) -> str | None:
    """Scorer, allocator and selector with an observation window have the same one."""
    kept = getattr(c.selector, "window", 0)
    for part in (c.allocator, c.scorer):
        window = getattr(part, "window", 0)
        if kept and window and window != kept:
            return (
                f"{_name(part)} takes a window of {window} tokens and {_name(c.selector)} keeps one of {kept}; allowed: "
                "the same in both, or a selector without a window (window=0)"
            )
    return None


def one_set_of_uneven_caps(c: Compressor) -> str | None:
    if isinstance(c.selector, OneSet) and not isinstance(c.allocator, UniformModel):
        return (
            f"OneSet keeps the same tokens in all layers, and {_name(c.allocator)} decides layer by layer or grants them "
            "different numbers; allowed: the allocator UniformModel"
        )
    return None


def different_proxies(c: Compressor) -> str | None:
    proxies = getattr(c.scorer, "proxies", None)
    if isinstance(c.allocator, Compensation) and proxies not in (None, c.allocator.proxies):
        return (
            f"Compensation counts what {c.allocator.proxies} proxy queries need and {_name(c.scorer)} scores with "
            f"{proxies}; allowed: the same number in both"
        )
    return None


def different_filters(c: Compressor) -> str | None:
    if not (isinstance(c.allocator, Spectral) and c.allocator.dba and isinstance(c.scorer, DeviationScorer)):
        return None
    ours, theirs = ((part.gamma, part.keys) for part in (c.scorer, c.allocator))
    if ours != theirs:
        return (
            f"DeviationScorer filters with gamma={ours[0]} keys={ours[1]} and Spectral with gamma={theirs[0]} "
            f"keys={theirs[1]}; allowed: the same filter in both"
        )
    return None


def uneven_eviction_merged(c: Compressor) -> str | None:
    """LOOK-M's released filter counts evicted tokens by their place in a list, one list for all heads."""
    if c.scorer is None or not isinstance(c.reducer, LookMMerge) or c.reducer.sources != "misaligned":
        return None
    if c.reducer.merge not in ("average", "weighted"):
        return None
    if not isinstance(c.allocator, HeadPool | HeadScores | Hybrid | PositiveOnly | Safeguard):
        return None
    return (
        f"LookMMerge with sources=misaligned compares evicted tokens over heads, which have to evict as many, and "
        f"{_name(c.allocator)} grants heads of a layer different numbers; allowed: an allocator with equal caps in all heads "
        "of a layer, or sources=aligned"
    )


def other_unit_of_attention(c: Compressor) -> str | None:
    """H2O's decode-time eviction goes on with the prompt's sums, in the same unit."""
    if not isinstance(c.decoding, HeavyHitters):
        return None
    sums = isinstance(c.scorer, ColumnSumScorer) or (isinstance(c.scorer, TextPriorScorer) and not c.scorer.prior)
    if not sums:
        return (
            f"HeavyHitters adds each step's attention to the attention that the prompt gathered, and the scores of "
            f"{_name(c.scorer)} are something else; allowed: ColumnSumScorer"
        )
    share = getattr(c.selector, "share", None)
    if share != c.decoding.share:
        held = "none" if share is None else f"a share of {share}"
        return (
            f"HeavyHitters keeps a share of {c.decoding.share} as recents and {_name(c.selector)} {held}; allowed: "
            "RecentShare with the same share"
        )
    return None


def different_sinks(c: Compressor) -> str | None:
    if c.scorer is None or not isinstance(c.decoding, Sliding):
        return None
    if getattr(c.selector, "sinks", None) != c.decoding.sinks:
        return (
            f"Sliding never evicts the first {c.decoding.sinks} entries, and {_name(c.selector)} keeps "
            f"{getattr(c.selector, 'sinks', 0)} sinks, so that other tokens would stand in their place; allowed: the same "
            "number in both"
        )
    return None


def retrieval_without_its_heads(c: Compressor) -> str | None:
    """HybridKV's retrieval goes with HybridKV's head classes; what is merged into an entry must not be read again."""

    retrieves = c.decoding is not None and c.decoding.retrieves
    if retrieves and c.reducer is not None and c.reducer.merges:
        return (
            f"{_name(c.decoding)} can read every entry of the prompt again, and {_name(c.reducer)} has merged the evicted "
            "ones into others: they would count twice; allowed: Evict"
        )
    fetching = c.decoding if isinstance(c.decoding, ChunkRetrieval) else None
    dividing = c.allocator if isinstance(c.allocator, Hybrid) and c.allocator.heads.classes != "static" else None
    if (fetching is None) != (dividing is None):
        return (
            "Hybrid decides which heads are dynamic and ChunkRetrieval serves those heads; one without the other leaves "
            "heads without their entries; allowed: both, or neither"
        )
    if fetching is None or dividing is None:
        return None
    if fetching.heads != dividing.heads:
        return "Hybrid and ChunkRetrieval call different heads dynamic; allowed: the same `heads` in both"
    if fetching.chunk != dividing.chunk:
        return (
            f"Hybrid counts chunks of {dividing.chunk} tokens and ChunkRetrieval reads chunks of {fetching.chunk}; "
            "allowed: the same size in both"
        )
    return None


RULES: tuple[Rule, ...] = (
    nothing_to_do,
    nothing_to_merge,
    budget_without_effect,
    excess_outside_released,
    incomparable_heads,
    sums_of_negative_scores,
    protected_worthless_tokens,
    different_windows,
    one_set_of_uneven_caps,
    different_proxies,
    different_filters,
    uneven_eviction_merged,
    other_unit_of_attention,
    different_sinks,
    retrieval_without_its_heads,
)


def visual_parts(compressor: Compressor) -> list[str]:
    """Return names of parts that treat visual tokens and text differently, which make no sense for a text model."""

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
