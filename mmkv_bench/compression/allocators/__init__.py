"""Allocators: scores and a budget -> entries per layer and KV head."""

from mmkv_bench.compression.allocators.base import Allocator

__all__ = ["Allocator"]
