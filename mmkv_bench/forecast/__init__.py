"""Forecasts: roofline, memory and hours of a plan, by arithmetic from shapes or in a dry run, before anything is loaded."""
