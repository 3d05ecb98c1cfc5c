"""Promise: measures are aggregated as they are defined, smaller is better where it is, and fidelity is printed on request."""

from __future__ import annotations

import csv
import math

import numpy as np
import pandas as pd
import pytest

from mmkv_bench.errors import ConfigError
from mmkv_bench.statistics.intervals import cluster_draws, percentile_ends
from mmkv_bench.statistics.metric_kinds import FIDELITY
from mmkv_bench.tables.build import build
from mmkv_bench.tables.formats import markdown as as_markdown
from mmkv_bench.tables.metric_rows import metrics_rows
from mmkv_bench.tables.score_text import fidelity_tables
from mmkv_bench.tables.text import caption
from tests.cli.setting import verb
from tests.tables.examples import Example, markdown, sample_rows, zeros_and_ones

main = verb("tables")

SAMPLES = 40
KL = {"full": 0.0, "snapkv": 0.2, "random": 1.7}


def add(example: Example, cell: str, metric: str, values, parts=None) -> None:
    rows = sample_rows(cell, values, metric=metric)
    example.samples += [row | {"parts": None if parts is None else parts[i]} for i, row in enumerate(rows)]


def example(protocol: str = "paper") -> Example:
    """full and two methods at 64 with scores, fidelity and perplexities that vary from sample to sample."""
    made, spread = Example(), np.random.default_rng(0)
    for method, kl in KL.items():
        cell = made.add(method, None if method == "full" else 64, zeros_and_ones(20, SAMPLES), protocol=protocol)
        noise = spread.uniform(0.5, 1.5, SAMPLES)
        add(made, cell, "fidelity_kl", list(kl * noise))
        add(made, cell, "fidelity_kl_all" if protocol == "paper" else "fidelity_kl_first", list(kl * noise / 2))
        add(made, cell, "fidelity_top1", list(1 - kl / 4 * noise))
        add(made, cell, "divergence", list(np.round(12 / (1 + kl * noise))))
        add(made, cell, "same_answer", zeros_and_ones(int(SAMPLES / (1 + kl)), SAMPLES))
        tokens = spread.integers(1, 30, SAMPLES).astype(float)
        nll = (1 + kl) * noise * tokens
        add(made, cell, "ppl", list(np.exp(nll / tokens)), [list(pair) for pair in zip(nll, tokens, strict=True)])
    return made


def frames(made: Example) -> tuple[pd.DataFrame, pd.DataFrame]:
    rows = made.rows()
    return rows.samples, rows.cells


def test_perplexity_is_pooled_over_tokens_and_never_a_mean_of_samples():
    samples, cells = frames(example())
    rows = {(row["cell"], row["metric"]): row for row in metrics_rows(samples, cells)}
    for cell in cells["cell"]:
        own = samples[(samples["cell"] == cell) & (samples["metric"] == "ppl")].sort_values("sample_id")
        pairs = np.array(own["parts"].to_list())
        pooled = math.exp(pairs[:, 0].sum() / pairs[:, 1].sum())
        row = rows[cell, "ppl"]
        assert row["value"] == pytest.approx(pooled) and row["interval"] == "bootstrap"
        assert abs(row["value"] - own["value"].mean()) > 1e-3
        draws = np.concatenate(list(cluster_draws("walk3", SAMPLES)))[:300]
        again = [math.exp((d @ pairs[:, 0]) / (d @ pairs[:, 1])) for d in draws.astype(float)]
        low, high = percentile_ends(np.array(again), 0.05)
        assert row["low"] == pytest.approx(low, rel=0.1) and row["high"] == pytest.approx(high, rel=0.1)


def test_failures_leave_no_flattering_number_where_less_is_better():
    made = Example()
    cell = made.add("snapkv", 64, [1.0, None, 1.0])
    add(made, cell, "fidelity_kl", [0.5, None, 0.1])
    add(made, cell, "ppl", [3.0, None, 2.0], [[2.2, 2.0], [0.0, 0.0], [0.7, 1.0]])
    rows = {row["metric"]: row for row in metrics_rows(*frames(made))}
    for metric in ("fidelity_kl", "ppl"):
        assert (rows[metric]["n"], rows[metric]["n_ok"]) == (3, 2)
        assert rows[metric]["value"] is None and rows[metric]["value_failures_zero"] is None
    assert rows["exact_match"]["value_failures_zero"] == pytest.approx(2 / 3)


def test_the_smallest_divergence_is_marked_best_and_nats_are_no_shares():
    (kl,) = build(example().rows(), metrics=["fidelity_kl"])
    assert "a sample counts for 5 nats at most" in caption(kl, [kl])
    assert kl.best("64") == ("snapkv",)
    assert {entry.interval for entry in kl.entries.values()} == {"bootstrap"}
    assert kl.entries["full", ""].high == 0.0
    (top1,) = build(example().rows(), metrics=["fidelity_top1"])
    assert top1.best("64") == ("snapkv",)


def test_fidelity_is_in_no_table_that_did_not_ask_for_it():
    with_it, without = example().rows(), example().rows()
    without.samples = without.samples[~without.samples["metric"].isin(FIDELITY)]
    assert markdown(build(with_it)) == markdown(build(without))
    assert {table.metric for table in build(with_it)} == {"exact_match", "ppl"}


def test_one_table_has_all_of_it():
    text = as_markdown(fidelity_tables(example().rows()))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == ["method", "budget", "KL [nats, <= 5]", "top-1", "tokens in common", "same answer"]
    assert [line[:2] for line in lines[2:]] == [["full", "all"], ["random", "64"], ["snapkv", "64"]]
    assert lines[2][2:] == ["0", "1.000", "12.0", "1.000"]
    assert 1.4 < float(lines[3][2]) < 2.0 and 0.15 < float(lines[4][2]) < 0.25
    assert "without token 1" in text and "noise floor" in text
    strict = as_markdown(fidelity_tables(example("strict").rows()))
    assert "KL token 1" in strict and "without token 1" not in strict


def test_the_command_prints_it_on_request_and_says_so_where_there_is_none(tmp_path, capsys):
    root = str(example().write(tmp_path / "rows"))
    assert main([root, "--metric", "fidelity"]) == 0
    assert capsys.readouterr().out == as_markdown(fidelity_tables(example().rows()))
    assert main([root, "--metrics", "fidelity", "--format", "csv"]) == 0
    assert {row["metric"] for row in csv.DictReader(capsys.readouterr().out.splitlines())} <= set(FIDELITY)
    bare = Example()
    bare.add("full", None, zeros_and_ones(3, 4))
    assert main([str(bare.write(tmp_path / "bare")), "--metric", "fidelity"]) == 2
    assert "fidelity=off" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        as_markdown(fidelity_tables(bare.rows()))


def test_rows_that_hold_one_of_its_metrics_are_a_table_of_one_column():
    made = Example()
    for method, kl in KL.items():
        cell = made.add(method, None if method == "full" else 64, zeros_and_ones(3, 4))
        add(made, cell, "fidelity_kl", [kl] * 4)
    header = next(line for line in as_markdown(fidelity_tables(made.rows())).splitlines() if line.startswith("|"))
    assert [word.strip() for word in header.split("|")[1:-1]] == ["method", "budget", "KL [nats, <= 5]"]
