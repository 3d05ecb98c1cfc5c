"""KV-cache compression: tensors only. Knows no configuration, dataset, file or model class."""
