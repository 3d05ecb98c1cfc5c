"""Exact attention statistics that never hold a T x T matrix: extra memory is one tile or one row, whichever is larger."""
