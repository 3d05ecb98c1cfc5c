"""The scenario of efficiency: one cell at a time at true shape, its times by phase, its bytes, and the limit beside each.

`plan` has the cells and the order of their passes, `prompts` what they read, `measure` one pass, `run` all of them, into the
table `timings`; `summary` computes from rows alone what `text` prints.
"""
