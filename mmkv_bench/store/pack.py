"""An earlier spelling of `mmkv-bench pack`."""

from mmkv_bench.errors import moved

if __name__ == "__main__":
    raise SystemExit(moved("store.pack", "pack"))
