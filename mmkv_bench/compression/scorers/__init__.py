"""Scorers: statistics of one layer's prefill -> a score for each entry. Each file has one method's scorer."""

from mmkv_bench.compression.scorers.base import Scorer

__all__ = ["Scorer"]
