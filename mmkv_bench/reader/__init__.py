"""The reader: a small VLM that reads rendered documents, with the documents it is asked about."""

SHA256 = "25703e710f05cf063992ff6399811bdb17bd2a7a762a4f58ceab81c786973e31"
"""Of its weights as `models.fetch` puts them together, model.safetensors."""
