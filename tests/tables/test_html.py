"""Promise: `tables --format html` is one page that asks for nothing: what markdown prints, and the cells behind numbers."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from mmkv_bench.tables.build import build
from mmkv_bench.tables.formats import html
from mmkv_bench.tables.formats import markdown as as_markdown
from mmkv_bench.tables.score_text import tables_of_scores
from mmkv_bench.tables.table import Grid, GridCell, Note, Rank, Table
from tests.cli.setting import verb
from tests.tables.test_cost_figures import scored
from tests.tables.test_tables_command import example

main = verb("tables")


class Page(HTMLParser):
    """The words of a page in order, and the tags that were opened and not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.open, self.links, self.ids = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        assert not {"src", "onclick"} & {*given} and tag not in ("script", "link", "img"), "a page asks for nothing"
        self.links += [given["href"]] if "href" in given else []
        self.ids += [given["id"]] if "id" in given else []
        self.open += [tag] if tag != "meta" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += [data.strip()] if data.strip() and self.open[-1] != "style" else []


def shown(capsys, *words: object) -> str:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def cells_of(markdown: str) -> list[str]:
    """The cells of all tables of markdown, without its signs."""
    lines = [line for line in markdown.splitlines() if line.startswith("|") and not line.startswith("|--")]
    return [word.replace("**", "").strip() for line in lines for word in line.strip("|").split("|") if word.strip()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--pairs", "--methods", "random,mmshift"), ("--ranks",), ("--metric", "bytes")]
)
def test_a_page_has_the_cells_of_markdown_and_leads_to_each_table(options, tmp_path: Path, capsys) -> None:
    root = scored(tmp_path / "rows") if "--metric" in options else example().write(tmp_path / "rows")
    told = Page(shown(capsys, root, *options, "--format", "html"))
    assert told.open == []
    text = " ".join(told.words)
    at = 0
    for word in cells_of(shown(capsys, root, *options)):
        for part in word.split(" "):
            assert (at := text.find(part, at)) >= 0, f"{part} of {word} is not on the page, or not there"
    assert told.links == ([f"#{name}" for name in told.ids] if len(told.ids) > 1 else [])


def test_cells_are_named_behind_their_numbers(tmp_path: Path, capsys) -> None:
    tables = build(example().rows())
    words = Page(html(tables_of_scores(tables), "Tables")).words
    for table in tables:
        for entry in table.entries.values():
            assert " ".join(cell[:12] for cell in entry.cells) in words
    assert "mmkv-bench show <rows> <hash>" in words


def test_words_of_rows_are_words_on_the_page_and_in_markdown():
    evil = "<b>mm & `x`"
    number = GridCell("0.50", 0.5, "[0.1, 0.9]", ("a",), True, "agrees", hashes=("c0", "c1"))
    one = Table(evil, "of n", [Grid(["method", "64"], [[evil, number]], evil)], [Note(evil)], name="first")
    page = Page(html([one, Table("two", "", ())], evil))
    assert page.words.count("<b>mm &") == 5 and "evil" not in page.open and page.links == ["#first", "#table-2"]
    assert page.words[page.words.index("0.50") :][:7] == [
        "0.50",
        "[0.1, 0.9]",
        "✓ agrees",
        "a",
        "c0 c1",
        "<b>mm &",
        "x",
    ]
    lines = as_markdown([one]).splitlines()
    assert (lines[0], lines[2]) == (f"**{evil}**: of n", f"*{evil}*")
    assert lines[6] == f"| {evil} | **0.50** [0.1, 0.9] ✓ agrees a |"


def test_the_most_important_notes_come_first_and_all_of_them_when_asked():
    notes = [Note("last", Rank.DETAIL), *(Note(f"more {i}") for i in range(5)), Note("first", Rank.WARNING)]
    table = Table("t", "", (), notes)
    text = as_markdown([table])
    assert text.index("- first") < text.index("- more 0") and text.endswith("- 2 more notes with `--notes`\n")
    assert as_markdown([table], notes="all").endswith("- more 4\n- last\n")
    page = html([table], "t")
    assert page.index("more 3") < page.index("<details><summary>2 more notes") < page.index("last")


def test_warnings_and_meanings_of_marks_are_never_left_out():
    must = [Note(f"must {i}", rank) for i in range(4) for rank in (Rank.WARNING, Rank.MARK)]
    shown, hidden = Table("t", "", (), [Note("context"), *must, Note("list", Rank.DETAIL)]).split_notes()
    assert len(shown) == 8 and all(text.startswith("must") for text in shown) and hidden == ["context", "list"]
