"""An earlier spelling of `mmkv-bench calibrate`."""

from mmkv_bench.errors import moved

if __name__ == "__main__":
    raise SystemExit(moved("calibrate", "calibrate"))
