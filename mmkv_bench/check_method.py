"""An earlier spelling of `mmkv-bench check`."""

from mmkv_bench.errors import moved

if __name__ == "__main__":
    raise SystemExit(moved("check_method", "check"))
