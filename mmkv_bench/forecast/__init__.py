"""Forecasts of a plan before anything is loaded: roofline, memory and hours, from shapes or in a dry run."""
