"""Numerics of methods: exact statistics of attention (extra memory: one tile or one row, never T x T), rotations, moments,
proxies, quantisation."""
