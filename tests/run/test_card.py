"""The static card and the progress lines."""

from __future__ import annotations

import io

from mmkv_bench.config.compose import compose
from mmkv_bench.plan.planner import outline
from mmkv_bench.run import console_output
from mmkv_bench.run.console_output import PromptSize
from mmkv_bench.run.progress import Progress, duration
from mmkv_bench.text_columns import size
from tests.each import each

DONE = {"pages_walk_small": 30, "pages_lookup_small": 0}
PROMPTS = {"pages_walk_small": PromptSize(272, 256, 272), "pages_lookup_small": PromptSize(270, 256, 270)}
WORDS = ("dataset=[pages_walk,pages_lookup]", "method=[full,snapkv]", "limit=100")


def card(*words: str, prompts=PROMPTS, done=DONE, **options) -> str:
    plan = outline(compose([*WORDS, "budget=[64,20%]", *words]))
    return console_output.card(plan, done, prompts, **options)


def test_the_card_says_what_a_cache_weighs_and_what_each_budget_keeps():
    text = card()
    assert "2 KiB per token" in text
    assert "272 tokens (256 visual) in the first prompt: 544 KiB cache" in text
    assert "64: 64 of 272 entries per KV head (23.5%), 512 in all, 128 KiB" in text
    assert "20%: 54 of 272 entries per KV head (19.9%), 432 in all, 108 KiB" in text


def test_the_card_counts_rows_done_and_to_make():
    text = card()
    assert "pages_walk_small: 100 samples x 3 cells, first prompt 272 tokens, 30 of 300 rows there already" in text
    assert "600 rows, 30 done, 570 to make, in runs/default" in text


def test_the_card_of_a_finished_run_says_that_nothing_is_left():
    assert "600 rows, 600 done, nothing to generate" in card(done=dict.fromkeys(DONE, 300))


def test_the_card_says_when_a_budget_keeps_the_whole_prompt():
    text = card("budget=4096")
    assert "4096: 272 of 272 entries per KV head (100.0%)" in text
    assert "kept whole" in text


def test_budgets_count_the_context_where_only_it_is_compressed():
    assert "64: 64 of 262 entries per KV head" in card(prompts={"pages_walk_small": PromptSize(272, 256, 262)})


def test_the_card_needs_no_prompt():
    text = card(prompts={})
    assert "entries per KV head" not in text
    assert "600 rows, 30 done, 570 to make" in text


def test_notes_and_shards_are_shown():
    text = card("shard=1/4", notes=["g10@64 is the same cell as mmshift@64"])
    assert "note       g10@64 is the same cell" in text
    assert "shard 1/4" in text


@each(("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 1024**4, "3 TiB")])
def test_sizes_read_well(number, text):
    assert size(number) == text


@each(("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (185, "3:05 min"), (7800, "2:10 h")])
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


def test_progress_off_a_terminal_is_lines_with_an_eta():
    stream = io.StringIO()
    with Progress(4, "pages", stream, every=0.0) as bar:
        bar.advance()
        bar.advance(2)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("pages: 1/4, ")
    assert lines[0].endswith(" left")
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
    names = [f"variants.a_method_with_a_name_{n}={{base: snapkv, window: {n + 1}}}" for n in range(9)]
    lines, wrapped = card(*names).splitlines(), card(*names, width=60).splitlines()
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
