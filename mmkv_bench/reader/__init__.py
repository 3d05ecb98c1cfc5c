"""The reader: a small VLM that reads rendered documents, and the documents with their questions."""

SHA256 = "25703e710f05cf063992ff6399811bdb17bd2a7a762a4f58ceab81c786973e31"
"""Checksum of the reader's model.safetensors, which `models.fetch` builds."""
