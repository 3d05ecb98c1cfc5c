"""The efficiency scenario: times by phase and bytes of each (method, budget) setting, next to hardware limits.

`plan` orders the passes, `prompts` makes their input, `measure` runs one pass, `run` runs all and writes the table
`timings`. `summary` computes from rows alone the numbers that `text` prints.
"""
