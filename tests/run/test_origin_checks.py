"""Promise: weights, data and a task's code that change while a run reads them stop it; rows say which answers are in doubt, and
nothing of the new content stands under the old name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmkv_bench.config.schema import Model
from mmkv_bench.errors import ConfigError
from mmkv_bench.models.files import folder_fingerprint, model_files
from mmkv_bench.models.load import load_model
from mmkv_bench.run import origin_checks
from mmkv_bench.run.origin_checks import Inputs
from mmkv_bench.store.store import Store
from mmkv_bench.tiny import WEIGHTS
from tests import cover
from tests.run.setting import done, everything, go, responses, scores

TASK = """
task: moving
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visual
doc_to_text: question
doc_to_target: answer
process_results: !function utils.scored
generation_kwargs: {{max_new_tokens: 2}}
metric_list:
  - {{metric: right, aggregation: mean, higher_is_better: true}}
"""
UTILS = """
def visual(doc):
    return []
def scored(doc, results):
    return {"right": 1.0}
"""
ROWS = [{"question": f"What is {number}?", "answer": "yes"} for number in range(6)]


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(WEIGHTS, tmp_path / "model"))


@pytest.fixture
def task(tmp_path) -> Path:
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "moving.yaml").write_text(TASK.format(folder=folder))
    (folder / "utils.py").write_text(UTILS)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def command(task: Path, model: Path, *more: str) -> tuple[str, ...]:
    of_task = ("dataset=lmms_eval", "dataset.task=moving", f"dataset.include_path={task}")
    return ("model=hf", f"model.path={model}", *of_task, "method=snapkv", "budget=8", "fidelity=off", *more)


def test_weights_are_read_and_not_mapped(model):
    """`cp` of another checkpoint over one that a run had loaded gave .90 for 1.00."""
    loaded = load_model(Model(name="copy", device="cpu"), str(model))
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    file = model / "model.safetensors"
    others = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    replaced = file.with_suffix(".new")
    save_file(others, replaced, metadata={"format": "pt"})
    with file.open("r+b") as stream:  # in place, as cp writes
        stream.write(replaced.read_bytes())
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())


def test_shards_of_sub_folders_are_part_of_a_model(model):
    whole = load_file(model / "model.safetensors")
    plain = folder_fingerprint(model)
    (model / "sub").mkdir()
    (model / "model.safetensors").rename(model / "sub" / "s.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(whole, "sub/s.safetensors")}))
    first = folder_fingerprint(model)
    assert first != plain and model / "sub" / "s.safetensors" in model_files(model)
    assert load_model(Model(name="sharded", device="cpu"), str(model)).model.dtype == torch.float32
    save_file({name: tensor + 1 for name, tensor in whole.items()}, model / "sub" / "s.safetensors", {"format": "pt"})
    assert folder_fingerprint(model) != first
    for place, words in (("../s.safetensors", "outside its folder"), ("sub/t.safetensors", "lacks t.safetensors")):
        index.write_text(json.dumps({"weight_map": {"a": place}}))
        with pytest.raises(ConfigError, match=words):
            model_files(model)
    index.write_text("{}")
    with pytest.raises(ConfigError, match="not an index of weights"):
        model_files(model)


def changed(kind: str, task: Path, model: Path) -> Path:
    """Write something else into one of the run's files; returns the file."""
    if kind == "weights":
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4] + b"\0\1\2\3")
    elif kind == "code":
        file = task / "utils.py"
        file.write_text(UTILS.replace("1.0", "0.5"))
    elif kind == "gone":
        file = task / "rows.jsonl"
        file.unlink()
    else:
        file = task / "rows.jsonl"
        file.write_text(file.read_text().replace("yes", "no"))
    return file


@pytest.mark.slow
@cover.shares(2)
def test_a_change_in_mid_run_stops_it_and_marks_what_is_in_doubt(task, model, tmp_path, monkeypatch, share):
    expected = tmp_path / "expected"
    done(expected, *command(task, model))
    monkeypatch.setattr(origin_checks, "EVERY_S", 1e9)  # the look is the one at the end
    for kind in cover.turn(("weights", "code", "data", "gone"), 0, share):
        root, kept = tmp_path / kind, Path(shutil.copytree(task, tmp_path / f"kept-{kind}"))
        weights = (model / "model.safetensors").read_bytes()
        plain, calls = Inputs.add_rows, []

        def committed(self, rows, kind=kind, plain=plain, calls=calls):
            plain(self, rows)
            calls.append(rows)
            if len(calls) == 2:
                self.check()
            if len(calls) == 4:
                calls.append(changed(kind, task, model))

        monkeypatch.setattr(Inputs, "add_rows", committed)
        stopped = go(root, *command(task, model))
        assert stopped.code != 0 and "changed while the run was reading it; 4 samples" in stopped.err, (
            kind,
            stopped.err,
        )
        assert not scores(root)
        statuses = sorted((row["doc_id"], row["status"]) for row in responses(root).values())
        assert statuses == sorted((n, "ok" if n < 2 else "error") for n in range(6) for _ in range(2)), kind
        monkeypatch.setattr(Inputs, "add_rows", plain)
        shutil.rmtree(task)
        shutil.copytree(kept, task)
        (model / "model.safetensors").write_bytes(weights)
        again = done(root, *command(task, model, "retry=[error]"))
        assert again.generated == 4 and everything(root) == everything(expected), kind


@pytest.mark.slow
def test_a_run_that_is_stopped_says_how_many_answers_are_in_doubt(task, model, tmp_path, monkeypatch):
    """It looks once more when it ends, where nothing was answered since."""
    monkeypatch.setattr(origin_checks, "EVERY_S", -1)
    monkeypatch.setattr(origin_checks, "CHECK_FACTOR", 0)
    plain, calls = Inputs.add_rows, []

    def committed(self, rows):
        calls.append(rows)
        if len(calls) == 3:
            changed("weights", task, model)
        plain(self, rows)

    monkeypatch.setattr(Inputs, "add_rows", committed)
    stopped = go(tmp_path / "rows", *command(task, model))
    assert stopped.code == 2 and "reading it; 1 samples" in stopped.err
    assert sorted(row["status"] for row in responses(tmp_path / "rows").values()) == ["error"] * 2 + ["ok"] * 4


@pytest.mark.slow
def test_a_new_time_alone_stops_nothing(task, model, tmp_path, monkeypatch):
    monkeypatch.setattr(origin_checks, "EVERY_S", -1)
    plain = Inputs.add_rows

    def committed(self, rows):
        os.utime(task / "rows.jsonl", ns=(1, 1))
        plain(self, rows)

    monkeypatch.setattr(Inputs, "add_rows", committed)
    assert done(tmp_path / "rows", *command(task, model)).generated == 6


@pytest.mark.slow
def test_code_that_changes_between_answers_and_scores_scores_nothing(task, model, tmp_path, monkeypatch):
    from mmkv_bench.run import run as stages

    plain = stages._generate

    def generate(*arguments):
        plain(*arguments)
        changed("code", task, model)

    monkeypatch.setattr(stages, "_generate", generate)
    root = tmp_path / "rows"
    stopped = go(root, *command(task, model))
    assert stopped.code != 0 and "changed during the run; stored answers are kept" in stopped.err
    assert not scores(root) and {row["status"] for row in responses(root).values()} == {"ok"}
    assert Store(root).responses().num_rows == 12
