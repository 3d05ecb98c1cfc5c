"""The former name of `mmkv_bench.api`; it goes with the next version."""

raise ImportError("mmkv_bench.door is now mmkv_bench.api; `from mmkv_bench import attach` and the like work as before")
