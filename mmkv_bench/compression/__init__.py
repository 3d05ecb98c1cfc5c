"""KV-cache compression on tensors alone. Nothing in this folder depends on a configuration, dataset, file or model
class."""
