"""The Python API: attach a compressor to a model, run a configuration, load stored rows, make tables and figures."""
