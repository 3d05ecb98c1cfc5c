"""Result rows: documented columns, an fsynced journal, parquet parts, provenance and an optional tracker.

This package deals with rows only, never with models. Entry points: `store.Store`, `provenance.collect`, `tracking.WandbTracker`.
Every column is declared and documented in `schema`.
"""
