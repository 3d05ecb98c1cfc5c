"""Reducers: a full cache of one layer and the selected indices -> the entries that are stored."""

from mmkv_bench.compression.reducers.base import Reducer

__all__ = ["Reducer"]
