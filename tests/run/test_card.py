"""The static card and the progress lines."""

from __future__ import annotations

import io
from dataclasses import replace

from mmkv_bench.columns import size
from mmkv_bench.run.card import BudgetLine, CardFacts, DatasetLine, PromptSize, render
from mmkv_bench.run.progress import Progress, duration
from tests.each import each

FACTS = CardFacts(
    model="tiny",
    family="Qwen2.5-VL",
    fingerprint="0123456789abcdef",
    layers=4,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    dtype="float32",
    attention="sdpa",
    device="cpu",
    weights_bytes=3 * 1024**2,
    kv_bytes_per_token=2 * 4 * 2 * 32 * 4,
    datasets=[
        DatasetLine("pages_walk_small", 100, 7, 30, PromptSize(272, 256, 272)),
        DatasetLine("pages_lookup_small", 50, 7, 0, PromptSize(270, 256, 270)),
    ],
    methods=["full", "snapkv"],
    budgets=[BudgetLine("64", 64), BudgetLine("20%", 54)],
    protocols=["paper"],
    readings=["paper"],
    seeds=[0],
    out="runs/default",
)


def test_the_card_says_what_a_cache_weighs_and_what_each_budget_keeps():
    text = render(FACTS)
    assert "2 KiB per token" in text
    assert "272 tokens (256 visual) in the first prompt: 544 KiB cache" in text
    assert "64: 64 of 272 entries per KV head (23.5%), 512 in all, 128 KiB" in text
    assert "20%: 54 of 272 entries per KV head (19.9%), 432 in all, 108 KiB" in text


def test_the_card_counts_rows_done_and_to_make():
    text = render(FACTS)
    assert "pages_walk_small: 100 samples x 7 cells, first prompt 272 tokens, 30 of 700 rows there already" in text
    assert "1050 rows, 30 done, 1020 to make, in runs/default" in text


def test_the_card_of_a_finished_run_says_that_nothing_is_left():
    done = [replace(line, rows_done=line.rows) for line in FACTS.datasets]
    assert "1050 rows, 1050 done, nothing to generate" in render(replace(FACTS, datasets=done))


def test_the_card_says_when_a_budget_keeps_the_whole_prompt():
    text = render(replace(FACTS, budgets=[BudgetLine("4096", 4096)]))
    assert "4096: 272 of 272 entries per KV head (100.0%)" in text
    assert "kept whole" in text


def test_budgets_count_the_context_where_only_it_is_compressed():
    prompt = PromptSize(272, 256, 262)
    text = render(replace(FACTS, datasets=[replace(FACTS.datasets[0], prompt=prompt)]))
    assert "64: 64 of 262 entries per KV head" in text


def test_the_card_needs_no_prompt():
    text = render(replace(FACTS, datasets=[DatasetLine("pages", 5, 2, 0)]))
    assert "entries per KV head" not in text
    assert "10 rows, 0 done, 10 to make" in text


def test_notes_and_shards_are_shown():
    text = render(replace(FACTS, notes=["g10@64 is the same cell as mmshift@64"], shard="1/4"))
    assert "note       g10@64 is the same cell" in text
    assert "shard 1/4" in text


@each(("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 1024**4, "3072 GiB")])
def test_sizes_read_well(number, text):
    assert size(number) == text


@each(("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (185, "3:05 min"), (7800, "2:10 h")])
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


def test_progress_off_a_terminal_is_lines_with_an_eta():
    stream = io.StringIO()
    with Progress(4, "pages", stream, every=0.0) as bar:
        bar.advance(note="0.75 correct")
        bar.advance(2)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("pages: 1/4, ")
    assert lines[0].endswith(" left, 0.75 correct")
    assert lines[-1].startswith("pages: 3/4, ")
    assert len(lines) == 2
    assert "\r" not in stream.getvalue()


def test_progress_is_quiet_between_lines():
    stream = io.StringIO()
    with Progress(1000, "pages", stream, every=3600.0) as bar:
        for _ in range(1000):
            bar.advance()
    first, last = stream.getvalue().splitlines()
    assert first.startswith("pages: 1/1000, ") and last.startswith("pages: 1000/1000, ")


def test_what_is_left_is_known_from_the_first_sample_on(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream in (io.StringIO(), Terminal()):
        now = iter([100.0, *[130.0] * 1000])
        monkeypatch.setattr("mmkv_bench.run.progress.time.monotonic", lambda now=now: next(now))
        with Progress(5, "pages", stream, every=3600.0) as bar:
            assert bar.left() == "?"
            bar.advance()
            assert bar.left() == "2:00 min"
        assert "2:00 min" in stream.getvalue()


def test_the_card_is_wrapped_where_a_terminal_ends_and_nowhere_else():
    facts = replace(FACTS, methods=[f"a_method_with_a_name_{n}" for n in range(9)])
    lines, wrapped = render(facts).splitlines(), render(facts, 60).splitlines()
    assert max(map(len, lines)) > 100 and max(map(len, wrapped)) <= 60
    assert " ".join(wrapped).split() == " ".join(lines).split()
    assert all(line[:11].strip() for line in lines if "a_method" in line)
    assert [line[:11] for line in wrapped if "a_method" in line][1:] == [" " * 11] * 4


def test_progress_on_a_terminal_is_a_bar_with_an_eta():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress(2, "pages", stream) as bar:
        bar.advance(2)
        bar.relabel("other")
    assert "2/2" in stream.getvalue()
    assert "ETA" in stream.getvalue()
    assert "other" in stream.getvalue()
