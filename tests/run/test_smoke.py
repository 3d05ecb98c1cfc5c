"""Promise: `experiment=smoke` goes through every stage, and what looks at its rows works on them."""

from __future__ import annotations

import pytest

from mmkv_bench.cli.main import main
from tests.run.setting import done, responses, scores


@pytest.mark.full
def test_the_smoke_run_answers_scores_and_shows_everything_that_it_asks_for(tmp_path, capsys):
    root = tmp_path / "rows"
    ran = done(root, "experiment=smoke")
    rows = list(responses(root).values())
    assert ran.document["cells"] == 64 and len(rows) == 64 * 2
    assert {row["status"] for row in rows} == {"ok"}
    measured = {row["metric"] for row in scores(root)}
    assert {"exact_match", "fidelity_kl", "ppl", "rouge_l_sampled"} <= measured
    assert done(root, "experiment=smoke").generated == 0
    for words in (["status", str(root)], ["tables", str(root)], ["tables", str(root), "--metric", "fidelity"]):
        assert main(words) == 0
    assert main(["plan", "experiment=smoke", f"out={root}", "limit=3"]) == 0
    one = ["--metric", "exact_match", "--protocol", "paper", "--budgets", "entries"]
    assert main(["plot", "budget", str(root), *one, "--out", str(tmp_path / "accuracy")]) == 0
    said = capsys.readouterr().out
    assert "128 of 128 answers" in said and "query_agnostic" in said and "kl" in said.lower()
    assert "for the missing rows (measured: " in said and "ready      nothing" in said
    assert (tmp_path / "accuracy.png").stat().st_size > 1000
