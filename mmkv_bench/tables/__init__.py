"""Tables and figures, made from stored rows without model, torch or lmms-eval.

`stored_rows` reads and checks rows, `build` makes tables of scores, `costs` makes tables of costs. `score_text`, `cost_text` and
`dataset_groups` turn these tables into `table.Table`, which `formats.write` writes in any format. `metric_rows` computes the
`metrics` rows.
"""
