"""Scorers: statistics of one layer's prefill -> the value of each entry. One method, one file."""

from mmkv_bench.compression.scorers.base import Scorer

__all__ = ["Scorer"]
