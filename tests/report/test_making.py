"""`mmkv-bench report` on stores written through the store's own interface: what its scripts hold, and whose folder it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.report.making import make
from mmkv_bench.tables.build import build
from mmkv_bench.tables.rows import load
from tests.cli.setting import verb
from tests.each import each
from tests.tables.examples import Example, zeros_and_ones

main = verb("report")


def store(root: Path) -> Path:
    made = Example()
    for dataset in ("lookup", "walk3"):
        made.add("full", None, zeros_and_ones(12, 12), dataset=dataset)
        for seed in (0, 1):
            made.add("random", 64, zeros_and_ones(1 + seed, 12), dataset=dataset, seed=seed)
        made.add("<b>mm", 64, zeros_and_ones(10, 12), dataset=dataset, answer={"fallback": ["window_reduced"]})
        made.add("<b>mm", "0.2", [None, *zeros_and_ones(10, 11)], dataset=dataset)
    return made.write(root)


def value(report: Path, name: str) -> Any:
    """What a script in `data/` hands to the pages."""
    text = (report / "data" / f"{name}.js").read_text()
    found = re.fullmatch(r'mmkv\.put\("([^"]+)",(.*)\);\n', text, re.DOTALL)
    assert found and found[1] == name
    return json.loads(found[2])


def rows(columns: dict[str, Any]) -> list[dict[str, Any]]:
    plain = {
        name: column if isinstance(column, list) else [column["of"][at] for at in column["at"]]
        for name, column in columns.items()
    }
    return [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]


def test_the_report_shows_what_the_tables_say(tmp_path: Path, capsys) -> None:
    root, out = store(tmp_path / "rows"), tmp_path / "report"
    assert main([str(root), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    content, tables = value(out, "report"), build(load(root))
    assert [(view["dataset"], view["axis"]) for view in content["views"]] == [(t.dataset, t.axis) for t in tables]
    shown = {(row["view"], row["method"], row["budget"]): row for row in rows(content["entries"])}
    assert len(shown) == sum(len(table.entries) for table in tables)
    for view, table in enumerate(tables):
        for (label, budget), entry in table.entries.items():
            row = shown[view, label, budget]
            assert (row["n"], row["n_ok"]) == (entry.scores.n, entry.scores.n_ok)
            for name in ("value", "low", "high"):
                wanted = getattr(entry, name)
                assert row[name] == (None if wanted is None else pytest.approx(wanted, rel=1e-5))
            assert (row["rank_low"], row["rank_high"]) == (table.rank(label, budget) or (None, None))
            assert len(row["cells"]) == max(len(entry.seeds), 1)
    assert "window_reduced: 12 of 12" in {row["fallbacks"] for row in shown.values()}
    files = [path for path in out.rglob("*") if path.is_file() and path.name != "report.json"]
    assert f"{sum(path.stat().st_size for path in files) / 1e6:.1f} MB in {len(files)} files" in printed
    assert value(out, "size") in printed
    load_nothing_from_elsewhere(out)


def load_nothing_from_elsewhere(report: Path) -> None:
    pages = sorted(report.glob("*.html"))
    assert pages
    for page in pages:
        for source in re.findall(r'(?:src|href)="([^"#]+)', page.read_text()):
            assert (page.parent / source).is_file(), (page.name, source)


def test_an_earlier_report_is_replaced_and_nothing_else_is(tmp_path: Path, capsys) -> None:
    root, out = store(tmp_path / "rows"), tmp_path / "report"
    make([root], out, 5)
    (out / "data" / "old.js").write_text("old")
    (out / "mine.txt").write_text("mine")
    make([root], out, 5)
    assert not (out / "data" / "old.js").exists() and (out / "mine.txt").read_text() == "mine"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not empty and holds no report of ours"):
        make([root], other, 5)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigError, match="is no folder"):
        make([root], other / "thesis.tex", 5)
    (root / "store.json").write_text('{"schema_version": 99}')
    with pytest.raises(StoreError, match="row schema version 99"):
        make([root], out, 5)
    assert value(out, "report")["views"]


@each(
    ("arguments", "words"),
    [
        (["--out", "report"], "the following arguments are required: rows"),
        (["nowhere", "--out", "report"], "nowhere is no folder of result rows"),
        (["nowhere"], "the following arguments are required: --out"),
        (["nowhere", "--out", "report", "--samples", "0"], "'0' is no whole number >= 1"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and words in err
    assert not (tmp_path / "report").exists()
