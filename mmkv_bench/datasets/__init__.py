"""Datasets: what a run can ask, where the data lie, small data of our own making, and the tasks that lmms-eval lacks."""
