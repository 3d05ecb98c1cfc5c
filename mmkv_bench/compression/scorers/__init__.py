"""Scorers: statistics of one layer's prefill -> how much each entry is worth. One method, one file."""

from mmkv_bench.compression.scorers.base import Scorer

__all__ = ["Scorer"]
