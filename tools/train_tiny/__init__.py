"""Training and evaluation of the embedded model, on the pages of `mmkv_bench.tiny`."""
