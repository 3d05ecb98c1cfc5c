"""What `mmkv-bench new` writes: one file per part of a method, which runs as it stands and is meant to be changed."""
