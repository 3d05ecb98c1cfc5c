"""The Python door: a compressor on a model, a configuration run, stored rows and their tables."""
