"""`experiment=hybrid` on random weights of Gemma 3's kinds of layers: token likelihoods, `global0`, and bytes of windows."""

from __future__ import annotations

import pytest

from tests.run.setting import cells, done, responses

NARROW = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 2048}
KEPT = 800


@pytest.mark.slow
def test_the_experiment_measures_likelihoods_beside_windows(tmp_path):
    data = "lengths_documentation_2k"
    cut = f"datasets.{data}.generation.cut_prompt=middle"
    small = ["model.weights=random", "model.layers=6", "model.dtype=float32", "model.template=null", "limit=1"]
    shape = [f"model.shape.{name}={value}" for name, value in NARROW.items()]
    outcome = done(
        tmp_path, "experiment=hybrid", "model=gemma3_270m", f"dataset={data}", "method=[full,snapkv]",
        f"model.max_prompt_tokens={KEPT}", "budget=[64,511]", *small, *shape, cut,
    )  # fmt: skip
    assert "5 with a window of 511 entries, which are not compressed" in outcome.out
    made, named = responses(tmp_path), cells(tmp_path)
    assert len(made) == 5 and {row["status"] for row in made.values()} == {"ok"}
    for row in made.values():
        assert row["bytes_state"] == 5 * 2 * 16 * 4 * min(511, row["prompt_tokens"])
        assert len(row["reference_nll"]) > 4 and min(row["reference_nll"]) > 0
        cell = named[row["cell"]]
        if cell["method"] == "global0":
            assert row["entries_resident"] == min(cell["budget_entries"], row["prompt_tokens"])
    assert {cell["method"] for cell in named.values()} == {"full", "snapkv", "global0"}
