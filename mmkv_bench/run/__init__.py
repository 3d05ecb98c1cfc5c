"""A run from its plan to the printed tables: generate missing answers, score stored answers, report the results."""
