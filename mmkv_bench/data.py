"""An earlier spelling of `mmkv-bench data`."""

from mmkv_bench.errors import moved

if __name__ == "__main__":
    raise SystemExit(moved("data", "data"))
