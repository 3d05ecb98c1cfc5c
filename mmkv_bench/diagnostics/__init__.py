"""Diagnostics: stored answers made again and compared, and what the papers' analyses look at in a prompt."""
