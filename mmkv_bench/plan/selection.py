"""Samples of a dataset that a process answers: the given ones (`samples=[id, ...]`) or the first ones, restricted to one shard.

The hash of a sample's cluster decides its shard, so clusters stay whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.config.schema import Selection
    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.evaluation.samples import SampleRef


@dataclass(frozen=True)
class Shard:
    """Part `index` (from 0) of `count`."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str | Shard) -> Shard:
    """Parse `i/n`.

    Raises:
        ConfigError: not of the form i/n with 0 <= i < n.
    """
    if isinstance(text, Shard):
        return text
    match = re.fullmatch(r"(\d+)/(\d+)", str(text).strip())
    shard = Shard(int(match[1]), int(match[2])) if match else None
    if shard is None or shard.index >= shard.count:
        raise ConfigError(
            f"shard={text} is not a part of a run; allowed: i/n with 0 <= i < n (0/4, 1/4, 2/4, 3/4); give one such part"
        )
    return shard


def in_shard(cluster: str, shard: str | Shard) -> bool:
    """Tell whether a sample of this cluster (image, document, video or page) belongs to a shard. For any number of shards, a
    cluster belongs to exactly one, which does not depend on the limit or the order of samples."""
    part = parse_shard(shard)
    return index_of(cluster, part.count) == part.index


def index_of(cluster: str, count: int) -> int:
    """Return the index of the shard, of `count` shards, to which samples of this cluster belong."""
    return int.from_bytes(hashlib.sha256(cluster.encode()).digest()[:8], "big") % count


def longest_first(costs: Mapping[str, float]) -> list[str]:
    """Sort names by falling cost, equal costs by name, so that the last process to end does something short."""
    return sorted(costs, key=lambda name: (-costs[name], name))


def chosen(refs: Sequence[SampleRef], selection: Selection) -> list[SampleRef]:
    """Return the samples that a selection includes: those with its ids (if any are given) and in its shard."""
    named, shard = selection.samples, parse_shard(selection.shard)
    return [ref for ref in refs if (named is None or ref.sample_id in named) and in_shard(ref.cluster, shard)]


def reaching(selection: Selection, specs: Mapping[str, TaskSpec]) -> Selection:
    """Raise a selection's limit so that it includes all samples that are given by id.

    Args:
        selection: the selection.
        specs: tasks of its datasets; those that are not pages are opened.

    Raises:
        ConfigError: a sample is in none of the datasets, or a dataset has none of the samples.
    """
    if selection.samples is None:
        return selection
    from mmkv_bench.evaluation.documents import sample_refs

    wanted, known, last = selection.samples, set[str](), 0
    for label, spec in specs.items():
        refs = sample_refs(spec, None)
        named = [ref for ref in refs if ref.sample_id in wanted]
        if not named:
            raise ConfigError(
                f"samples={_words(wanted)}: {label} has none of these, {_near(wanted[0], refs)}; give one of its samples, or "
                "leave the dataset out"
            )
        known |= {ref.sample_id for ref in named}
        end = max(ref.doc_id for ref in named)
        while spec.questions_key and end + 1 < len(refs) and refs[end + 1].cluster == refs[end].cluster:
            end += 1  # the other questions of its document
        last = max(last, end)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        every = [ref for spec in specs.values() for ref in sample_refs(spec, None)]
        raise ConfigError(f"samples: {unknown[0]!r} is in no dataset of this run; {_near(unknown[0], every)}")
    return replace(selection, limit=last + 1)


def _near(name: str, refs: Sequence[SampleRef]) -> str:
    close = get_close_matches(name, [ref.sample_id for ref in refs], n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"its ids go from {refs[0].sample_id!r} to {refs[-1].sample_id!r}"


def _words(names: Sequence[str]) -> str:
    return f"[{','.join(names[:3])}{',...' if len(names) > 3 else ''}]"
