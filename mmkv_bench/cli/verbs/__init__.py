"""Verbs: one function per verb that does its work. Nothing heavy is imported before the work begins."""
