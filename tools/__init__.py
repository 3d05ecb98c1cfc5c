"""Commands of a checkout, outside of the wheel: pages of docs/, the matrix of families, checks of the lock."""
