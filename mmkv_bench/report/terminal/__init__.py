"""What a report shows, in a terminal: a store, one of its cells, one sample. No model is loaded here."""
