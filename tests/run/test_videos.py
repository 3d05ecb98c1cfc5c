"""Promise: videos are sampled, answered and identified by what they show; one that cannot be read is a row, no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf

from mmkv_bench.models.processor import build_processor
from tests.clips import cut, write_clip
from tests.models.checkpoints import SETTINGS, small_config
from tests.run.own_media import VIDEO, write_task
from tests.run.setting import go, responses

VIDEOS = {0: "whole.mp4", 1: "cut.mp4", 2: "gone.mp4", 3: "few.webm", 4: "text.avi"}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A task with five videos: two that can be read, one truncated, one missing, one that is none."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "videos").mkdir()
    whole = write_clip(folder / "videos" / "whole.mp4", options={"movflags": "faststart"})
    cut(whole, 0.6, "cut.mp4")
    write_clip(folder / "videos" / "few.webm", frames=5)
    (folder / "videos" / "text.avi").write_text("hello")
    return write_task(folder, "clips", [f"videos/{name}" for name in VIDEOS.values()], VIDEO, tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small Qwen2.5-VL with true token ids, saved as any checkpoint is."""
    folder = tmp_path_factory.mktemp("model")
    config = small_config("qwen2_5_vl")
    torch.manual_seed(0)
    small = tf.AutoModelForImageTextToText.from_config(config)
    small.save_pretrained(folder)
    build_processor(config, SETTINGS["qwen2_5_vl"]).save_pretrained(folder)
    return folder


def command(task: Path, model: Path, *more: str) -> tuple[str, ...]:
    where = (f"datasets.lmms_eval.include_path={task}", "datasets.lmms_eval.task=clips", "dataset=lmms_eval")
    return (
        "model=hf",
        f"model.path={model}",
        "model.dtype=float32",
        *where,
        "method=[full,snapkv]",
        "budget=16",
        *more,
    )


@pytest.fixture(scope="module")
def rows(task, model, tmp_path_factory):
    root = tmp_path_factory.mktemp("rows") / "rows"
    outcome = go(root, *command(task, model, "model.frames=4"))
    return outcome, responses(root)


@pytest.mark.full
def test_a_video_that_cannot_be_read_is_a_row_and_the_run_goes_on(rows):
    outcome, found = rows
    assert outcome.code == 1 and len(found) == 2 * len(VIDEOS)
    ends = {row["doc_id"]: (row["status"], row["error"]) for row in found.values()}
    assert {doc: status for doc, (status, _) in ends.items()} == {0: "ok", 1: "error", 2: "error", 3: "ok", 4: "error"}
    for doc, words in {1: "cut.mp4", 2: "gone.mp4 is missing", 4: "text.avi cannot be decoded"}.items():
        assert words in ends[doc][1] and "\n" not in ends[doc][1]
    assert {row["n_tokens"] for row in found.values() if row["status"] == "ok"} == {4}


@pytest.mark.full
def test_no_row_names_a_folder_of_the_machine(rows, task):
    assert str(task) not in json.dumps([row["error"] for row in rows[1].values()])


@pytest.mark.slow
def test_frames_are_as_many_as_asked(rows):
    """4 frames are two grids of 64x48 pixels, scaled to 56x56: four tokens each."""
    sizes = {row["doc_id"]: row["visual_tokens"] for row in rows[1].values() if row["status"] == "ok"}
    assert sizes == {0: 2 * 4, 3: 2 * 4}


@pytest.mark.full
def test_the_number_of_frames_makes_another_cell(rows, task, model, tmp_path):
    outcome = go(tmp_path / "rows", *command(task, model, "model.frames=8"))
    found = responses(tmp_path / "rows")
    assert outcome.code == 1
    assert {row["visual_tokens"] for row in found.values() if row["doc_id"] == 0} == {4 * 4}
    assert {cell for cell, _ in found}.isdisjoint({cell for cell, _ in rows[1]})
