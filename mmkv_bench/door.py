"""The former name of `mmkv_bench.api`. The next version removes this module."""

raise ImportError("mmkv_bench.door is now mmkv_bench.api; `from mmkv_bench import attach` and the like work as before")
