"""The Python API: attach a compressor to a model, run a configuration, load stored rows and make their tables."""
