"""mmkv_bench: a reproducible benchmark harness for KV-cache compression in multimodal LLMs."""

__version__ = "0.2.0"
