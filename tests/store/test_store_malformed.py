"""Promise: rows whose configuration no run wrote are one sentence for whoever reads them, and names are no formulas."""

from __future__ import annotations

import json

import pytest
from store_examples import cell, metric_row, response, sample_score, write_scores

from mmkv_bench.cli.main import main
from mmkv_bench.errors import ConfigError, out_of_memory
from mmkv_bench.store.store import Store


def made(root, model: str = "tiny", **columns: str) -> str:
    store = Store(root)
    names = {"full": "c0", "snapkv": "c1"}
    for method, name in names.items():
        budget = {"budget_kind": "none", "budget_entries": None} if method == "full" else {}
        store.write_cells([cell(name, model=model, method=method, base=method, **budget, **columns)])
        scores = [sample_score(i, name, value=0.5) for i in range(2)]
        write_scores(store, scores, [metric_row(name, value=0.5)])
        with store.writer(name) as writer:
            for i in range(2):
                writer.commit([response(i, name)])
    return str(root)


@pytest.mark.slow
def test_configurations_that_no_run_writes_are_one_sentence(tmp_path, capsys):
    for number, (column, value, problem) in enumerate(
        (
            ("config", {"limit": "many"}, "limit is 'many', not a number"),
            ("config", {"methods": {"snapkv": 5}}, "methods.snapkv is 5, not an object"),
            ("config", {"datasets": []}, "datasets is [], not an object"),
            ("config", 5, "5 is not a JSON object"),
            ("parameters", [1], "[1] is not a JSON object"),
            ("generation", [1], "[1] is not a JSON object"),
        )
    ):
        root = made(tmp_path / str(number), **{column: json.dumps(value)})
        words = [
            ["tables", root],
            ["verify", root],
            ["report", root, "--out", f"{root}-report"],
            ["plot", "budget", root, "--out", f"{root}-p"],
        ]
        for command in [*words, *([["status", root], ["show", root]] if column == "config" else [])]:
            assert main(command) in (1, 2), command
            said = capsys.readouterr().err.splitlines()[-1]
            assert problem in said and f"column {column} of table cells" in said, (command, said)


@pytest.mark.slow
def test_a_configuration_without_its_dataset_and_names_with_dollars_are_shown(tmp_path, capsys):
    root = made(
        tmp_path / "rows",
        model="a$\\x$ b",
        config=json.dumps({"datasets": {}, "methods": {}, "variants": {}, "model": {}}),
    )
    for command in (
        ["report", root, "--out", f"{root}-report"],
        ["plot", "budget", root, "--out", f"{root}-plot"],
        ["show", root],
    ):
        assert main(command) == 0, (command, capsys.readouterr().err)
    assert main(["verify", root]) in (1, 2) and "Traceback" not in capsys.readouterr().err


def test_memory_that_is_short_at_loading_is_memory_and_no_wrong_folder(tmp_path, monkeypatch):
    import transformers

    from mmkv_bench.models import load

    def short(*_, **__):
        raise OSError("Cannot allocate memory (os error 12)")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", short)
    with pytest.raises(OSError, match="allocate") as caught:
        load.load_config(str(tmp_path))
    assert out_of_memory(caught.value) and not isinstance(caught.value, ConfigError)
