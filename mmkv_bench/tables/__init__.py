"""Tables and figures: pure functions of rows. No model, no torch, no lmms-eval.

`rows` reads and checks them, `build` makes `table.Table`s, `render` and `latex` print those, `figure` draws them,
`metrics` computes the `metrics` rows; `python -m mmkv_bench tables <rows folder>` prints the tables of a run again.
"""
