"""Calibration: what a method must know of a model before its first prompt, measured by a command, kept as an artefact."""
