"""Rows -> tables: what shares a table, seeds, failure rules, what is marked best."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.statistics.intervals import wilson
from mmkv_bench.tables.build import build
from mmkv_bench.tables.compare import separated_pairs
from mmkv_bench.tables.score_table import ScoreTable
from mmkv_bench.tables.text import caption
from tests.each import each
from tests.tables.examples import Example, notes, zeros_and_ones


def one(example: Example, **filters) -> ScoreTable:
    (table,) = build(example.rows(), **filters)
    return table


def test_seeds_are_averaged_within_a_sample_before_anything_else() -> None:
    example = Example()
    for seed, values in enumerate(([1.0, 0, 1, 0], [0.0, 0, 1, 0], [1.0, 0, 1, 1])):
        example.add("random", 64, values, seed=seed)
    table = one(example)
    entry = table.entry("random", "64")
    assert entry.scores.values.tolist() == pytest.approx([2 / 3, 0, 1, 1 / 3])
    assert (entry.scores.n, entry.interval) == (4, "bootstrap")  # n counts samples, not rows
    assert entry.value == pytest.approx(0.5)
    assert "random: mean over seeds 0, 1, 2 within each sample." in notes(table)


def test_a_sample_that_failed_in_one_seed_is_not_ok() -> None:
    example = Example()
    example.add("random", 64, [1.0, 0, 1], seed=0)
    example.add("random", 64, [1.0, None, 1], seed=1)
    entry = one(example).entry("random", "64")
    assert (entry.scores.n, entry.scores.n_ok, entry.value) == (3, 2, None)


def test_seeds_over_different_samples_are_told() -> None:
    example = Example()
    example.add("random", 64, [1.0, 0, 1], seed=0)
    example.add("random", 64, [1.0, 0], seed=1)
    assert any("not every sample has every seed" in note for note in notes(one(example)))


def test_methods_of_several_versions_share_a_table_that_shows_each_method_at_its_newest() -> None:
    example = Example()
    example.add("full", None, [1.0, 1])
    example.add("snapkv", 64, [1.0, 0])
    for version, values in ((None, [0.0, 0]), (3, [1.0, 1]), (2, [0.0, 1])):
        for seed in (0, 1):
            example.add("mmshift", 64, values, seed=seed, method_version=version)
    example.add("mmshift", 32, [0.0, 1], seed=0)  # no later version of it at this budget
    table = one(example)
    found = {(name, budget): entry.value for (name, budget), entry in table.entries.items()}
    assert found == {("full", ""): 1, ("snapkv", "64"): 0.5, ("mmshift", "64"): 1, ("mmshift", "32"): 0.5}
    assert [note for note in notes(table) if "version" in note] == [
        "mmshift: older versions of its numbers are left out at 64 (version 2, 1, shown: 3).",
        "mmshift: the budgets show different versions of its numbers: 1 at 32 and 3 at 64.",
    ]


def test_budgets_in_entries_and_in_fractions_never_share_a_table() -> None:
    example = Example()
    example.add("full", None, [1.0, 1])
    for budget in (128, 64, "0.2", "0.05", "1.0", 1):
        example.add("snapkv", budget, [1.0, 0])
    entries, fractions = build(example.rows())
    assert (entries.axis, entries.budgets) == ("entries", ("1", "64", "128"))
    assert (fractions.axis, fractions.budgets) == ("fraction", ("0.05", "0.2", "1.0"))
    assert entries.entry("full", "64").value == fractions.entry("full", "0.2").value == 1.0


def test_protocols_models_and_metrics_have_tables_of_their_own() -> None:
    example = Example()
    for protocol in ("paper", "strict"):
        example.add("full", None, [1.0, 1], protocol=protocol)
        for reading in ("paper", "released"):
            example.add("mmshift", 64, [1.0, 0], protocol=protocol, reading=reading)
    example.add("mmshift", 64, [1.0, 0], model="other", model_fingerprint="o")
    example.add("mmshift", 64, [1.0, 0], dtype="bfloat16", sample={"metric": "anls"})
    tables = build(example.rows())
    shown = sorted((t.context["model"], t.context["protocol"], t.readings, t.metric, len(t.methods)) for t in tables)
    assert shown == [
        ("other", "paper", ("paper",), "exact_match", 1),
        ("tiny", "paper", ("paper",), "anls", 1),
        ("tiny", "paper", ("paper", "released"), "exact_match", 3),
        ("tiny", "strict", ("paper", "released"), "exact_match", 3),
    ]
    (chosen,) = build(example.rows(), protocols=["strict"], readings=["released"], metrics=["exact_match"])
    assert (chosen.context["protocol"], chosen.readings) == ("strict", ("released",))
    assert [method.label for method in chosen.methods] == ["full", "mmshift"]


def test_readings_of_one_method_stand_in_one_table_and_are_compared() -> None:
    example = Example()
    example.add("mmshift", 64, zeros_and_ones(20, 60), parameters={"window": 32})
    example.add("mmshift", 64, zeros_and_ones(50, 60), parameters={"window": 1}, reading="released")
    example.add("mmshift", 64, zeros_and_ones(52, 60), parameters={"window": 2}, reading="released", tuned=True)
    table = one(example)
    labels = ["mmshift", "mmshift (window=1, released)", "mmshift (window=2, released)"]
    assert [method.label for method in table.methods] == labels
    assert [(p.a, p.b) for p in separated_pairs(table)] == [(labels[0], labels[1]), (labels[0], labels[2])]


def test_full_alone_makes_a_table_without_budgets() -> None:
    example = Example()
    example.add("full", None, [1.0, 0])
    table = one(example)
    assert (table.axis, table.budgets, table.entry("full", "").value) == ("none", (), 0.5)


def test_namesakes_with_other_parameters_have_lines_of_their_own() -> None:
    example = Example()
    example.add("snapkv", 64, [1.0, 0], parameters={"window": 32, "pool": 5})
    example.add("snapkv", 64, [1.0, 1], parameters={"window": 16, "pool": 5}, tuned=True)
    example.add("g3", 64, [0.0, 0], base="mmshift", parameters={"gamma": 3})
    table = one(example)
    assert [m.label for m in table.methods] == ["g3", "snapkv (window=16)", "snapkv (window=32)"]
    assert table.entry("snapkv (window=16)", "64").value == 1.0


def test_cells_that_no_table_can_tell_apart_are_refused() -> None:
    example = Example()
    example.add("snapkv", 64, [1.0])
    example.add("snapkv", 64, [0.0])
    with pytest.raises(StoreError, match="c000, c001 have the same method"):
        build(example.rows())


def test_a_cell_with_failures_shows_counts_and_both_scores_and_nothing_is_best() -> None:
    example = Example()
    example.add("full", None, zeros_and_ones(40, 40))
    example.add("mmshift", 64, zeros_and_ones(39, 40))
    example.add("random", 64, [None, None, *zeros_and_ones(0, 38)])
    table = one(example)
    broken = table.entry("random", "64")
    assert (broken.value, broken.low, broken.scores.n_ok, broken.scores.n) == (None, None, 38, 40)
    assert (broken.zero, broken.common) == (0.0, 0.0)
    assert table.entry("mmshift", "64").value == 39 / 40  # complete cells keep their headline
    assert table.entry("mmshift", "64").common == 37 / 38  # s000 and s001 are out
    assert len(table.common_ids) == 38 and not table.comparable
    separated = [(pair.better, {pair.a, pair.b}, pair.n) for pair in separated_pairs(table)]
    assert ("mmshift", {"mmshift", "random"}, 38) in separated
    assert table.best("64") == ()


def test_cells_over_different_samples_are_told_and_nothing_is_best() -> None:
    example = Example()
    example.add("mmshift", 64, zeros_and_ones(60, 60))
    example.add("random", 64, zeros_and_ones(0, 50))
    table = one(example)
    assert table.best("64") == () and table.sizes == (50, 60)
    assert table.entry("mmshift", "64").value == 1.0
    assert any("Fewer samples than the 60 of the largest cell: random at 64 (n=50)" in note for note in notes(table))


def test_best_are_those_of_which_no_rival_is_proven_better() -> None:
    example = Example()
    example.add("full", None, zeros_and_ones(100, 100))
    example.add("mmshift", 64, zeros_and_ones(80, 100))
    example.add("snapkv", 64, zeros_and_ones(78, 100))
    example.add("random", 64, zeros_and_ones(3, 100))
    example.add("mmshift", 32, zeros_and_ones(3, 100))
    example.add("random", 32, zeros_and_ones(2, 100))
    table = one(example)
    assert table.best("64") == ("mmshift", "snapkv")  # full stands above them and is no rival
    assert table.best("32") == ()  # nobody is separated from anybody


def test_a_method_over_its_budget_neither_wins_nor_beats() -> None:
    example = Example()
    example.add("mmshift", 64, zeros_and_ones(90, 100), reading="released", answer={"entries_resident": 600})
    example.add("snapkv", 64, zeros_and_ones(50, 100), reading="released")
    example.add("random", 64, zeros_and_ones(5, 100), reading="released")
    table = one(example)
    assert table.best("64") == ("snapkv",)
    audit = table.entry("mmshift", "64").audit
    assert audit.over == 100 and audit.excess_mean == pytest.approx(600 / 512 - 1)


def test_fewer_entries_than_the_budget_are_no_excess() -> None:
    example = Example()
    example.add("snapkv", 400, [1.0, 0], answer={"entries_resident": 2400, "fallback": ["prompt_within_budget"]})
    audit = one(example).entry("snapkv", "400").audit
    assert (audit.over, audit.fallbacks) == (0, {"prompt_within_budget": 2})


def test_rows_without_byte_counts_claim_full_width_entries_on_the_device() -> None:
    example = Example()
    example.add("snapkv", 64, [1.0, 0])
    audit = one(example).entry("snapkv", "64").audit
    assert (audit.packed, audit.retrievable, audit.device, audit.host, audit.reach) == (0, 0, 1.0, 0.0, 1.0)


def test_a_budget_of_some_layers_says_what_it_is_of_all_state() -> None:
    """64 of 512 entries of 16 bytes, and windows of twice the full cache: 1/8 + 2 of 1 + 2."""
    stored = {"bytes_full": 8192, "bytes_device": 1024, "bytes_held": 17_408}
    example = Example()
    example.add("snapkv", 64, [1.0, 0], answer=stored | {"bytes_state": 16_384})
    table = one(example)
    assert table.entry("snapkv", "64").audit.of_all == pytest.approx(17 / 24)
    text = "Budgets are of compressed layers. With windows and recurrent states of the others, 71% stays at 64."
    assert text in notes(table)
    for state in (0, None):
        example = Example()
        example.add("snapkv", 64, [1.0, 0], answer=stored | {"bytes_state": state})
        assert not any("Budgets are of compressed" in note for note in notes(one(example)))


def test_answers_without_scores_are_told() -> None:
    example = Example()
    example.add("snapkv", 64, [1.0, 0, 1])
    example.add("keydiff", 64, [1.0, 0, 1])
    example.samples = [row for row in example.samples if (row["cell"], row["sample_id"]) < ("c001", "s001")]
    table = one(example)
    assert table.waiting == {("keydiff", "64"): 2}
    example.samples = [row for row in example.samples if row["cell"] == "c000"]
    table = one(example)
    assert table.waiting == {("keydiff", "64"): 3} and table.entry("keydiff", "64") is None
    assert "Answers without scores yet (stage=score adds them): keydiff at 64 (3)." in notes(table)


def test_a_mixs_tables_hold_one_kind_each_and_call_no_other_kinds_answer_unscored() -> None:
    """A mix scores every sample once over all kinds and once under its own kind."""
    example = Example()
    right = {"s000": 1.0, "s001": 0.0, "s002": 1.0, "s003": 1.0}
    example.add("snapkv", 64, right)
    kinds = {"s000": "walk", "s001": "walk", "s002": "lookup"}  # s003 has no score at all yet
    scored = [row for row in example.samples if row["sample_id"] in kinds]
    example.samples = scored + [row | {"metric": f"exact_match_{kinds[row['sample_id']]}"} for row in scored]
    for row in example.responses[:1]:
        row["fallback"] = ["window_reduced"]
    tables = {table.metric: table for table in build(example.rows())}
    assert {metric: table.sizes for metric, table in tables.items()} == {
        "exact_match": (3,),
        "exact_match_lookup": (1,),
        "exact_match_walk": (2,),
    }
    assert [table.waiting for table in tables.values()] == [{("snapkv", "64"): 1}] * 3
    audits = {metric: table.entry("snapkv", "64").audit for metric, table in tables.items()}
    assert {metric: (audit.n, audit.fallbacks) for metric, audit in audits.items()} == {
        "exact_match": (3, {"window_reduced": 1}),
        "exact_match_lookup": (1, {}),
        "exact_match_walk": (2, {"window_reduced": 1}),
    }
    (chosen,) = build(example.rows(), metrics=["exact_match_lookup"])
    assert chosen.waiting == {("snapkv", "64"): 1}


def test_intervals_of_a_table_are_those_of_its_samples() -> None:
    example = Example()
    example.add("snapkv", 64, zeros_and_ones(7, 20))
    entry = one(example).entry("snapkv", "64")
    assert (entry.low, entry.high) == wilson(7 / 20, 20)


@each(
    ("filters", "message"),
    [
        ({"datasets": ["walk"]}, "no dataset 'walk': did you mean 'walk3'"),
        ({"protocols": ["strict"]}, "no protocol 'strict': allowed: paper"),
        ({"readings": ["released"]}, "no reading 'released': allowed: paper"),
        ({"metrics": ["anls"]}, "no metric 'anls': allowed: exact_match"),
    ],
)
def test_a_filter_that_matches_nothing_names_what_there_is(filters: dict, message: str) -> None:
    example = Example()
    example.add("snapkv", 64, [1.0])
    with pytest.raises(ConfigError) as caught:
        build(example.rows(), **filters)
    assert message in str(caught.value)


def test_no_scored_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="No row is scored"):
        build(Example().rows())


def test_a_method_without_any_answer_has_no_line_yet() -> None:
    example = Example()
    example.add("snapkv", 64, [1.0, 0, 1])
    example.add("keydiff", 64, [1.0, 0, 1])
    example.samples = [row for row in example.samples if row["cell"] == "c000"]
    assert [method.label for method in one(example).methods] == ["keydiff", "snapkv"]  # its answers wait for scores
    example.responses = [row for row in example.responses if row["cell"] == "c000"]
    assert [method.label for method in one(example).methods] == ["snapkv"]


@each(
    ("key", "value"),
    [("max_pixels", 3136), ("min_pixels", 784), ("video_max_pixels", 784), ("frames", 8), ("max_prompt_tokens", 99)],
)
def test_answers_to_other_views_of_the_data_share_no_table(key: str, value: int) -> None:
    """A method that was shown smaller images is not worse for it."""
    example = Example()
    example.add("snapkv", 64, [1.0, 0.0])
    example.add("mmshift", 64, [0.0, 0.0], config=json.dumps({"model": {key: value}}))
    tables = build(example.rows())
    assert [[method.name for method in table.methods] for table in tables] == [["snapkv"], ["mmshift"]]
    assert f"{key}={value}" in caption(tables[1], tables) and "=" + str(value) not in caption(tables[0], tables)


HALF, SINGLE = {"dtype": "bfloat16"}, {"dtype": "float32"}


@each(
    ("a", "b", "parts"),
    [
        ({"device": "NVIDIA A100"}, {"device": "NVIDIA H100"}, "device=NVIDIA H100"),
        ({"versions": '{"lmms_eval": "0.7.2"}'}, {"versions": '{"lmms_eval": "0.7.3"}'}, "lmms_eval=0.7.3"),
        (HALF | {"cpu": "AMD"}, HALF | {"cpu": "Intel"}, "processor=Intel"),
        (SINGLE | {"cpu": "AMD"}, SINGLE | {"cpu": "Intel"}, None),  # float32 answers are the same: a note
        (HALF | {"device": "NVIDIA A100", "cpu": "AMD"}, HALF | {"device": "NVIDIA A100", "cpu": "Intel"}, None),
    ],
)
def test_devices_and_versions_of_lmms_eval_share_no_table_and_kinds_of_cpu_where_answers_hang_on_them(
    a, b, parts
) -> None:
    example = Example()
    example.add("snapkv", 64, [1.0, 0.0], **a)
    example.add("mmshift", 64, [0.0, 0.0], **b)
    tables = build(example.rows())
    assert len(tables) == (1 if parts is None else 2)
    if parts is None:
        assert "Cells were made on several kinds of CPU: AMD (1), Intel (1)." in notes(tables[0])
    else:
        assert any(parts in caption(table, tables) for table in tables)


def test_quantised_weights_are_named_below_the_table_and_a_task_that_full_cannot_do_is_no_contest() -> None:
    for right, file in ((1.0, "small.gguf (Q4_1 2)"), (0.0, None)):
        example = Example()
        example.add("full", None, [right, 0.0], weights_file=file)
        example.add("snapkv", 64, [0.0, 0.0], weights_file=file)
        (table,) = build(example.rows())
        text = " ".join(notes(table))
        assert ("Weights: small.gguf (Q4_1 2), dequantised." in text) is (file is not None)
        assert ("The full cache scores 0" in text) is (right == 0)


def test_where_images_stand_in_a_prompt_parts_tables_too() -> None:
    example = Example()
    example.add("snapkv", 64, [1.0, 0.0], config=json.dumps({"datasets": {"walk3": {"placeholders": "keep"}}}))
    example.add("mmshift", 64, [0.0, 0.0], config=json.dumps({"datasets": {"walk3": {"placeholders": "remove"}}}))
    tables = build(example.rows())
    assert [table.context["limits"] for table in tables] == ["", "placeholders=remove"]
