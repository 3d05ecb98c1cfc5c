"""A sweep of the embedded model, killed again and again while others read its rows (`make soak`).

Round after round one run answers and scores a dataset for several cells into a store of its own, then more samples of it, then
all: scores are there from the first step on, and later steps replace them. Each run is shot with SIGKILL at a random moment
(while it starts, while it publishes what the run before it left, amid the samples, while it scores, while it replaces one
cell's scores after the other) and started again by the same command, until it ends. Meanwhile a reader in another process goes
through the public API (`load_rows` with all frames, `status`, `make_table`), and this process follows the stored samples.

Wrong is: a file that cannot be read; a row that somebody has seen and that is gone, or another one, after a kill; a sample of
which only some cells are stored; a sample before the first missing one that is not there, so that more than the sample in
flight was lost; leftovers of a run that ended; rows that are not those of the uninterrupted run.
"""
