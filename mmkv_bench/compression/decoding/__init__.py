"""Decode policies: what happens to a reduced cache while the answer is decoded."""

from mmkv_bench.compression.decoding.base import DecodePolicy, Start

__all__ = ["DecodePolicy", "Start"]
