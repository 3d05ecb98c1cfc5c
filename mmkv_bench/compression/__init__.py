"""KV-cache compression on tensors alone; nothing here depends on a configuration, dataset, file or model class."""
