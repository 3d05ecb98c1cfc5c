"""The pages of methods are what the registry gives, and every method file says enough for its page."""

from __future__ import annotations

from functools import cache

import pytest
import yaml

from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.files import conf_dir, options
from mmkv_bench.config.method_parts import expanded
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods.build import build_compressor
from mmkv_bench.methods.node import flat_parameters, under_reading
from tests.each import each
from tools import methods_page

NAMES = options("method")


@cache
def nodes():
    return method_defaults(NAMES)


@pytest.mark.full
@each("name", NAMES)
def test_every_method_says_what_it_is_about_and_explains_its_parameters(name):
    made = methods_page.read(name, nodes()[name])
    assert all(made.about[key].strip() for key in methods_page.ABOUT)
    assert {p.name for p in made.parameters} == set(flat_parameters(nodes()[name]))
    assert all(len(p.meaning) > 3 and p.default for p in made.parameters)


@pytest.mark.full
@each("name", NAMES)
def test_about_is_no_parameter_and_changes_no_compressor(name):
    node = nodes()[name]
    assert "about" not in flat_parameters(under_reading(name, node, "paper"))
    if methods_page.is_open(node):
        assert name in ("custom", "kvpress"), "only these are built from what the user names"
        return
    bare = {key: value for key, value in node.items() if key != "about"}
    assert build_compressor(name, bare, "paper") == build_compressor(name, node, "paper")


@pytest.mark.full
def test_the_committed_pages_are_what_the_command_writes(tmp_path, capsys):
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "gone.md").write_text("a method that is no more")
    assert methods_page.main([str(tmp_path)]) == 0
    made = {file.relative_to(tmp_path): file.read_text() for file in tmp_path.rglob("*.md")}
    docs = conf_dir().parent / "docs"
    committed = [docs / "methods.md", *(docs / "methods").glob("*.md")]
    assert made == {file.relative_to(docs): file.read_text() for file in committed}, "run `make docs`"
    assert methods_page.main(["--check"]) == 0
    (tmp_path / "methods.md").write_text("old")
    assert methods_page.main(["--check", str(tmp_path)]) == 1
    assert "methods.md: out of date; run `make docs`" in capsys.readouterr().out


@pytest.mark.slow
def test_the_pages_show_defaults_and_what_released_sets():
    pages = methods_page.pages()
    page = pages["methods/snapkv.md"]
    assert page.startswith("# snapkv\n")
    assert "| `window` | `32` | `1` |" in page and "`layer`" in page and "arXiv 2404.14469" in page
    assert pages.keys() == {"methods.md", *(f"methods/{name}.md" for name in NAMES)}
    assert all(f"| [{name}](methods/{name}.md) |" in pages["methods.md"] for name in NAMES)


@each(
    ("change", "words"),
    [
        (("  cost: ", "  price: "), "says nothing under about.cost"),
        (("idea: attention of the last row", "idea:"), "says nothing under about.idea"),
        (("selector: ", "width: 3\nselector: "), "nobody says what the parameter width means"),
    ],
)
def test_a_method_that_does_not_explain_itself_is_refused(tmp_path, monkeypatch, change, words):
    source = (conf_dir() / "method" / "last_query.yaml").read_text()
    source = source.replace(source.partition("  idea: ")[2].splitlines()[0], "attention of the last row", 1)
    assert change[0] in source
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "last_query.yaml").write_text(source.replace(*change))
    monkeypatch.setattr(methods_page, "conf_dir", lambda: tmp_path)
    node = expanded("last_query", yaml.safe_load((tmp_path / "method" / "last_query.yaml").read_text()))
    monkeypatch.setattr("mmkv_bench.config.compose.method_defaults", lambda names: {names[0]: node})
    with pytest.raises(ConfigError, match=words):
        methods_page.read("last_query")
