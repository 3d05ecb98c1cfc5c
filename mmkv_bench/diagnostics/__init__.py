"""Diagnostics: stored answers made again and compared, and the papers' analyses of a prompt."""
