"""The Python API: a compressor on a model, a configuration run, stored rows and their tables."""
