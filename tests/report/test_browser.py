"""A report in a real browser, opened as a file: filters, hints, clicks, the keyboard, colour schemes, print."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmkv_bench.report.build import make
from mmkv_bench.store.kept import digest, packed, unpacked
from mmkv_bench.store.store import Store
from mmkv_bench.tables.metrics import metrics_rows
from tests.tables.examples import Example

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium, then this runs"),
]
HOSTILE = "<img src=x onerror=\"document.title='run'\">"
EVIL = "<b>evil</b>"


def report(root: Path) -> Path:
    """Two datasets, four methods; 40 samples each, of which the first has an image and says what was kept."""
    made, right = Example(), np.arange(40)
    kept = packed([[np.array([0, 2]), np.array([1])]] * 2, 4)
    for dataset in ("lookup", "walk3"):
        of = {"dataset": dataset}
        made.add(
            "full", None, list(np.where(right < 38, 1.0, 0.0)), answer={"answer": HOSTILE, "token_ids": [1, 2, 3]}, **of
        )
        for budget in (32, 64, 128):
            told = {
                "kept_indices": kept,
                "kept_digest": digest(unpacked(kept)),
                "answer": "384q5",
                "token_ids": [1, 2, 9],
            }
            made.add(
                "snapkv",
                budget,
                list(np.where(right < budget // 4, 1.0, 0.0)),
                answer=told | {"fallback": ["window_reduced"]},
                **of,
            )
            made.add("mmshift", budget, list(np.where(right < budget // 3, 1.0, 0.0)), answer=told, **of)
            made.add(EVIL, budget, list(np.where(right < 2, 1.0, 0.0)), **of)
    rows = made.rows()
    made.metrics = metrics_rows(rows.samples, rows.cells)
    image = root / "page.png"
    Image.new("RGB", (320, 160), "white").save(image)
    store = made.write(root / "rows")
    first = made.responses[0]
    asked = {name: first[name] for name in ("prompt_hash", "dataset", "sample_id", "doc_id")}
    boxes = [[1, 0, 0, 1, 0, 0.5], [2, 0, 0, 1, 0.5, 1]]
    asked |= {"model_fingerprint": "m" * 16, "question": f"Where is {HOSTILE}?", "reference": "384q5", "media": 1}
    with Store(store).writer("w") as writer:
        writer.commit([first], asked | {"images": [str(image)], "visual": sum(boxes, [])})
    make([store], root / "report", 12)
    return root / "report"


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Iterator[Any]:
    """(a function that opens a page of the report, what pages asked for and what went wrong in them)."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright here: make installs it")
    folder = report(tmp_path_factory.mktemp("browser"))
    asked: list[str] = []
    wrong: list[str] = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def go(page: str, **options: Any) -> Any:
            tab = browser.new_page(**{"viewport": {"width": 1300, "height": 900}} | options)
            tab.on("request", lambda request: asked.append(request.url))
            tab.on("pageerror", lambda error: wrong.append(f"{page}: {error}"))
            tab.goto(f"file://{folder}/{page}")
            return tab

        yield go, asked, wrong
        browser.close()


def names(tab: Any) -> list[str]:
    return tab.locator("#cells tbody tr td:first-child").all_inner_texts()


def test_every_page_opens_from_a_file_and_asks_for_files_alone(opened) -> None:
    go, asked, wrong = opened
    tab = go("index.html", viewport={"width": 1300, "height": 200})
    assert tab.evaluate("fetch('data/report.js').then(() => 'fetched', () => 'refused')") == "refused"
    assert tab.locator("#leaders tbody tr").count() == 2
    assert not tab.locator("#curve .main-svg").count(), "drawn when it is about to be seen"
    assert tab.locator("#ranks ~ details table").count() == 0
    tab.click("#ranks + details summary")
    assert tab.locator("#ranks + details tbody td:first-child").all_inner_texts() == ["mmshift", "snapkv", EVIL]
    tab.locator("#curve").scroll_into_view_if_needed()
    tab.wait_for_selector("#curve .scatterlayer .trace", state="attached")
    assert tab.locator("#curve .scatterlayer .trace").count() == 4
    words = tab.inner_text("#budget-is")
    tab.focus("#budget")
    tab.keyboard.press("ArrowRight")
    assert (words, tab.inner_text("#budget-is")) == ("64 entries", "128 entries")
    assert tab.inner_text("h2:has(.budget-word)").endswith("128 entries")
    tab.reload()  # the address keeps what was chosen
    assert tab.inner_text("#budget-is") == "128 entries"
    assert all(url.startswith(("file://", "data:", "blob:")) for url in asked) and wrong == []


def test_the_table_filters_hints_and_leads_to_its_cells_to_their_samples_and_to_one(opened) -> None:
    go, _, wrong = opened
    tab = go("table.html")
    tab.wait_for_selector("body[data-ready=table]")
    assert len(names(tab)) == 20 and EVIL in names(tab) and tab.locator("#cells b").count() == 0
    tab.select_option("#filter-dataset", "walk3")
    tab.select_option("#filter-method", "snapkv")
    assert names(tab) == ["snapkv"] * 3 and "3 of 20 lines" in tab.inner_text("#shown")
    tab.hover("#cells tbody tr:nth-child(2)")
    hint = tab.inner_text("#hint")
    for words in (
        "snapkv, 64 entries",
        "n = 40",
        "(95 %)",
        "Audit: all 40 answers within the budget",
        "window_reduced: 40 of 40",
    ):
        assert words in hint, hint
    tab.focus("#cells tbody tr:nth-child(3) a")
    assert "snapkv, 128 entries" in tab.inner_text("#hint")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("body[data-ready=cell]")
    assert tab.inner_text("h1") == "snapkv, 128 entries"
    tab.go_back()
    tab.wait_for_selector("body[data-ready=table]")
    assert names(tab) == ["snapkv"] * 3  # the filters are in the address
    tab.click("#cells tbody tr:nth-child(2) td:nth-child(5)")
    tab.wait_for_selector("body[data-ready=cell]")
    assert tab.inner_text("h1") == "snapkv, 64 entries"
    tab.wait_for_selector("#heads .heatmaplayer image", state="attached")
    tab.click("#to-samples")
    tab.wait_for_selector("body[data-ready=samples]")
    assert tab.locator("#samples tbody tr").count() == 12
    tab.select_option("#b", label="<b>evil</b>, 64 entries")
    tab.select_option("#which", "a")
    assert tab.locator("#samples tbody tr").count() == 10  # full is right, the other only on the first two
    tab.click("#swap")
    assert tab.locator("#samples tbody tr").count() == 0
    tab.select_option("#which", "all")
    tab.click("#samples tbody tr:first-child a")
    tab.wait_for_selector("body[data-ready=sample]")
    assert HOSTILE in tab.inner_text("#question") and HOSTILE in tab.inner_text("#answers") and tab.title() != "run"
    assert {"384q5", "384q592m107."} == set(tab.locator("#answers mark").all_inner_texts())
    assert tab.locator("#kept .cell-maps").count() == 2  # both methods at the smallest budget
    tab.select_option("#kept-cell", label="mmshift, 64 entries")
    tab.locator("#kept-heads").scroll_into_view_if_needed()
    tab.wait_for_selector("#kept-heads .heatmaplayer image", state="attached")
    image, over = (tab.locator(f"#kept {part}").first.bounding_box() for part in ("img", ".over"))
    assert all(abs(image[side] - over[side]) <= 2 for side in ("x", "y", "width", "height"))
    said = tab.inner_text("#kept")
    assert "4 of its 6 entries are visual tokens. The digest in its row proves the choice" in said and wrong == []


def test_dark_light_and_printed_pages_are_readable(opened) -> None:
    go, _, wrong = opened
    shades = {}
    for scheme in ("light", "dark"):
        tab = go("index.html", color_scheme=scheme)
        tab.locator("#curve").scroll_into_view_if_needed()
        tab.wait_for_selector("#curve .xtick text", state="attached")
        ground, text = tab.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        ticks = tab.evaluate("getComputedStyle(document.querySelector('#curve .xtick text')).fill")
        shades[scheme] = ground, text
        assert ticks == text
    assert shades["light"][0] != shades["dark"][0] and shades["light"][1] != shades["dark"][1]
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("#bytes .main-svg, #bytes p").count() and tab.locator("#ranks .main-svg").count(), "all of it"
    assert not tab.locator("nav").is_visible() and not tab.locator("form").first.is_visible()
    assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert tab.pdf()[:4] == b"%PDF" and wrong == []


def test_a_report_that_was_not_copied_whole_says_so(opened) -> None:
    go, _, _ = opened
    tab = go("cell.html#cell=0-nothing")
    tab.wait_for_selector("#problem:not([hidden])")
    assert "data/cells/0-nothing.js is not beside this page" in tab.inner_text("#problem")
