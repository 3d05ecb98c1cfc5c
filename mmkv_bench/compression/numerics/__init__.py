"""Numerics of methods: exact statistics of attention (extra memory: one tile or one row, never T x T numbers), rotations,
moments, proxies, quantisation."""
