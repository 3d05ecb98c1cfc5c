"""Selectors: scores, caps and protected tokens -> indices of the entries that stay."""

from mmkv_bench.compression.selectors.base import Selector

__all__ = ["Selector"]
