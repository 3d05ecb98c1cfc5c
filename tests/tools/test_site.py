"""Promise: the site is built without a connection, and from a folder its search finds words and asks no server for anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium, then this runs")
def test_the_search_of_a_site_in_a_folder_finds_words(tmp_path):
    api = pytest.importorskip("playwright.sync_api", reason="no playwright here: make installs it")
    build = [
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-f",
        str(ROOT / "tools/site/mkdocs.yml"),
        "-d",
        str(tmp_path),
    ]
    ended = subprocess.run([sys.executable, *build], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    asked: list[str] = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(f"file://{tmp_path}/index.html")
        tab.focus(".md-search__input")
        tab.keyboard.type("eviction", delay=30)
        tab.wait_for_selector(".md-search-result__item", timeout=60_000)
        assert tab.locator(".md-search-result__item").count() >= 3
        assert "eviction" in tab.locator(".md-search-result__list").inner_text().lower()
        browser.close()
    assert asked and all(address.startswith("file://") for address in asked)
