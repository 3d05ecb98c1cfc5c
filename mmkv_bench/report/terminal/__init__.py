"""Views of rows in a terminal: a store, one of its cells, one sample. They load no model."""
