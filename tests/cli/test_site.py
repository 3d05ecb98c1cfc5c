"""The documentation as a site: every link leads somewhere, every page of docs/ and every room is in it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.setting import CHECKOUT

ROOT = Path(__file__).parents[2]
HOOK = ROOT / "tools" / "site" / "hook.py"


def build(folder: Path, config: Path) -> subprocess.CompletedProcess:
    """A strict build, with a proxy that refuses whatever would be fetched."""
    closed = "http://127.0.0.1:9"
    environment = CHECKOUT | {"NO_MKDOCS_2_WARNING": "1", "HTTP_PROXY": closed, "HTTPS_PROXY": closed}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", config, "-d", folder]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.full
def test_the_site_builds_offline_with_every_page_and_room(tmp_path):
    ended = build(tmp_path / "site", ROOT / "tools" / "site" / "mkdocs.yml")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pages = {file.relative_to(tmp_path / "site").as_posix() for file in (tmp_path / "site").rglob("*.html")}
    assert pages >= {f"{file.stem}.html" for file in (ROOT / "docs").glob("*.md")}
    assert pages >= {f"api/{file.parent.name}.html" for file in (ROOT / "mmkv_bench").glob("*/__init__.py")}
    shown = (tmp_path / "site" / "api" / "compression.html").read_text()
    assert "Divides a budget among layers and KV heads" in shown
    assert "docs/images" not in (tmp_path / "site" / "index.html").read_text()


def test_a_link_to_a_file_that_is_not_there_fails():
    spec = importlib.util.spec_from_file_location("hook", HOOK)
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="methods.md"))
    assert "conf/config.yaml" in hook.on_page_markdown("[the defaults](../conf/config.yaml)", page, None, None)
    with pytest.raises(FileNotFoundError, match="no/such/file.md"):
        hook.on_page_markdown("[gone](../no/such/file.md)", page, None, None)
