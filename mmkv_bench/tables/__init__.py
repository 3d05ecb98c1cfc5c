"""Tables and figures: pure functions of rows. No model, no torch, no lmms-eval.

`rows` reads and checks the rows, `build` makes tables of scores and `costs` tables of costs. Builders (`score_text`,
`cost_text`, `dataset_groups`) turn these into `table.Table`, and `formats.write` writes any of them.
`figure` and its neighbours draw, `metrics` computes the `metrics` rows.
"""
