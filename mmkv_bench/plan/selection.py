"""Samples of a dataset that a process answers: the given ones (`samples=[id, ...]`) or the first ones, restricted to one shard.

The hash of a sample's cluster decides its shard, so clusters stay whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.config.schema import Selection
    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.evaluation.samples import SampleRef


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `i/n`, part i (from 0) of n. Raises ConfigError: not of the form i/n with 0 <= i < n."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not match or int(match[1]) >= int(match[2]):
        raise ConfigError(
            f"shard={text} is not a part of a run; allowed: i/n with 0 <= i < n (0/4, 1/4, 2/4, 3/4); give one such part"
        )
    return int(match[1]), int(match[2])


def index_of(cluster: str, count: int) -> int:
    """Return the index of the shard, of `count` shards, to which samples of this cluster (image, document, video or page) belong.
    It does not depend on the limit or the order of samples."""
    return int.from_bytes(hashlib.sha256(cluster.encode()).digest()[:8], "big") % count


def longest_first(costs: Mapping[str, float]) -> list[str]:
    """Sort names by falling cost, equal costs by name, so that the last process to end does something short."""
    return sorted(costs, key=lambda name: (-costs[name], name))


def chosen(refs: Sequence[SampleRef], selection: Selection) -> list[SampleRef]:
    """Return the samples that a selection includes: those with its ids (if any are given) and in its shard."""
    named, (index, count) = selection.samples, parse_shard(selection.shard)
    return [ref for ref in refs if (named is None or ref.sample_id in named) and index_of(ref.cluster, count) == index]


def reaching(selection: Selection, specs: Mapping[str, TaskSpec]) -> Selection:
    """Raise a selection's limit so that it includes all samples that are given by id. Datasets that are not pages are opened.

    Raises ConfigError: a sample is in none of the datasets, or a dataset has none of the samples."""
    if selection.samples is None:
        return selection
    from mmkv_bench.evaluation.documents import sample_refs

    wanted, known, last = selection.samples, set[str](), 0
    for label, spec in specs.items():
        refs = sample_refs(spec, None)
        named = [ref for ref in refs if ref.sample_id in wanted]
        if not named:
            shown = ",".join(wanted[:3]) + ",..." * (len(wanted) > 3)
            raise ConfigError(
                f"samples=[{shown}]: {label} has none of these, {_near(wanted[0], refs)}; give one of its samples, or leave the "
                "dataset out"
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
