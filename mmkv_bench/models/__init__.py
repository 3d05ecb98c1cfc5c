"""Models: loading them and the facts of their families."""
