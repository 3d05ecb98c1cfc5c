"""One input of a run is changed at a time, before a further run or in the middle of one, and no old answer may stand for it.

python -m tests.identity --seed 0 --cases 300      # make fuzz-identity
"""
