"""Promise: rows of strangers run nothing. A verb that reads a store runs no file that its rows name; `verify` and
`show --remake` do so on `--run-code`, where the file is the rows' own, and print its path."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmkv_bench import consent
from mmkv_bench.cli.main import main
from mmkv_bench.diagnostics import replanned_cells
from mmkv_bench.methods import method_file
from mmkv_bench.store.store import Store
from tests.run.setting import done

MARK = "mmkv_bench_test_code_ran"
METHOD = f"""\
import sys
from mmkv_bench.compression.scorers.window import WindowScorer
sys.{MARK} = "1"
class Theirs(WindowScorer):
    pass
"""


def ran() -> bool:
    """Whether a stranger's code has run since the last question."""
    method_file._module.cache_clear()
    return sys.__dict__.pop(MARK, None) is not None


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Iterator[Path]:
    """Rows whose file lies in the working directory; rows hold no path outside of it."""
    folder, before = tmp_path_factory.mktemp("strangers"), Path.cwd()
    os.chdir(folder)
    Path("evil.py").write_text(METHOD)
    done(
        folder / "rows",
        "dataset=pages_walk",
        "method=[snapkv,evil.py]",
        "variants.x={base: custom, path: evil.py, args: {window: 4}}",
        "budget=16",
        "limit=1",
        "dataset.generation.max_new_tokens=2",
    )
    assert ran()
    yield folder / "rows"
    os.chdir(before)


def test_no_verb_runs_what_rows_name(rows, tmp_path, capsys):
    sample = Store(rows).responses(columns=["sample_id"])["sample_id"][0].as_py()
    copy = str(shutil.copytree(rows, tmp_path / "rows"))
    out = str(tmp_path / "out")
    verbs = [
        ["verify", copy],
        ["show", copy],
        ["show", copy, "evil"],
        ["show", copy, sample],
        ["show", copy, sample, "--prompt"],
        ["show", copy, sample, "--remake"],
        ["tables", copy],
        ["status", copy],
        *(
            [verb, "dataset=pages_walk", "method=snapkv", "budget=16", "limit=1", f"out={copy}"]
            for verb in ("plan", "score")
        ),
        ["diagnose", "entropy", "dataset=pages_walk", "--samples", "1", "--tokens", "2", f"out={copy}"],
        ["report", copy, "--out", out],
        ["plot", "front", copy, "--out", f"{out}.png"],
        ["papers", "mmshift_table01", "--rows", copy],
        ["pack", copy],
    ]
    codes = {}
    for words in verbs:
        codes[" ".join(words[:1] + words[2:3])] = main(words)
        assert not ran(), words
    said = capsys.readouterr()
    assert "not run without --run-code" in said.out, said.out
    assert {codes[verb] for verb in ("tables", "report --out", "pack", "diagnose dataset=pages_walk")} == {0}, (
        codes,
        said.err,
    )


@pytest.mark.slow
def test_with_consent_the_rows_own_file_runs_and_no_other(rows, capsys):
    file = rows.parent / "evil.py"
    assert main(["verify", str(rows), "--run-code"]) == 0 and ran()
    said = capsys.readouterr()
    assert str(file) in said.err and "equal: 4 of 4" in said.out
    file.write_text(METHOD + "# another\n")
    try:
        assert main(["verify", str(rows), "--run-code"]) == 0  # full and snapkv are equal
        said = capsys.readouterr()
        assert not ran() and "get the file that the rows were made with" in said.out and "2 of 4" in said.out
    finally:
        file.write_text(METHOD)


@pytest.mark.parametrize("forged", ["include_path", "folders", "full", "pkg"])
def test_forged_configurations_run_nothing(rows, forged, tmp_path, monkeypatch):
    """A task folder, a config folder whose `full` is a file of theirs, and a folder that Hydra would import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    cell = next(row for row in Store(rows).cells().to_pylist() if row["method"] == "snapkv")
    config = json.loads(cell["config"])
    package = tmp_path / "evilconf"
    (package / "method").mkdir(parents=True)
    (package / "__init__.py").write_text(f"import sys\nsys.{MARK} = '1'\n")
    (package / "evil.py").write_text(METHOD)
    if forged == "include_path":
        (package / "utils.py").write_text(f"import sys\nsys.{MARK} = '1'\ndef text(doc):\n    return ''\n")
        (package / "mine.yaml").write_text(
            "task: mine\ndataset_path: json\ntest_split: train\ndoc_to_text: !function utils.text\n"
        )
        (node,) = config["datasets"].values()
        node |= {"task": "mine", "include_path": str(package)}
        for name in ("page_size", "size"):
            node.pop(name, None)
    elif forged == "full":
        (package / "method" / "full.yaml").write_text(
            f"base: custom\npath: {package / 'evil.py'}\nname: null\nargs: {{}}\n"
        )
        config["folders"] = [str(package)]
        config["baseline"] = "full"
    else:
        config["folders"] = ["pkg://evilconf" if forged == "pkg" else str(package)]
    with consent.rows_name_files():
        try:
            replanned_cells.plan_again([cell | {"config": json.dumps(config)}])
        except consent.CodeOfRowsError:
            assert forged in ("include_path", "pkg")
        else:
            assert forged in ("folders", "full")  # a config folder is data, and its `full` is not the package's
    assert not ran()
