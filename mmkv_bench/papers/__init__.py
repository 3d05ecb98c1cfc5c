"""The papers' tables: what each cell of them is, the number that is printed there and the one that rows hold for it."""
