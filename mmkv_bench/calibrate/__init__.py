"""Calibration: measurements of a model that methods need before its first prompt, written as artefacts by a command."""
