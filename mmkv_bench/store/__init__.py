"""Result rows: documented columns, an fsynced journal, parquet parts, provenance and an optional tracker.

This room knows rows and nothing of models. Entry points: `store.Store`, `provenance.collect`, `tracking.tracker`;
every column is declared and documented in `schema`.
"""
