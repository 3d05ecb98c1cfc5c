"""Statistics of scores: kinds of metrics, confidence intervals, and paired tests of methods."""
