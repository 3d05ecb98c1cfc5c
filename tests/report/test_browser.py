"""A report in a real browser, opened as a file: filters, hints, clicks, the keyboard, colour schemes, print."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmkv_bench.config.files import conf_dir
from mmkv_bench.report.build import build_report
from mmkv_bench.store.response import digest_of_kept, pack_kept, unpack_kept
from mmkv_bench.store.store import Store
from mmkv_bench.tables.metric_rows import metrics_rows
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
    kept = pack_kept([[np.array([0, 2]), np.array([1])]] * 2, 4)
    for dataset in ("lookup", "walk3"):
        of = {"dataset": dataset}
        made.add(
            "full", None, list(np.where(right < 38, 1.0, 0.0)), answer={"answer": HOSTILE, "token_ids": [1, 2, 3]}, **of
        )
        for budget in (32, 64, 128):
            told = {
                "kept_indices": kept,
                "kept_digest": digest_of_kept(unpack_kept(kept)),
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
    build_report([store], root / "report", 12)
    build_report([conf_dir().parent / "results" / "tiny" / "efficiency"], root / "timed", 1)
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
            path = folder / page if "*" not in page else min(folder.glob(page))
            tab.goto(f"file://{path}")
            return tab

        yield go, asked, wrong
        browser.close()


def methods(tab: Any) -> list[str]:
    return tab.locator("#cells tbody tr td:nth-child(2)").all_inner_texts()


def choose(tab: Any, table: str, column: int, value: str) -> None:
    """Filter a table by a value of one of its columns."""
    tab.click(f"#{table} th:nth-child({column}) .dtcc-button_dropdown")
    tab.locator(".dtcc-dropdown .dtcc-list-buttons button").get_by_text(value, exact=True).click()
    tab.keyboard.press("Escape")


def test_every_page_opens_from_a_file_and_asks_for_files_alone(opened) -> None:
    go, asked, wrong = opened
    tab = go("index.html")
    assert tab.evaluate("fetch('report.js').then(() => 'fetched', () => 'refused')") == "refused"
    assert tab.locator("table.plain").first.locator("tbody tr").count() == 2
    tab.wait_for_selector("body[data-ready]")
    shown = tab.locator(".chart[data-figure$='-budget']:visible")
    assert shown.count() == 1 and shown.locator(".scatterlayer .trace").count() == 4
    hidden = tab.locator(".chart[data-figure$='-budget']:not([data-drawn])")
    assert hidden.count() == 1, "drawn when it is chosen"
    tab.select_option("#dataset", label="walk3")
    tab.wait_for_selector(".chart[data-figure='1-budget'] .scatterlayer .trace", state="attached")
    tab.click(".ranks:visible + details summary")
    ranked = tab.locator(".ranks:visible + details tbody td:first-child")
    assert ranked.all_inner_texts() == ["mmshift", "snapkv", EVIL]
    chosen = "document.getElementById('budget').selectedOptions[0].text"
    tab.focus("#budget")
    words = tab.evaluate(chosen)
    tab.keyboard.press("ArrowDown")
    assert (words, tab.evaluate(chosen)) == ("64 entries", "128 entries")
    tab.wait_for_function(
        "document.querySelector('section[data-of=budget]:not([hidden]) h2').innerText.endsWith('128 entries')"
    )
    tab.reload()  # the address keeps what was chosen
    tab.wait_for_selector("body[data-ready]")
    assert tab.evaluate(chosen) == "128 entries" and tab.input_value("#dataset") == "1"
    assert all(url.startswith(("file://", "data:", "blob:")) for url in asked) and wrong == []


def test_the_table_filters_and_leads_to_its_cells_to_their_samples_and_to_one(opened) -> None:
    go, _, wrong = opened
    tab = go("table.html")
    tab.wait_for_selector("#cells tbody a")
    assert len(methods(tab)) == 20 and EVIL in methods(tab) and tab.locator("#cells b").count() == 0
    headers = tab.locator("#cells thead th").all_inner_texts()
    choose(tab, "cells", headers.index("dataset") + 1, "walk3")
    choose(tab, "cells", headers.index("method") + 1, "snapkv")
    assert methods(tab) == ["snapkv"] * 3 and "3 of 3 entries (filtered from 20" in tab.inner_text("#main")
    line = tab.inner_text("#cells tbody tr:nth-child(2)").split("\t")
    told = dict(zip(headers, line, strict=True))
    assert (told["method"], told["budget"], told["n"]) == ("snapkv", "64 entries", "40")
    assert told["audit"] == "all 40 answers within the budget" and told["remarks"] == "window_reduced: 40 of 40"
    tab.focus("#cells tbody tr:nth-child(3) a")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#to-samples")
    assert tab.inner_text("h1") == "snapkv, 128 entries"
    tab.go_back()
    tab.wait_for_function("document.querySelectorAll('#cells tbody a').length === 3")  # the tab keeps its filters
    assert methods(tab) == ["snapkv"] * 3
    tab.click("#cells tbody tr:nth-child(2) a")
    tab.wait_for_selector("body[data-ready]")
    assert tab.inner_text("h1") == "snapkv, 64 entries"
    tab.wait_for_selector(".chart:visible .heatmaplayer image", state="attached")
    tab.click("#to-samples")
    tab.wait_for_selector("body[data-ready]")
    assert tab.evaluate("document.getElementById('b').selectedOptions[0].text") == "snapkv, 64 entries"
    samples = tab.locator("#samples tbody tr:visible")
    assert samples.count() == 12
    tab.select_option("#b", label="<b>evil</b>, 64 entries")
    tab.select_option("#which", "a")
    assert samples.count() == 10  # full is right, the other only on the first two
    tab.click("#swap")
    assert samples.count() == 0 and tab.inner_text("#shown") == "0 of 12 samples"
    tab.select_option("#which", "all")
    tab.click("#samples tbody tr:first-child a")
    tab.wait_for_selector("body[data-ready]")
    assert HOSTILE in tab.inner_text("#question") and HOSTILE in tab.inner_text("#answers") and tab.title() != "run"
    assert {"384q5", "384q592m107."} == set(tab.locator("#answers mark").all_inner_texts())
    assert tab.locator("#answers tbody tr").count() == 10
    headers = tab.locator("#answers thead th").all_inner_texts()
    choose(tab, "answers", headers.index("against full") + 1, "same score, other words")
    assert tab.locator("#answers tbody tr").count() < 10
    maps = tab.locator(".map:visible")
    assert maps.count() == 2  # both methods at the smallest budget
    tab.select_option("#kept", label="mmshift, 64 entries")
    tab.wait_for_selector(".chart:visible .heatmaplayer image", state="attached")
    assert maps.count() == 1
    image, over = (maps.locator(part).bounding_box() for part in (".imagelayer image", ".heatmaplayer image"))
    assert all(abs(image[side] - over[side]) <= 2 for side in ("x", "y", "width", "height"))
    words = tab.inner_text(".cell-maps:visible")
    assert "4 of its 6 entries are visual tokens. The row's digest confirms these entries" in words
    assert "yellow: by 50 %" in tab.inner_text("#kept-scale")
    tab.select_option("#layer", "0")
    tab.wait_for_function("document.getElementById('kept-scale').innerText.includes('none of 2 layers')")
    assert wrong == []


def test_dark_light_and_printed_pages_are_readable(opened) -> None:
    go, _, wrong = opened
    shades = {}
    tick = ".chart[data-figure='0-budget'] .xtick text"
    for scheme in ("light", "dark"):
        tab = go("index.html", color_scheme=scheme)
        tab.wait_for_selector(tick, state="attached")
        ground, text = tab.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert tab.evaluate(f'getComputedStyle(document.querySelector("{tick}")).fill') == text
        table = go("table.html", color_scheme=scheme)
        table.wait_for_selector("#cells tbody a")
        assert table.evaluate("getComputedStyle(document.querySelector('#cells td')).color") == text
        grounds = table.evaluate(
            "[...document.querySelectorAll('.dt-container, #cells')].map((node) => getComputedStyle(node).backgroundColor)"
        )
        assert {*grounds} <= {ground, "rgba(0, 0, 0, 0)"}
        shades[scheme] = ground, text
    assert shades["light"][0] != shades["dark"][0] and shades["light"][1] != shades["dark"][1]
    tab.wait_for_selector("body[data-ready]")
    tab.emulate_media(media="print")
    assert not tab.locator("nav").is_visible() and not tab.locator("form").first.is_visible()
    assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert tab.evaluate(f'getComputedStyle(document.querySelector("{tick}")).fill') == "rgb(0, 0, 0)"
    assert tab.pdf()[:4] == b"%PDF" and wrong == []
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    tab.wait_for_function("document.querySelector('.js-plotly-plot .main-svg').getAttribute('width') === '700'")
    table.set_viewport_size({"width": 700, "height": 900})  # A4 without its margins
    table.emulate_media(media="print")
    assert table.evaluate("document.querySelector('#cells').getBoundingClientRect().right") <= 700


@pytest.mark.parametrize("page", ["index.html", "table.html", "cells/*.html", "samples/0-0.html", "samples/0-0-0.html"])
def test_no_page_is_wider_than_a_telephone(opened, page: str) -> None:
    go, _, wrong = opened
    tab = go(page, viewport={"width": 320, "height": 800})
    tab.wait_for_selector("#cells a" if page == "table.html" else "body[data-ready]")
    assert tab.evaluate("document.documentElement.scrollWidth") == 320 and wrong == []
    buttons = [button.bounding_box() for button in tab.locator(".updatemenu-button").all()]
    assert all(box["x"] + box["width"] <= 320 for box in buttons) and bool(buttons) == page.startswith("cells")
    tab.set_viewport_size({"width": 900, "height": 800})
    tab.wait_for_timeout(500)  # plotly waits before it resizes
    heights = "[...document.querySelectorAll('.chart .main-svg:first-child')].map((node) => "
    heights += "node.closest('.chart').clientHeight - node.getBoundingClientRect().height)"
    assert all(rest >= 0 for rest in tab.evaluate(heights)), "no chart lies over what follows it"


PAGES = ("index.html", "table.html", "cells/*.html", "samples/0-0.html", "samples/0-0-0.html")
SCREENS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "telephone": {"viewport": {"width": 320, "height": 800}},
    "400 %": {"viewport": {"width": 320, "height": 256}, "device_scale_factor": 4},
}


def test_no_page_breaks_a_rule_of_axe_and_no_chart_has_a_button_that_uploads_it(opened) -> None:
    go, _, wrong = opened
    package = pytest.importorskip("axe_playwright_python", reason="no axe here: make installs it")
    axe = Path(package.__file__).with_name("axe.min.js").read_text()
    broken, buttons = [], set()
    for screen, options in SCREENS.items():
        for page in (*PAGES, "../timed/passes.html"):
            tab = go(page, **options)
            tab.wait_for_selector("#cells a" if page == "table.html" else "body[data-ready]")
            tab.evaluate(axe)
            rules = tab.evaluate("axe.run().then((result) => result.violations)")
            broken += [(screen, page, rule["id"], node["target"]) for rule in rules for node in rule["nodes"]]
            names = "[...document.querySelectorAll('.modebar-btn')].map((button) => button.dataset.title)"
            buttons |= {*tab.evaluate(names)}
            tab.close()
    assert broken == wrong == []
    assert buttons == {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}


def test_a_report_that_was_not_copied_whole_says_so(opened, tmp_path: Path) -> None:
    go, _, _ = opened
    folder = Path(go("index.html").url.removeprefix("file://")).parent
    copy = shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("0-budget.js"))
    tab = go(str(copy / "index.html"))
    tab.wait_for_selector("#problem:not([hidden])")
    assert "figures/0-budget.js is not beside this page" in tab.inner_text("#problem")
