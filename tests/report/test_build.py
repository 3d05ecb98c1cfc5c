"""`mmkv-bench report` on stores written through the store's own interface: what its scripts hold, and whose folder it takes."""

from __future__ import annotations

import base64
import json
import re
import shlex
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmkv_bench.config.compose import compose
from mmkv_bench.datasets.page_data import to_row
from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.plan.planner import make_plan
from mmkv_bench.report.build import build_report
from mmkv_bench.report.cells import Commands
from mmkv_bench.report.folder import Folder
from mmkv_bench.report.formatting import budget_words
from mmkv_bench.report.samples import Prompts, pictures_of
from mmkv_bench.report.scores import ScoreViews
from mmkv_bench.store.response import digest_of_kept, pack_kept, unpack_kept
from mmkv_bench.store.store import Store
from mmkv_bench.tables.build import build
from mmkv_bench.tables.dataset_groups import tables_of_ranks
from mmkv_bench.tables.metric_rows import metrics_rows
from mmkv_bench.tables.stored_rows import load
from mmkv_bench.tiny.pages import make_sample
from tests.cli.setting import verb
from tests.clips import write_clip
from tests.each import each
from tests.tables.examples import Example, zeros_and_ones
from tests.tables.test_cost_figures import scored
from tests.tables.test_costs import STEPS, timed

main = verb("report")


def store(root: Path, datasets: tuple[str, ...] = ("lookup", "walk3")) -> Path:
    made = Example()
    for dataset in datasets:
        made.add("full", None, zeros_and_ones(12, 12), dataset=dataset)
        for seed in (0, 1):
            made.add("random", 64, zeros_and_ones(1 + seed, 12), dataset=dataset, seed=seed)
        made.add("<b>mm", 64, zeros_and_ones(10, 12), dataset=dataset, answer={"fallback": ["window_reduced"]})
        made.add("<b>mm", "0.2", [None, *zeros_and_ones(10, 11)], dataset=dataset)
    return made.write(root)


def inline(page: Path, name: str = "") -> Any:
    """What a page hands to its script: the element of this id, or all charts of the page."""
    attributes = f' id="{name}"' if name else ""
    pattern = f'<script type="application/json"{attributes}>(.*?)</script>'
    found = [json.loads(text) for text in re.findall(pattern, page.read_text(), re.DOTALL)]
    return found[0] if name else found


def figure(report: Path, name: str) -> Any:
    """A chart that several pages show."""
    text = (report / "figures" / f"{name}.js").read_text()
    parts = re.fullmatch(r'mmkv\.put\("([^"]+)",(.*)\);\n', text, re.DOTALL)
    assert parts and parts[1] == name
    return json.loads(parts[2])


def rows(page: Path) -> list[dict[str, str]]:
    """The lines of the table that itables wrote into a page, with what each field shows."""
    options = {
        name: json.loads(text)
        for name, text in re.findall(r'"(table_html|columnDefs|data_json)": (.*?),?\n', page.read_text())
    }
    header = re.findall(r"<th>(.*?)</th>", options["table_html"])
    renders = [column["render"] for column in options["columnDefs"] if "render" in column]
    listed = [re.search(r"categories = (.*?); return type", render) for render in renders]
    texts = [json.loads(match[1]) for match in listed if match]
    texts = [None] * (len(header) - len(texts)) + texts  # names of pages, which the browser makes links
    return [
        {
            name: at if text is None else unescape(text[at - 1])
            for name, text, at in zip(header, texts, line, strict=True)
        }
        for line in json.loads(options["data_json"])
    ]


def test_the_report_shows_what_the_tables_say(tmp_path: Path, capsys) -> None:
    root, out = store(tmp_path / "rows"), tmp_path / "report"
    assert main([str(root), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    tables, lines = build(load(root)), rows(out / "table.html")
    shown = {(line["dataset"], line["method"], line["budget"]): line for line in lines}
    wanted = {
        (t.dataset, label, budget_words(t.axis, budget) or "no budget"): (t, label, budget)
        for t in tables
        for label, budget in t.entries
    }
    assert shown.keys() == wanted.keys()
    for key, (table, label, budget) in wanted.items():
        line, entry = shown[key], table.entries[label, budget]
        ok = "" if entry.scores.n == entry.scores.n_ok else f"{entry.scores.n_ok}/"
        assert line["n"] == f"{ok}{entry.scores.n}"
        assert line["score"] == ("-" if entry.value is None else f"{entry.value:.3f}")
        assert line["95 % interval"] == ("" if entry.low is None else f"[{entry.low:.3f}, {entry.high:.3f}]")
        assert line["rank"] == "-".join(map(str, dict.fromkeys(table.rank(label, budget) or ())))
        assert line["cell"].count("<a href") == max(len(entry.seeds), 1)
    assert "window_reduced: 12 of 12" in {line["remarks"] for line in lines}
    curves = [figure(out, f"{number}-budget")["figure"] for number in range(len(tables))]
    for table, curve in zip(tables, curves, strict=True):
        points = {
            (trace["name"], float(x)): (y, y - trace["error_y"]["arrayminus"][at], y + trace["error_y"]["array"][at])
            for trace in curve["data"]
            if "error_y" in trace
            for at, (x, y) in enumerate(zip(trace["x"], trace["y"], strict=True))
        }
        for (label, budget), entry in table.entries.items():
            if budget and entry.value is not None:
                assert points[label, float(budget)] == pytest.approx((entry.value, entry.low, entry.high), rel=1e-5)
    files = [path for path in out.rglob("*") if path.is_file() and path.name != "report.json"]
    assert f"{sum(path.stat().st_size for path in files) / 1e6:.1f} MB in {len(files)} files" in printed
    load_nothing_from_elsewhere(out)


@pytest.mark.slow
def test_ranks_over_tasks_are_proven_at_each_tasks_share_as_the_command_prints_them(tmp_path: Path) -> None:
    """Six samples apart: p = .031 proves a rank on one task, and none of those of two."""
    made = Example()
    for dataset, metric in (("lookup", "exact_match"), ("walk3", "exact_match"), ("long", "anls")):
        of = {"dataset": dataset, "sample": {"metric": metric}}
        made.add("full", None, zeros_and_ones(40, 40), **of)
        made.add("a", 64, zeros_and_ones(26, 40), **of)
        made.add("b", 64, zeros_and_ones(20, 40), **of)
    root = made.write(tmp_path / "rows")
    tables, views = build(load(root)), ScoreViews()
    assert all((table.rank("a", "64"), table.rank("b", "64")) == ((1, 1), (2, 2)) for table in tables)
    views.add(0, tables, [], str)
    words = [family.words.split(" · ")[0] for family in views.families]
    assert words == ["each task's first metric", "anls", "exact_match"]
    for family, kept in zip(views.families, ("long lookup walk3", "long", "lookup walk3"), strict=True):
        ranks = family.ranks["64"]
        assert ranks.tasks == kept.split() and ranks.methods == ["a", "b"]
        own = [table for table in tables if table.dataset in kept.split()]
        if len(own) == 1:
            assert ranks.ends == [[[1, 1]], [[2, 2]]]
            continue
        assert ranks.ends == [[[1, 2]] * len(own)] * 2 and ranks.means == [[1, 2], [1, 2]]
        (ranks,) = tables_of_ranks(own)
        assert [row[-1] for row in ranks.grids[0].rows] == ["1.0-2.0"] * 2
    build_report([root], tmp_path / "report", 2)
    shown = figure(tmp_path / "report", "ranks-0-0")
    *_, mean = shown["figure"]["data"]
    assert mean["x"] == [1.5, 1.5] and mean["error_x"]["array"] == [0.5, 0.5]
    lines = re.findall(r"<td>(.*?)</td>", shown["numbers"])
    assert lines == ["a", "1.0-2.0", *["1-2"] * 3, "b", "1.0-2.0", *["1-2"] * 3]
    alone = figure(tmp_path / "report", "ranks-1-0")  # of the one task whose metric is anls
    assert re.findall(r"<td>(.*?)</td>", alone["numbers"]) == ["a", "1.0", "1", "b", "2.0", "2"]


def load_nothing_from_elsewhere(report: Path) -> None:
    pages = sorted(report.rglob("*.html"))
    assert pages
    for page in pages:
        for source in re.findall(r'(?:src|href)="([^"#]+)', page.read_text()):
            assert (page.parent / source).is_file(), (page.name, source)


@pytest.mark.slow
def test_an_earlier_report_is_replaced_and_nothing_else_is(tmp_path: Path, monkeypatch) -> None:
    root, out = store(tmp_path / "rows", ("lookup",)), tmp_path / "report"
    build_report([root], out, 1)
    (out / "cells" / "old.html").write_text("old")
    (out / ".making").mkdir()  # what a killed one leaves
    (out / "mine.txt").write_text("mine")
    build_report([root], out, 1)
    assert (
        not (out / "cells" / "old.html").exists()
        and not (out / ".making").exists()
        and (out / "mine.txt").read_text() == "mine"
    )
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not empty and has no earlier report"):
        build_report([root], other, 1)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigError, match="is not a folder"):
        build_report([root], other / "thesis.tex", 1)
    (root / "store.json").write_text('{"schema_version": 99}')
    with pytest.raises(StoreError, match="row schema version 99"):
        build_report([root], out, 1)
    assert rows(out / "table.html")
    (root / "store.json").write_text('{"schema_version": 1}')
    with monkeypatch.context() as patched:
        patched.setattr(Prompts, "of", lambda *_: (_ for _ in ()).throw(StoreError("the disk is gone")))
        with pytest.raises(StoreError, match="the disk is gone"):
            build_report([root], out, 1)
    assert rows(out / "table.html") and (out / "samples").is_dir()  # the earlier one, whole


@each(
    ("arguments", "words"),
    [
        (["--out", "report"], "the following arguments are required: rows"),
        (["nowhere", "--out", "report"], "nowhere is not a folder of result rows"),
        (["nowhere"], "the following arguments are required: --out"),
        (["nowhere", "--out", "report", "--samples", "0"], "'0' is not a whole number >= 1"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and words in err
    assert not (tmp_path / "report").exists()


def test_cells_and_samples_show_their_rows(tmp_path: Path) -> None:
    made = Example()
    full = made.add("full", None, [1, 1, 1, 0, 1], answer={"token_ids": [5, 6, 7], "answer": "abc"})
    cell = made.add(
        "mm", 64, [1, 0, None, 0, 1], answer={"token_ids": [5, 6, 8, 9], "answer": "abd", "kept": [[60, 68]] * 2}
    )
    made.responses[-1]["kept"] = [[64, 64], [62, 66]]
    scored = made.rows()
    made.metrics = metrics_rows(scored.samples, scored.cells)
    root, out = made.write(tmp_path / "rows"), tmp_path / "report"
    report = build_report([root], out, 4)
    assert "Single samples: the first 4 of each dataset are shown, of walk3 (5)" in " ".join(report.left_out)
    page = out / "cells" / f"0-{cell}.html"
    text = page.read_text()
    assert (
        f"Cell {cell} of {root}" in text
        and "<td>budget_entries</td><td>64</td>" in text
        and "<td>config</td>" not in text
    )
    (heads,) = inline(page)
    assert heads == [
        [[61, 67], [60.5, 67.5]],
        [[60, 64], [60, 66]],
        [[64, 68], [62, 68]],
    ]
    chart = figure(out, "heads-2-2-3-1")["figure"]
    assert [button["label"] for button in chart["layout"]["updatemenus"][0]["buttons"]] == [
        "mean",
        "least",
        "most",
    ]
    assert 'data-root="../"' in text and 'data-figure="heads-2-2-3-1"' in text
    alike = figure(out, "store-0")["numbers"]
    assert "<td>model</td><td>tiny</td>" in alike and "budget_entries" not in alike and "<td>model</td>" not in text
    assert "5 answers: 4 ok, 1 oom." in text
    assert "<tr><td>exact_match</td><td>-</td>" in text  # an answer failed
    assert 'href="../samples/0-0.html#b=1"' in text and "its samples (4)" in text
    samples = (out / "samples" / "0-0.html").read_text()
    assert samples.count("have no question") == 4 and "the first 4 of the dataset's 5" in unescape(samples)
    answers = inline(out / "samples" / "0-0.html", "answers-data")
    assert [place.name for place in sorted((out / "cells").iterdir())] == sorted([f"0-{full}.html", f"0-{cell}.html"])
    told = answers["cells"][1]
    assert told["failed"] == [0, 0, 1, 0] and told["values"] == {"exact_match": [1, 0, None, 0]}
    assert told["leaves"] == [2, 2, None, 2]
    one, other = rows(out / "samples" / "0-0-1.html")
    assert (one["method"], one["answer"], one["leaves full"]) == ("full", '<span class="answer">abc</span>', "")
    assert other["answer"] == '<span class="answer">ab<mark title="full: abc">d</mark></span>'
    assert (other["leaves full"], other["against full"]) == ("token 3", "lower score, other words")
    failed = rows(out / "samples" / "0-0-2.html")[1]
    assert "oom</span>" in failed["answer"] and failed["leaves full"] == ""


@pytest.mark.slow
def test_maps_say_which_visual_tokens_each_cell_kept(tmp_path: Path) -> None:
    places = [[np.array([0, 2, 3]), np.array([1, 4])], [np.array([2]), np.array([], dtype=int)]]
    text = pack_kept(places, 6)
    made = Example()
    made.add("full", None, [1, 1])
    cell = made.add("mm", 64, [1, 0], answer={"kept_indices": text, "kept_digest": digest_of_kept(unpack_kept(text))})
    made.responses[-1]["kept_digest"] = "f" * 16
    root, out = made.write(tmp_path / "rows"), tmp_path / "report"
    boxes = [[1, 0, 0, 0.5, 0, 1], [2, 0, 0.5, 1, 0, 1], [3, -1, -1, -1, -1, -1]]
    row = {name: made.responses[0][name] for name in ("prompt_hash", "dataset", "sample_id", "doc_id")}
    row |= {
        "model_fingerprint": "m" * 16,
        "question": "<image>\nWhere?",
        "reference": "here",
        "media": 1,
        "visual": sum(boxes, []),
    }
    image = tmp_path / "cat.png"
    Image.new("RGB", (900, 300), "red").save(image)
    again = {name: made.responses[0][name] for name in made.responses[0]}
    with Store(root).writer("w") as writer:
        writer.commit([again], row | {"images": [str(image)]})
    build_report([root], out, 5)
    page = out / "samples" / "0-0-0.html"
    text = unescape(page.read_text())
    assert '<pre id="question"><image>\nWhere?</pre>' in text and '<pre id="reference">here</pre>' in text
    shown = re.search(r'<img src="../(images/[^"]+)"', text)
    with Image.open(out / shown[1]) as picture:
        assert picture.size == (672, 224)
    kept = inline(page, "kept-data")  # one prompt hash: both samples ask the same
    assert kept["tokens"] == 3 and list(kept["bits"]) == ["1"]
    assert kept["figures"][0]["data"][0]["y"] == [0, 0.5, 1] and kept["figures"][0]["data"][0]["x"] == [0, 1]
    assert kept["places"] == [[[[0]], [[1]]]]
    assert "4 of its 6 entries are visual tokens. The row's digest confirms these entries." in text
    assert inline(page)[0] == [[[2, 1], [1, 0]]]
    assert [[base64.b64decode(head)[0] for head in layer] for layer in kept["bits"]["1"]] == [
        [0b011 << 5, 0b100 << 5],
        [0b010 << 5, 0],
    ]
    assert "digest belongs to OTHER entries" in (out / "samples" / "0-0-1.html").read_text() and cell in text
    frames = pictures_of(str(write_clip(tmp_path / "clip.mkv", frames=9)))
    assert [frame.size for frame in frames] == [(64, 48)] * 4 and len({frame.getpixel((9, 9)) for frame in frames}) == 4
    image.unlink()
    build_report([root], out, 5)
    assert "Images or videos that cannot be read now: cat.png." in page.read_text()


@pytest.mark.slow
def test_a_report_of_groups_that_were_read_one_by_one_is_the_same(tmp_path: Path, monkeypatch) -> None:
    root, read = store(tmp_path / "rows"), []
    build_report([root], tmp_path / "whole", 1)
    monkeypatch.setattr("mmkv_bench.report.store_pages.AT_ONCE", 1)
    answers = Store.responses

    def recording(self, cells=None, columns=None, coded=False):
        read.append((cells, columns))
        return answers(self, cells, columns, coded)

    monkeypatch.setattr(Store, "responses", recording)
    build_report([root], tmp_path / "parts", 1)
    together = [set(cells) for cells, columns in read if columns and "kept_indices" in columns]
    assert len(together) == 2 and not set.intersection(*together), "no two groups at once"
    for path in (path for path in (tmp_path / "whole").rglob("*") if path.suffix in (".html", ".js")):
        assert path.read_bytes() == (tmp_path / "parts" / path.relative_to(tmp_path / "whole")).read_bytes(), path


@pytest.mark.slow
def test_scores_meet_the_times_of_passes_of_another_store(tmp_path: Path) -> None:
    score, speed, out = scored(tmp_path / "score"), timed(tmp_path / "speed", STEPS), tmp_path / "report"
    report = build_report([score, speed], out, 5)
    assert "Times per token of 2 of 5 lines come from passes of 64 prompt tokens, batch 2." in report.left_out
    assert (out / "passes.html").is_file()
    shown = {(row["method"], row["budget"]): row["ms/token"] for row in rows(out / "table.html")}
    assert {key: time for key, time in shown.items() if time != "-"} == {
        ("snapkv", "10 %"): "100",
        ("full", "no budget"): "300",
    }
    traces = figure(out, "0-bytes")["figure"]["data"]
    assert sorted(sum((trace["x"] for trace in traces), [])) == [100, 120, 200, 220, 1000]


@pytest.mark.slow
def test_an_embedded_page_is_drawn_again_where_its_prompt_is_still_the_same(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "report")
    folder.begin()
    sample = make_sample("lookup", "small", "test", 3)
    right = Prompts(folder, {}).of(sample.sample_id, to_row(sample)["prompt_hash"])
    assert (right.question, right.reference, right.missing) == (sample.question, sample.answer, "")
    other = Prompts(folder, {}).of(sample.sample_id, "0" * 64)
    folder.finish()
    with Image.open(tmp_path / "report" / right.images[0]) as image:
        assert image.size == sample.images[0].size
    assert (other.question, other.images) == (None, []) and "differs from the page that was answered" in other.missing


@pytest.mark.slow
def test_the_command_of_a_cell_plans_that_very_cell() -> None:
    planned(("ablations", None))


@pytest.mark.full
def test_commands_of_committed_cells_plan_them() -> None:
    planned(
        ("large", "snapkv"),
        *((name, method) for name in ("methods", "readings") for method in ("full", "prefixkv", "kivi", "mmshift")),
    )


def planned(*asked: tuple[str, str | None]) -> None:
    """One cell of each committed store and method; None: of a variant that its run defined."""
    for name, method in asked:
        found = Store(f"results/tiny/{name}").cells().to_pylist()
        variants = {row["cell"]: json.loads(row["config"])["variants"] for row in found} if method is None else {}
        row = next(
            row for row in found if (row["method"] == method if method else row["method"] in variants[row["cell"]])
        )
        command = Commands().of(row, row["config"])
        plan = make_plan(compose(shlex.split(command["line"])[1:]))
        assert row["cell"] in plan.names, command
