"""Forecasts of a plan before anything is loaded: roofline, memory and hours, by arithmetic from shapes or in a dry run."""
