"""`mmkv-bench report` on stores written through the store's own interface: what its scripts hold, and whose folder it takes."""

from __future__ import annotations

import base64
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mmkv_bench.config.compose import compose
from mmkv_bench.datasets.page_data import to_row
from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.plan.plan import make_plan
from mmkv_bench.report.cells import first_difference
from mmkv_bench.report.command import Commands
from mmkv_bench.report.folder import Folder
from mmkv_bench.report.build import make
from mmkv_bench.report.prompts import Prompts, pictures_of
from mmkv_bench.store.kept_entries import digest, packed, unpacked
from mmkv_bench.store.store import Store
from mmkv_bench.tables.build import build
from mmkv_bench.tables.metrics import metrics_rows
from mmkv_bench.tables.rows import load
from mmkv_bench.tables.task_ranks import tables_of_ranks
from mmkv_bench.tiny.pages import make_sample
from tests.cli.setting import verb
from tests.clips import write_clip
from tests.each import each
from tests.tables.examples import Example, zeros_and_ones
from tests.tables.test_cost_figures import scored
from tests.tables.test_costs import STEPS, timed

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


def test_ranks_over_tasks_are_proven_at_each_tasks_share_as_the_command_prints_them(tmp_path: Path) -> None:
    """Six samples apart: p = .031 proves a rank on one task, and none of those of two."""
    made = Example()
    for dataset, metric in (("lookup", "exact_match"), ("walk3", "exact_match"), ("long", "anls")):
        of = {"dataset": dataset, "sample": {"metric": metric}}
        made.add("full", None, zeros_and_ones(40, 40), **of)
        made.add("a", 64, zeros_and_ones(26, 40), **of)
        made.add("b", 64, zeros_and_ones(20, 40), **of)
    root, out = made.write(tmp_path / "rows"), tmp_path / "report"
    make([root], out, 5)
    content, tables = value(out, "report"), build(load(root))
    assert all((table.rank("a", "64"), table.rank("b", "64")) == ((1, 1), (2, 2)) for table in tables)
    words = [one["words"].split(" · ")[0] for one in content["families"]]
    assert words == ["each task's first metric", "anls", "exact_match"]
    for one, kept in zip(content["families"], ("long lookup walk3", "long", "lookup walk3"), strict=True):
        shown = one["ranks"]["64"]
        assert [content["views"][view]["dataset"] for view in shown["views"]] == kept.split()
        own = [table for table in tables if table.dataset in kept.split()]
        if len(own) == 1:
            assert shown["ends"] == [[[1, 1], [2, 2]]]
            continue
        assert shown["ends"] == [[[1, 2], [1, 2]]] * len(own) and shown["means"] == [[1, 2], [1, 2]]
        (ranks,) = tables_of_ranks(own)
        assert [row[-1] for row in ranks.grids[0].rows] == ["1.0-2.0"] * 2


def load_nothing_from_elsewhere(report: Path) -> None:
    pages = sorted(report.glob("*.html"))
    assert pages
    for page in pages:
        for source in re.findall(r'(?:src|href)="([^"#]+)', page.read_text()):
            assert (page.parent / source).is_file(), (page.name, source)


def test_an_earlier_report_is_replaced_and_nothing_else_is(tmp_path: Path, monkeypatch) -> None:
    root, out = store(tmp_path / "rows"), tmp_path / "report"
    make([root], out, 5)
    (out / "data" / "old.js").write_text("old")
    (out / ".making").mkdir()  # what a killed one leaves
    (out / "mine.txt").write_text("mine")
    make([root], out, 5)
    assert (
        not (out / "data" / "old.js").exists()
        and not (out / ".making").exists()
        and (out / "mine.txt").read_text() == "mine"
    )
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
    (root / "store.json").write_text('{"schema_version": 1}')
    with monkeypatch.context() as patched:
        patched.setattr(Prompts, "of", lambda *_: (_ for _ in ()).throw(StoreError("the disk is gone")))
        with pytest.raises(StoreError, match="the disk is gone"):
            make([root], out, 5)
    assert value(out, "report")["views"] and (out / "data" / "groups").is_dir()  # the earlier one, whole


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


def test_cells_and_samples_show_their_rows(tmp_path: Path) -> None:
    made = Example()
    full = made.add("full", None, [1, 1, 1, 0, 1], answer={"token_ids": [5, 6, 7], "answer": "abc"})
    cell = made.add(
        "mm", 64, [1, 0, None, 0, 1], answer={"token_ids": [5, 6, 8, 9], "answer": "abd", "kept": [[60, 68]] * 2}
    )
    made.responses[-1]["kept"] = [[64, 64], [62, 66]]
    rows = made.rows()
    made.metrics = metrics_rows(rows.samples, rows.cells)
    root, out = made.write(tmp_path / "rows"), tmp_path / "report"
    found = make([root], out, 4)
    assert "Single samples: the first 4 of each dataset are shown, of walk3 (5)" in " ".join(found.left_out)
    told = value(out, f"cells/0-{cell}")
    assert told["hash"] == cell and told["row"]["budget_entries"] == 64 and "config" not in told["row"]
    assert told["kept"] == [[[61, 67], [60.5, 67.5]], [[60, 64], [60, 66]], [[64, 68], [62, 68]]]
    assert told["counted"]["ended"] == {"oom": 1, "ok": 4} and told["counted"]["answers"] == 5
    assert told["answers"]["status"] == ["ok", "ok", "oom", "ok"]
    assert told["answers"]["differs"] == [2, 2, None, 2]
    assert told["answers"]["values"] == {"exact_match": [1, 0, None, 0]}
    assert [score["metric"] for score in told["scores"]] == ["exact_match"]
    group = value(out, f"groups/{told['group']}")
    assert [(each["name"], each["full"]) for each in group["cells"]] == [(f"0-{full}", True), (f"0-{cell}", False)]
    assert (len(group["samples"]), group["total"]) == (4, 5)
    assert all("hold no question" in sample["missing"] for sample in group["samples"])
    one = value(out, f"answers/{told['group']}-2")
    assert (one["status"], one["answer"], one["differs"]) == (["ok", "oom"], ["abc", None], [None, None])


def test_maps_say_which_visual_tokens_each_cell_kept(tmp_path: Path) -> None:
    places = [[np.array([0, 2, 3]), np.array([1, 4])], [np.array([2]), np.array([], dtype=int)]]
    text = packed(places, 6)
    made = Example()
    made.add("full", None, [1, 1])
    cell = made.add("mm", 64, [1, 0], answer={"kept_indices": text, "kept_digest": digest(unpacked(text))})
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
    make([root], out, 5)
    group = value(out, "groups/0-0")
    first, second = group["samples"]
    assert (first["question"], first["reference"], first["missing"]) == ("<image>\nWhere?", "here", "")
    with Image.open(out / first["images"][0]) as shown:
        assert shown.size == (672, 224)
    assert first["kept"] and second["kept"]  # one prompt hash: both samples ask the same
    told = value(out, "kept/0-0-0")
    assert told["visual"] == [[0, 0, 0.5, 0, 1], [0, 0.5, 1, 0, 1], [-1] * 5]
    assert list(told["cells"]) == ["1"] and group["cells"][1]["name"] == f"0-{cell}"
    mine = told["cells"]["1"]
    assert (mine["entries"], mine["visual"], mine["proven"]) == ([[3, 2], [1, 0]], [[2, 1], [1, 0]], True)
    assert [[base64.b64decode(head)[0] for head in layer] for layer in mine["bits"]] == [
        [0b011 << 5, 0b100 << 5],
        [0b010 << 5, 0],
    ]
    assert value(out, "kept/0-0-1")["cells"]["1"]["proven"] is False
    frames = pictures_of(str(write_clip(tmp_path / "clip.mkv", frames=9)))
    assert [frame.size for frame in frames] == [(64, 48)] * 4 and len({frame.getpixel((9, 9)) for frame in frames}) == 4
    image.unlink()
    make([root], out, 5)
    assert value(out, "groups/0-0")["samples"][0]["missing"] == "Images or videos that cannot be read now: cat.png."


def test_a_report_of_groups_that_were_read_one_by_one_is_the_same(tmp_path: Path, monkeypatch) -> None:
    root, read = store(tmp_path / "rows"), []
    make([root], tmp_path / "whole", 5)
    monkeypatch.setattr("mmkv_bench.report.store_pages.AT_ONCE", 1)
    answers = Store.responses

    def seen(self, cells=None, columns=None, coded=False):
        read.append((cells, columns))
        return answers(self, cells, columns, coded)

    monkeypatch.setattr(Store, "responses", seen)
    make([root], tmp_path / "parts", 5)
    together = [set(cells) for cells, columns in read if columns and "kept_indices" in columns]
    assert len(together) == 2 and not set.intersection(*together), "no two groups at once"
    for path in (tmp_path / "whole").rglob("*.js"):
        assert path.read_bytes() == (tmp_path / "parts" / path.relative_to(tmp_path / "whole")).read_bytes(), path


def test_scores_meet_the_times_of_passes_of_another_store(tmp_path: Path) -> None:
    score, speed, out = scored(tmp_path / "score"), timed(tmp_path / "speed", STEPS), tmp_path / "report"
    found = make([score, speed], out, 5)
    assert "Times per token of 2 of 5 lines are those of passes of 64 prompt tokens, batch 2." in found.left_out
    assert any("holds timed passes alone" in sentence for sentence in found.left_out)
    shown = {(row["method"], row["budget"]): row for row in rows(value(out, "report")["entries"])}
    assert {key: row["token_s"] for key, row in shown.items() if row["token_s"] is not None} == {
        ("snapkv", "0.1"): 0.1,
        ("full", ""): 0.3,
    }
    assert {row["bytes"] for row in shown.values()} == {1000, 100, 200, 120, 220}


def test_first_differences_are_those_of_a_plain_loop() -> None:
    pairs = [([1, 2], [1, 2]), ([1, 2], [1]), ([], [3]), ([], []), ([4, 5, 6], [4, 7, 6]), (None, [1]), ([1], None)]
    lists = [pa.array(side, pa.list_(pa.int32())) for side in zip(*pairs, strict=True)]

    def plain(a, b):
        if a is None or b is None:
            return None
        for place in range(max(len(a), len(b))):
            if a[place : place + 1] != b[place : place + 1]:
                return place
        return -1

    assert first_difference(*lists) == [plain(*pair) for pair in pairs]


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
    assert (other.question, other.images) == (None, []) and "another than the one that was answered" in other.missing


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
        command = Commands().of(row, 0, json.loads(row["config"]))
        plan = make_plan(compose(shlex.split(command["line"])[1:]))
        assert row["cell"] in plan.names, command
