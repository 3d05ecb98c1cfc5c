"""Verbs: for each a function that declares its options and one that answers; nothing heavy is imported before work begins."""
