"""Tables and figures: pure functions of rows. No model, no torch, no lmms-eval.

`rows` reads and checks the rows, `build` makes tables of scores, and `costs` makes tables of costs. `score_text`, `cost_text` and
`dataset_groups` turn these tables into `table.Table`, which `formats.write` writes in any format. `figure` and its neighbours
draw. `metrics` computes the `metrics` rows.
"""
