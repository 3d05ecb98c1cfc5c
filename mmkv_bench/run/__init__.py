"""A run from its plan to the printed tables: generate what is missing, score what is stored, say what became of it."""
