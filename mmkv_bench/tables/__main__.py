"""An earlier spelling of `mmkv-bench tables`."""

from mmkv_bench.errors import moved

if __name__ == "__main__":
    raise SystemExit(moved("tables", "tables"))
