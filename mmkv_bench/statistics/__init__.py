"""Statistics of scores: kinds of metrics, intervals, paired tests, and simulations of how often they are wrong."""
