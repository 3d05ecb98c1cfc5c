"""Two models' rows compared sample by sample: the mean of the differences over what both answered."""

from __future__ import annotations

import numpy as np
import pytest

from mmkv_bench.store.store import Store
from tests.store.store_examples import cell, response, sample_score, write_scores
from tools.compare_rows import main


def rows(folder, model, values, **changes):
    store = Store(folder)
    store.write_cells([cell(model, model=model, **changes)])
    with store.writer("w") as writer:
        for number in values:
            writer.commit([response(number, model)])
    write_scores(store, [sample_score(number, model, value=value) for number, value in values.items()], [])


def test_differences_are_means_over_common_samples(tmp_path, capsys):
    a, b = {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}, {1: 1.0, 2: 1.0, 3: 0.0, 4: 1.0, 5: 1.0}
    rows(tmp_path / "a", "four_bits", a)
    rows(tmp_path / "b", "published", b)
    assert main([str(tmp_path / "a"), "four_bits", str(tmp_path / "b"), "published"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("exact_match of published minus four_bits")
    line, common = lines[-1].split(), sorted({*a} & {*b})
    expected = np.mean([b[number] - a[number] for number in common])
    assert int(line[5]) == len(common) and float(line[8]) == pytest.approx(expected, abs=5e-4)
    assert float(line[9]) <= expected <= float(line[10])


def test_what_cannot_be_compared_is_a_sentence(tmp_path, capsys):
    rows(tmp_path / "a", "four_bits", {0: 1.0})
    rows(tmp_path / "b", "published", {0: 1.0}, method="keydiff", base="keydiff")
    for words, message in (
        (["a", "four_bits", "b"], "give two folders"),
        (["a", "four_bits", "nowhere", "published"], "nowhere"),
        (["a", "four_bits", "b", "four_bits"], "has no rows of four_bits; it has those of published"),
        (["a", "four_bits", "b", "published"], "have no cells in common; run the same grid with both"),
    ):
        assert main([word if at % 2 else str(tmp_path / word) for at, word in enumerate(words)]) == 2
        err = capsys.readouterr().err
        assert message in err and err.startswith("error: ") and err.count("\n") == 1
