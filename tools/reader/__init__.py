"""The reader: a small VLM that reads rendered documents, with the documents it is asked about."""
