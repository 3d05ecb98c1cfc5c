"""Promise: no answer of another model, and none to another picture, stands in a cell."""

from __future__ import annotations

import os
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmkv_bench import file_state
from mmkv_bench.evaluation import fingerprints, generating
from mmkv_bench.models.source import Source
from mmkv_bench.store.store import Store
from tests.run.own_media import PICTURE, write_task
from tests.run.setting import commits, done, everything, go, responses, scores

WALK = ("dataset=pages_walk", "method=[full]", "limit=1", "fidelity=off", "dataset.generation.max_new_tokens=2")
PICTURES = [f"{number}.bmp" for number in range(3)]


def draw(file: Path, seed: int) -> None:
    """A picture in a file of the same size and times as every other one."""
    before = file.stat().st_ctime_ns if file.exists() else None
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (56, 56, 3), np.uint8)).save(file)
    os.utime(file, ns=(1, 1))
    while file.stat().st_ctime_ns == before:  # the clock of times of change is coarse
        os.utime(file, ns=(1, 1))


@pytest.fixture
def task(tmp_path, monkeypatch) -> Path:
    """A task of three pictures that its code opens by their names; files count as settled the moment they are written."""
    monkeypatch.setattr(file_state, "SETTLED_NS", -1)
    folder = tmp_path / "task"
    folder.mkdir()
    for number, name in enumerate(PICTURES):
        draw(folder / name, number)
    return write_task(folder, "pictures", PICTURES, PICTURE, tokens=2)


def command(task: Path, *more: str) -> tuple[str, ...]:
    where = (f"dataset.include_path={task}", "dataset.task=pictures", "dataset=lmms_eval")
    return (*where, "method=snapkv", "budget=16", "fidelity=off", *more)


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """Prompts that are made, by their hashes."""
    found, plain = [], generating.prompt_hash
    monkeypatch.setattr(generating, "prompt_hash", lambda prompt: found.append(plain(prompt)) or found[-1])
    return found


@pytest.mark.full
def test_answers_to_a_swapped_picture_are_refused_and_made_again_on_request(task, made, tmp_path):
    """`full` and one method: two cells, and a third sample that a larger limit adds."""
    root, sample = tmp_path / "rows", "pictures-000001"
    done(root, *command(task, "limit=2"))
    first = commits(root)
    made.clear()
    fingerprints._MEMORIES.clear()  # another process
    assert "Nothing to do" in done(root, *command(task, "limit=2")).out and not made

    draw(task / PICTURES[1], 7)
    for words in (["limit=2"], [], ["limit=2", "stage=score"], ["retry=[changed]", "limit=1"], ["retry=[error]"]):
        refused = go(root, *command(task, *words))
        assert refused.code == 2 and "2 stored answers to 1 samples (pictures-000001)" in refused.err
        assert "retry=[changed] answers these samples again" in refused.err
    assert commits(root) == first and len(set(made)) == 1

    again = done(root, *command(task, "retry=[changed]", "stage=generate"))
    assert again.generated == 2  # the changed one and the one that is new
    kept = {key: row for key, row in commits(root).items() if key[1] == "pictures-000000"}
    assert kept == {key: row for key, row in first.items() if key[1] == "pictures-000000"}
    assert sample not in {row["sample_id"] for row in scores(root)}
    assert done(root, *command(task)).generated == 0
    done(tmp_path / "fresh", *command(task))
    assert everything(root) == everything(tmp_path / "fresh")
    assert "Nothing to do" in done(root, *command(task, "retry=[changed]")).out

    (task / PICTURES[0]).unlink()
    for words in ([], ["retry=[changed]"]):
        gone = go(root, *command(task, *words))
        assert gone.code == 2 and "(pictures-000000)" in gone.err and "cannot be read; restore the files" in gone.err
    assert len(responses(root)) == 6


@pytest.mark.full
def test_an_interrupted_retry_continues_with_the_cells_that_are_left(task, tmp_path):
    root = tmp_path / "rows"
    done(root, *command(task))
    draw(task / PICTURES[2], 8)
    done(root, *command(task, "retry=[changed]", "method=[full]", "baseline=none"))
    before = commits(root)
    assert go(root, *command(task)).code == 2
    beside = "1 stored answers to 1 samples (pictures-000002) of pictures in cells that are not of this run"
    assert beside in done(root, *command(task, "method=[full]", "baseline=none")).out
    again = done(root, *command(task, "retry=[changed]"))
    assert again.generated == 1 and "not of this run" not in again.out
    assert sum(before[key] != commit for key, commit in commits(root).items()) == 1


@pytest.mark.slow
def test_weights_that_change_while_they_are_loaded_leave_no_row(tmp_path, monkeypatch):
    weights = tmp_path / "model"
    shutil.copytree(Path(str(files("mmkv_bench") / "tiny" / "weights")), weights)
    load = Source.load

    def and_changed(source):
        loaded = load(source)
        file = weights / "generation_config.json"
        file.write_text(file.read_text() + " ")
        return loaded

    monkeypatch.setattr(Source, "load", and_changed)
    asked = (*WALK, "model=hf", f"model.path={weights}")
    outcome = go(tmp_path / "rows", *asked)
    assert outcome.code == 2 and "changed while this run loaded them" in outcome.err
    store = Store(tmp_path / "rows")
    assert store.cells().num_rows == store.responses().num_rows == 0
    monkeypatch.undo()
    assert go(tmp_path / "rows", *asked).code == 0
