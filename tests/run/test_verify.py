"""Promise: stored answers can be made again from the store alone, and one that differs is found."""

from __future__ import annotations

import json
import shutil
from statistics import fmean

import pyarrow.compute as pc
import pytest

from mmkv_bench.cli.verbs.published_rows import stores_with_answers
from mmkv_bench.config.files import conf_dir
from mmkv_bench.diagnostics.receipt import receipts_of
from mmkv_bench.diagnostics.remade_answers import draw
from mmkv_bench.errors import ConfigError
from mmkv_bench.plan import cells as planning
from mmkv_bench.store import provenance
from mmkv_bench.store.compact import pack
from mmkv_bench.store.store import Store
from tests.cli.setting import verb
from tests.run.setting import done

main = verb("verify")

RUN = (
    "dataset=pages_walk",
    "method=[snapkv,mmshift,random]",
    "variants.wide={base: snapkv, pool: 7}",
    "methods.mmshift.gamma=3",
    "budget=[16,20%]",
    "reading=[paper,released]",
    "seed=[0,1]",
    "dataset.generation.max_new_tokens=3",
    "limit=4",
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A run of several budgets, readings and seeds, with a variant and a changed parameter, packed as rows in git are."""
    root = tmp_path_factory.mktemp("verify") / "rows"
    done(root, *RUN)
    pack(Store(root), slim=True)
    return root


@pytest.mark.full
def test_answers_are_made_again_and_a_tampered_one_is_found(rows, tmp_path, capsys):
    count = Store(rows).responses(columns=["cell"]).num_rows
    assert main([str(rows), "--samples", "1000"]) == 0
    out = capsys.readouterr().out
    assert f"{rows}: {count} drawn, {count} equal" in out and f"equal: {count} of {count} drawn" in out
    digests = count - Store(rows).responses(columns=["kept_digest"])["kept_digest"].null_count
    assert 0 < digests < count and f"digest of the kept positions (in {digests}), scores" in out

    root = shutil.copytree(rows, tmp_path / "rows")
    row = Store(root).responses().to_pylist()[3]
    tamper(root, row, token_ids=[*row["token_ids"][:-1], row["token_ids"][-1] + 1])
    assert main([str(root), "--samples", "1000"]) == 1
    out = capsys.readouterr().out
    assert f"{count - 1} equal" in out.splitlines()[0] and "1 different" in out.splitlines()[0]
    assert f" {row['sample_id']}: token_ids" in next(line for line in out.splitlines() if line.startswith("different:"))


def tamper(root, row, **values):
    """Replace a stored answer."""
    stamped = ("schema_version", "worker", "committed_at")
    with Store(root).writer("forger") as writer:
        writer.commit([{name: value for name, value in (row | values).items() if name not in stamped}])


@pytest.mark.slow
def test_words_choose_the_cells_whose_answers_are_all_made_again_and_the_receipt_says_what_was_compared(
    rows, tmp_path, capsys
):
    receipt = tmp_path / "receipt.json"
    words = ["wide@16", "released"]
    assert main([str(rows), *words, "--all", "--receipt", str(receipt)]) == 0
    assert "equal: 4 of 4 drawn" in capsys.readouterr().out
    data = json.loads(receipt.read_text())
    (entry,) = data["stores"][0]["cells"]
    stored = Store(rows).responses([entry["cell"]]).to_pylist()
    digests = sum(row["kept_digest"] is not None for row in stored)
    assert (data["verdict"], data["seed"], data["words"]) == ("equal", None, words)
    assert (entry["made_again"], entry["equal"], entry["answers_stored"]) == (4, 4, 4) and digests < 4
    assert entry["compared"] == {
        **dict.fromkeys(("status", "prompt_hash", "answer", "token_ids", "kept", "scores"), 4),
        "kept_digest": digests,
    }
    assert receipts_of([receipt], [rows])[rows][entry["cell"]]["equal"] == 4
    values = Store(rows).samples([entry["cell"]]).to_pylist()
    for metric, means in entry["scores"].items():
        mean = fmean(row["value"] for row in values if row["metric"] == metric)
        assert means == {"stored": mean, "made_again": mean, "answers": 4}
    assert entry["scores"], "the recounted score stands in the receipt"

    root = shutil.copytree(rows, tmp_path / "rows")
    tamper(root, stored[2], answer="another one")
    assert main([str(root), *words, "--all"]) == 1
    assert f"{stored[2]['sample_id']}: answer" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="about other answers of cell"):
        receipts_of([receipt], [root])
    for text, message in (
        ('{"receipt": 1}', "is not a receipt .*verify again"),
        (receipt.read_text().replace(entry["cell"], "0" * 16), "no cell of"),
    ):
        receipt.write_text(text)
        with pytest.raises(ConfigError, match=message):
            receipts_of([receipt], [rows])


@pytest.mark.slow
def test_a_changed_score_is_found(rows, tmp_path, capsys):
    root = shutil.copytree(rows, tmp_path / "rows")
    store, cell = Store(root), draw([root], None, 0)[0].row["cell"]
    samples, metrics = store.samples([cell]), store.metrics([cell])
    receipt = tmp_path / "receipt.json"
    assert main([str(root), cell, "--samples", "1", "--receipt", str(receipt)]) == 0
    assert receipts_of([receipt], [root])[root][cell]["equal"] == 1
    value = pc.subtract(1.0, samples["value"])
    samples = samples.set_column(samples.column_names.index("value"), "value", value)
    store.write_scores(iter([samples]), lambda rows: metrics)
    assert main([str(root), cell, "--all"]) == 1
    assert ": scores" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="about other scores of cell"):
        receipts_of([receipt], [root])


@pytest.mark.slow
def test_words_that_choose_nothing_are_answered(rows, tmp_path, capsys):
    for words, message in {
        ("snapkv@17",): "neither a cell nor a sample",
        ("no-such-folder", "snapkv"): "is not a folder of result rows. Words that choose cells follow one folder",
    }.items():
        rows_given = [] if words[0].startswith("no-such") else [str(rows)]
        assert main([*rows_given, *words]) == 2
        assert message in capsys.readouterr().err


def test_rows_of_an_older_identity_are_counted_apart(rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planning, "NUMERICS_VERSION", 99)
    assert main([str(rows), "--samples", "3"]) == 2
    out = capsys.readouterr().out
    assert (
        "3 drawn, 3 identity of an older version" in out and "because of identity of an older version (numerics_" in out
    )


@pytest.mark.full
def test_rows_of_other_versions_are_counted_apart(tmp_path, capsys, monkeypatch):
    plain = provenance.version
    monkeypatch.setattr(provenance, "version", lambda name: "0.1" if name == "torch" else plain(name))
    done(tmp_path / "old", *RUN, "limit=1")
    monkeypatch.undo()
    assert main([str(tmp_path / "old"), "--samples", "4"]) == 2
    assert "4 because of other versions (torch 0.1, installed" in capsys.readouterr().out
    assert main([str(tmp_path / "old"), "--samples", "4", "--other-versions"]) == 0


def test_the_draw_is_even_over_stores_seeded_and_without_repetition(rows, tmp_path):
    other = shutil.copytree(rows, tmp_path / "other")
    drawn = draw([rows, other], 9, 5)
    keys = [(one.root, one.row["cell"], one.row["sample_id"]) for one in drawn]
    assert len(set(keys)) == 9 and {sum(one.root == root for one in drawn) for root in (rows, other)} == {4, 5}
    assert keys == [(one.root, one.row["cell"], one.row["sample_id"]) for one in draw([other, rows], 9, 5)]
    assert keys != [(one.root, one.row["cell"], one.row["sample_id"]) for one in draw([rows, other], 9, 6)]
    assert len(draw([rows, other], 1, 5)) == 1  # nothing is drawn from the other


def test_folders_without_rows_are_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "is not a folder of result rows" in capsys.readouterr().err


def test_by_default_stores_that_hold_answers_are_drawn_from():
    found = {root.name for root in stores_with_answers(conf_dir().parent / "results" / "tiny")}
    assert {"large", "methods", "ablations"} <= found and found.isdisjoint({"diagnostics", "efficiency", "papers"})
