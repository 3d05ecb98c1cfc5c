"""Sweeps on Slurm: missing work split into jobs, their scripts, the queue, and their results as read from rows."""
