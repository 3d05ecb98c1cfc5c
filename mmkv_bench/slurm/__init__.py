"""Sweeps on Slurm: what is missing split into jobs, their scripts, the queue, and what became of them, by rows."""
