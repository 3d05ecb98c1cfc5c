"""Templates of `mmkv-bench new`: one file per part of a method, which runs unchanged."""
