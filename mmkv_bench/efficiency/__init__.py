"""The efficiency scenario: times by phase and bytes of single cells at real shapes, each compared with a hardware limit.

`plan` has the cells and the order of their passes, `prompts` makes their input, `measure` does one pass, `run` does all passes
and writes the table `timings`. `summary` computes the numbers that `text` prints, from rows alone.
"""
