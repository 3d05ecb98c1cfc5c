"""Promise: six public names, found when they are used, light to import, and the same runs, rows and tables as the command's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mmkv_bench
from mmkv_bench import evaluate, load_rows, make_table, paper_tables
from mmkv_bench.api.rows import words
from mmkv_bench.config.compose import compose
from mmkv_bench.errors import ConfigError
from tests.cli.setting import CHECKOUT, verb
from tests.run.setting import done

PACKAGE = Path(mmkv_bench.__file__).parent
NAMES = {"attach", "evaluate", "load_rows", "make_table", "method", "paper_tables", "plot"}
BARE = ("lmms_eval", "hydra", "omegaconf", "wandb", "pandas", "pyarrow", "datasets", "scipy", "sklearn", "matplotlib")


def child(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=CHECKOUT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip().splitlines()[-1]


def test_no_public_name_is_a_rooms_and_all_are_found():
    assert set(mmkv_bench.__all__) == NAMES <= set(dir(mmkv_bench))
    rooms = {entry.stem for entry in PACKAGE.iterdir()}
    assert NAMES.isdisjoint(rooms)
    for name in NAMES:
        assert callable(getattr(mmkv_bench, name)) and "Raises:" in getattr(mmkv_bench, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'attatch'"):
        mmkv_bench.attatch  # noqa: B018
    assert (PACKAGE / "py.typed").is_file()


def test_importing_the_package_loads_nothing_else():
    code = "import sys; before = set(sys.modules); import mmkv_bench; dir(mmkv_bench)\n"
    code += "print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] not in sys.stdlib_module_names))"
    assert child(code) == "['mmkv_bench']"


@pytest.mark.full
def test_attach_and_method_need_torch_and_transformers_only():
    """In a process in which everything else of the requirements raises ImportError; the embedded model answers a page."""
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BARE!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
find = importlib.util.find_spec  # asked by transformers for what is installed: answers None where nothing is
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in {BARE!r} else find(name, package)
from importlib.resources import files
import torch
from transformers import AutoModelForImageTextToText
from mmkv_bench import attach, method
model = AutoModelForImageTextToText.from_pretrained(files("mmkv_bench") / "tiny" / "weights", use_safetensors=True)
ids = torch.randint(20, 60, (1, 90), generator=torch.Generator().manual_seed(0))
inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
kept = []
for given, budget in (("full", None), ("snapkv", 16), (method("adakv", window=8), "20%"), ("mmshift", 16), ("kivi", None)):
    with attach(model, given, budget) as session:
        model.generate(**inputs)
    kept.append(session.report().audit.split(":")[0])
absent = {BARE!r}
import json
print(json.dumps([kept, sorted({{m.split(".")[0] for m in sys.modules}} & set(absent))]))
"""
    assert json.loads(child(code)) == [["passed"] * 5, []]


def test_tables_of_papers_are_those_that_the_command_prints(tmp_path, capsys):
    found = paper_tables("flashcache_table08")
    assert verb("papers")(["flashcache_table08"]) == 0 and capsys.readouterr().out == str(found)
    frame = found.frame()
    assert len(found) == 1 and len(frame) == len(found[0].cells) and set(frame["table"]) == {"flashcache_table08"}
    assert (frame["value"].notna() == (frame["state"] == "computed")).all(), "nothing was run"
    assert frame["printed"].notna().any() and "\\toprule" in found.latex()
    with pytest.raises(ConfigError, match="flashcache_table08"):
        paper_tables("flashcache_table80")
    with pytest.raises(ConfigError, match="no rows folder"):
        paper_tables("flashcache_table08", rows=tmp_path / "none")


@pytest.mark.slow
def test_evaluate_is_the_commands_run_and_its_rows_make_the_same_tables(tmp_path):
    asked = {"method": ["snapkv", "kivi"], "budget": [16, "20%"], "dataset": "pages_lookup", "limit": 2}
    rows = evaluate(
        **asked, model="tiny", out=str(tmp_path), methods={"snapkv": {"window": 8}}, **{"model.device": "cpu"}
    )
    assert set(rows.cells["method"]) == {"full", "snapkv", "kivi"} and len(rows.responses) == 4 * 2
    assert set(rows.responses["status"]) == {"ok"} and set(rows.metrics["cell"]) == set(rows.names)
    overrides = [
        "method=[snapkv,kivi]",
        "budget=[16,20%]",
        "dataset=pages_lookup",
        "limit=2",
        "methods.snapkv.window=8",
    ]
    command = done(tmp_path, *overrides)
    assert command.generated == 0  # the same cells
    tables = make_table(rows)
    assert len(tables) == 2 and all(line in command.out for line in str(tables).splitlines() if line.startswith("|"))
    frame = tables.frame()
    assert set(frame["method"]) == {"full", "snapkv", "kivi"} and set(frame["metric"]) == {"exact_match"}
    assert "\\begin{tabular}" in tables.latex()
    only = load_rows(tmp_path, method="snapkv", budget=0.2)
    assert list(only.cells["budget_fraction"]) == ["0.2"] and len(only.responses) == 2
    assert {"answer", "entries_resident"} <= set(only.responses)
    assert len(load_rows(tmp_path, budget=16, reading="paper").names) == 3  # beside what has no budget
    assert str(make_table(tmp_path, metric="exact_match")) == str(tables)
    assert "2 cells of" in repr(load_rows(tmp_path, method=["kivi", "full"]))
    for wrong, said in (
        ({"method": "snapvk"}, "did you mean 'snapkv'"),
        ({"budget": 17}, "have no budget 17"),
        ({"dataset": "docvqa"}, "have no dataset 'docvqa'"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_rows(tmp_path, **wrong)
    with pytest.raises(ConfigError, match="There is no rows folder"):
        load_rows(tmp_path / "none")
    with pytest.raises(ConfigError, match="has no result rows"):
        load_rows(tmp_path / "journal")
    with pytest.raises(ConfigError, match="did you mean 'snapkv'"):
        evaluate(method="snapvk", out=str(tmp_path))


@pytest.mark.slow
def test_settings_are_read_back_as_they_were_given():
    texts = ["a, b", "it's", "back\\", "\\'", "[x]", "{a: b}", "a=b", "null", "true", " ", "ü"]
    values = {"timeout_s": 0.5, "limit": None, "protocol": ["paper", "strict"], "budget": [64, "20%", 0.2]}
    config = compose(words({**values, "json": True, "methods": {"mmshift": {"gamma": 3}}}))
    read = {key: getattr(config, key) for key in values}
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in read.items()} == values
    assert config.json is True and config.methods["mmshift"]["gamma"] == 3
    for text in texts:
        assert compose(words({"model": {"path": text}})).model.path == text, text
    varied = compose(words({"variants": {"g3": {"base": "mmshift", "gamma": 3.0}}}))
    assert varied.variants["g3"] == {"base": "mmshift", "gamma": 3.0}


@pytest.mark.slow
def test_the_python_of_readme_and_docs_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    first_block = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    code = first_block.search((PACKAGE.parent / "docs" / "python.md").read_text())[1]
    assert "limit=20" in code
    monkeypatch.chdir(tmp_path)
    seen: dict = {}
    exec(compile(code.replace("limit=20", "limit=2"), "python.md", "exec"), seen)
    assert seen["session"].report().entries_resident == seen["session"].report().entries_asked
    assert seen["page"].answer in seen["processor"].decode(seen["output"][0])
    assert len(seen["answers"]) == 2 and seen["narrow"].scorer.window == 8
    assert "pages_lookup" in capsys.readouterr().out
    short = first_block.search((PACKAGE.parent / "README.md").read_text())[1]
    assert short.count("\n") <= 6
    exec(compile(short.replace("limit=20", "limit=2"), "README.md", "exec"), seen)
    told = capsys.readouterr().out
    assert "snapkv@64" in told and "exact_match**" in told and "| snapkv" in told


@pytest.mark.slow
def test_plot_draws_what_the_command_draws_and_refuses_what_it_does_not_know(tmp_path):
    from mmkv_bench import plot
    from mmkv_bench.config.files import conf_dir
    from mmkv_bench.tables.figure import save

    rows = conf_dir().parent / "results" / "tiny" / "large"
    figure = plot(load_rows(rows), methods=["snapkv", "mmshift"], budgets=[64, 128], dataset="pages_walk_large")
    save(figure, tmp_path / "here", plain=True)
    words = ["--methods", "snapkv,mmshift", "--budgets", "64,128", "--dataset", "pages_walk_large"]
    assert verb("plot")(["budget", str(rows), *words, "--out", str(tmp_path / "there")]) == 0
    assert [axes.get_title() for axes in figure.axes] == ["pages_walk_large"]
    assert {line.get_label() for line in figure.axes[0].lines} >= {"snapkv", "mmshift"}
    assert (tmp_path / "there.png").stat().st_size > 10_000
    with pytest.raises(ConfigError, match="no option method; did you mean 'methods'"):
        plot(rows, method="snapkv")
