"""The papers' tables: printed numbers, our measurements of the same quantities, and verdicts on their agreement."""
