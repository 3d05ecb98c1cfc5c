"""Promise: a run reads videos of files as streams, and one that is interrupted within a stream ends with the same whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch.nn.modules.module import register_module_forward_hook

from mmkv_bench.models.processor import build_processor
from mmkv_bench.store.store import Store
from mmkv_bench.tables.status import label
from tests import cover
from tests.clips import write_clip
from tests.models.checkpoints import SETTINGS, small_config
from tests.run.own_media import VIDEO, write_task
from tests.run.setting import answers, done, go, responses

CLIPS = 3


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> tuple[str, ...]:
    """A run over three clips with a small Qwen2.5-VL, two frames a chunk."""
    task, model = tmp_path_factory.mktemp("task"), tmp_path_factory.mktemp("model")
    (task / "videos").mkdir()
    names = [f"videos/{number}.mp4" for number in range(CLIPS)]
    for number, name in enumerate(names):
        write_clip(task / name, frames=12 + 2 * number)
    write_task(task, "clips", names, VIDEO, tokens=4)
    config = small_config("qwen2_5_vl")
    torch.manual_seed(0)
    tf.AutoModelForImageTextToText.from_config(config).save_pretrained(model)
    build_processor(config, SETTINGS["qwen2_5_vl"]).save_pretrained(model)
    where = (f"datasets.lmms_eval.include_path={task}", "datasets.lmms_eval.task=clips", "dataset=lmms_eval")
    what = ("model=hf", f"model.path={model}", "model.dtype=float32", "model.frames=12", *where)
    return *what, "protocol=stream", "method=[full,generic_query,reservoir,infinipot_v]", "budget=52", "stream.every=2"


@pytest.fixture(scope="module")
def rows(command, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("rows") / "rows"
    done(root, *command)
    return root


@pytest.mark.slow
def test_videos_of_files_are_read_as_streams_under_the_cap(rows):
    found = list(responses(rows).values())
    assert len(found) == 4 * CLIPS and {row["status"] for row in found} == {"ok"}
    for row in found:
        full = row["budget_entries"] is None
        assert row["entries_max"] == (row["context_tokens"] if full else 52)
        assert (row["eviction_rounds"] > 1) is not full and bool(row["frames_left"])
        assert row["entries_peak"] >= row["entries_max"] and (row["entries_evicted"] > 0) is not full


@pytest.mark.slow
def test_a_stream_that_is_asked_earlier_is_another_cell(rows, command, tmp_path):
    done(tmp_path / "rows", *command, "stream.ask_at=0.5", "limit=1")
    early, whole = responses(tmp_path / "rows"), responses(rows)
    assert not set(early) & set(whole) and {max(row["frames_left"][-1] for row in early.values())} == {"5"}
    labels = {label(row) for row in Store(tmp_path / "rows").cells().to_pylist()}
    assert "full stream at=0.5" in labels and not any("at=" in label(row) for row in Store(rows).cells().to_pylist())


@contextmanager
def interrupted(forwards: int) -> Iterator[None]:
    """Ctrl-C after so many forward passes of the whole model."""
    left = [forwards]

    def after(module, *_) -> None:
        if isinstance(module, tf.Qwen2_5_VLForConditionalGeneration):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

    hook = register_module_forward_hook(after)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.slow
@cover.few("forwards", [3, 50], first=1)
def test_an_interrupted_stream_resumes_as_a_whole_sample(rows, command, tmp_path, forwards):
    root = tmp_path / "rows"
    with interrupted(forwards):
        assert go(root, *command).code != 0
    part = responses(root)
    assert len(part) < 4 * CLIPS and len(part) % 4 == 0  # all cells of a sample, or none
    outcome = done(root, *command)
    assert outcome.generated == CLIPS - len(part) // 4 and answers(root) == answers(rows)


@pytest.mark.slow
def test_smaller_frames_fit_under_the_cap_and_are_answered_as_without_a_stream(tmp_path):
    words = ("dataset=stream_facts", "method=pixels", "budget=38", "stream.every=1", "limit=8")
    done(tmp_path, *words, "protocol=[stream,query_agnostic]")
    names = Store(tmp_path).cells().to_pandas().set_index("cell")
    rows: dict[str, list] = {"stream": [], "query_agnostic": []}
    for (cell, _), row in sorted(responses(tmp_path).items()):
        if names["method"][cell] == "pixels":
            rows[names["protocol"][cell]].append(row)
    assert [row["status"] for row in rows["stream"]] == ["ok"] * 8
    for one, other in zip(rows["stream"], rows["query_agnostic"], strict=True):
        same = ("answer", "entries_resident", "entries_asked", "context_tokens")
        assert [one[name] for name in same] == [other[name] for name in same]
        assert (one["entries_max"] <= 38, one["eviction_rounds"], one["frames_left"]) == (True, 0, "0-5")
