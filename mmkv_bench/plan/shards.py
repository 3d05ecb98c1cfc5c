"""Which part of a dataset a process takes: decided by the hash of a sample's cluster, so that clusters stay whole."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mmkv_bench.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """Part `index` (from 0) of `count`."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str | Shard) -> Shard:
    """Read `i/n`.

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
    """Whether a sample of this cluster (image, document, video or page) belongs to this part. Every cluster belongs to
    exactly one part of any count, whichever samples a `limit` selects and whatever the order."""
    part = parse_shard(shard)
    return index_of(cluster, part.count) == part.index


def index_of(cluster: str, count: int) -> int:
    """Which of `count` parts a sample of this cluster belongs to."""
    return int.from_bytes(hashlib.sha256(cluster.encode()).digest()[:8], "big") % count


def longest_first(costs: Mapping[str, float]) -> list[str]:
    """Names by falling cost, equal costs by name: the last process to end should end on something short."""
    return sorted(costs, key=lambda name: (-costs[name], name))
