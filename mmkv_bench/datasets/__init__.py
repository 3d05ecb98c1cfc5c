"""Datasets: tasks of a run, where their data are, small data made by this project, and tasks that lmms-eval lacks."""
