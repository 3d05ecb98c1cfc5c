"""Which model family runs which dataset with which method, found out by running them: `python -m tools.matrix`."""
