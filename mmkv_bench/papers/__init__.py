"""The papers' tables: printed numbers, the numbers that rows hold at the same addresses, and verdicts."""
