"""Promises of training: batches and steps depend on seed and step alone, and a resumed run is bit-identical."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmkv_bench.errors import ConfigError
from mmkv_bench.tiny.vocabulary import IMAGE_PAD, VOCAB_SIZE
from tests.each import each
from tools.train_tiny.batches import PHASES, draw_batch
from tools.train_tiny.evaluate import wilson
from tools.train_tiny.sequences import IGNORED
from tools.train_tiny.train import main
from tools.train_tiny.trainer import Plan, Trainer

# Two steps of each kind: vision, cached outputs, rendered pages.
SHORT = Plan(vision=2, language=4, real=2, warmup=2, pool_pages=6, deadlines=(0, 1, 2, 9, 9))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {**trainer.model.state_dict(), "auxiliary": trainer.auxiliary.detach()}


@pytest.mark.full
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(tmp_path):
    """Interrupted three times, amid each kind of step."""
    whole, second, again = Trainer(5, SHORT), Trainer(5, SHORT), []
    shown = [whole.step() for _ in range(SHORT.steps)]
    for step in range(SHORT.steps):
        if step in (1, 3, 5):
            saved = second.save(tmp_path)
            second = Trainer(5, SHORT)
            second.load(saved)
        again.append(second.step())
    assert second.done and second.progress == whole.progress
    assert [{k: v for k, v in step.items() if v == v} for step in again] == [
        {k: v for k, v in step.items() if v == v} for step in shown
    ]
    for name, tensor in _weights(whole).items():
        assert torch.equal(tensor, _weights(second)[name]), name


def test_a_checkpoint_of_another_seed_or_plan_is_refused(tmp_path):
    saved = Trainer(5, SHORT).save(tmp_path)
    with pytest.raises(ConfigError, match="--out"):
        Trainer(6, SHORT).load(saved)
    with pytest.raises(ConfigError, match="--out"):
        Trainer(5, Plan(vision=3)).load(saved)


@pytest.mark.full
def test_a_checkpoint_replaces_the_one_before(tmp_path):
    trainer = Trainer(5, SHORT)
    trainer.save(tmp_path)
    trainer.step()
    trainer.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


@pytest.mark.full
def test_training_moves_every_weight_it_should_and_rests_the_others():
    trainer = Trainer(5, SHORT)
    start = {name: tensor.clone() for name, tensor in _weights(trainer).items()}

    def moved() -> set[str]:
        return {name for name, tensor in _weights(trainer).items() if not torch.equal(tensor, start[name])}

    for _ in range(2):
        trainer.step()
    assert all("visual" in name for name in moved()) and moved()
    start = {name: tensor.clone() for name, tensor in _weights(trainer).items()}
    for _ in range(2):
        trainer.step()
    assert not any("visual" in name for name in moved())
    assert {"auxiliary", "model.language_model.embed_tokens.weight"} <= moved()
    start = {name: tensor.clone() for name, tensor in _weights(trainer).items()}
    trainer.step()
    assert any("visual" in name for name in moved())


@pytest.mark.full
@each("phase", range(len(PHASES)))
@each("real", [False, True])
def test_a_batch_is_a_function_of_seed_step_and_phase_and_its_parts_agree(phase, real):
    for step in range(4):
        batch, again = draw_batch(1, step, phase, real), draw_batch(1, step, phase, real)
        for name in ("ids", "labels", "positions", "sources", "cells", "cell_sources", "pool_rows"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(again, name))
        assert not np.array_equal(batch.cells, draw_batch(2, step, phase, real).cells)
        assert (batch.ids == IMAGE_PAD).sum() == batch.cells.size == batch.pool_rows.size
        assert batch.positions.shape == (3, *batch.ids.shape)
        supervised = batch.labels != IGNORED
        np.testing.assert_array_equal(batch.labels[supervised], batch.ids[supervised])
        digits = np.where(batch.pool_rows >= VOCAB_SIZE, batch.cells, batch.pool_rows)
        np.testing.assert_array_equal(digits, batch.cells)
        pages = batch.cells.size // (batch.rows * batch.columns)
        assert len(batch.pages) == (pages if real else 0)


def test_the_command_refuses_to_overwrite_or_to_resume_nothing(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--resume"]) == 2
    assert "no checkpoint" in capsys.readouterr().err
    (tmp_path / "checkpoint-000001").mkdir()
    assert main(["--out", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err


def test_wilson_interval_matches_published_values():
    # Newcombe 1998, table I: 81 of 263 and 0 of 20 (without continuity correction).
    np.testing.assert_allclose(wilson(81, 263), (0.2553, 0.3662), atol=5e-5)
    np.testing.assert_allclose(wilson(0, 20), (0.0, 0.1611), atol=5e-5)
