"""Measures that no task defines, computed from stored rows: fidelity to `full`, perplexity, ROUGE-L against own answers.

They are made (measured.py) of the response rows of a cell and of the `full` cell of the same protocol; no model, no data.

Fidelity. `full` stands beside the others with what the forks' path makes of the full cache: the noise floor.

- `fidelity_kl`: KL(full || cell) in nats, mean over the tokens of full's greedy answer. Under `paper` without its first
  token, which comes from the full prefill for every cell (an answer of one token has no value then);
  `fidelity_kl_all` is the mean with it. Under the other protocols it is among the tokens, and `fidelity_kl_first` is
  its KL alone.
- `fidelity_top1`: share of the tokens of `fidelity_kl` at which both rank the same token first.
- `same_answer`: 1 where the cell's own answer has exactly full's tokens.
- `divergence`: tokens of the cell's own answer before the first that differs from full's. An answer that never differs
  is censored at its end and counts with its length, so the mean over samples is the restricted mean; it can be read
  against that of `full`, which is the mean length.

`ppl`: exp of the mean negative log-likelihood of the reference answers' tokens, pooled over the dataset; under `paper` the
first token's is that of the full prefill. `ppl_without_first` leaves it out.

`rouge_l_sampled`: ROUGE-L (F) of the answer against an answer of `full` sampled at temperature 0.2; for `full` itself that
of a second sample, as in PrefixKV. `rouge_l_greedy`: against full's greedy answer; `full` has none.
"""

from __future__ import annotations

COLUMNS = (
    "cell",
    "sample_id",
    "cluster",
    "status",
    "answer",
    "token_ids",
    "forced_kl",
    "forced_agree",
    "reference_nll",
    "reference_samples",
    "slim",
)
"""What the measures read of a response row."""

POOLED = ("ppl", "ppl_without_first")
NAMES = frozenset(
    {"fidelity_kl", "fidelity_kl_all", "fidelity_kl_first", "fidelity_top1", "divergence", "same_answer"}
    | {"rouge_l_sampled", "rouge_l_greedy", *POOLED}
)
