"""Promises of the evaluation: it counts exact answers, marks missed thresholds and reports attention as it is."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mmkv_bench.tiny import WEIGHTS
from mmkv_bench.tiny.pages import SIZES, TASKS, make_sample
from mmkv_bench.tiny.vocabulary import ID, IMAGE_PAD
from tools.train_tiny import answering, card, evaluate
from tools.train_tiny.attention_report import layer_statistics
from tools.train_tiny.folder import write_folder
from tools.train_tiny.model import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(make_model(seed=4), tmp_path_factory.mktemp("evaluate") / "model")


def test_exact_match_counts_whole_answers_and_characters_count_apart(monkeypatch):
    truth = [make_sample("lookup", "small", "dev", index).answer for index in range(4)]
    given = [truth[0], truth[1][:2] + "x", "", truth[3] + "1"]
    monkeypatch.setattr(answering, "answer", lambda model, processor, samples: given)
    row = evaluate.measure(None, None, "lookup", "small", "dev", 4)
    assert row["exact_match"] == 0.25
    assert row["characters_right"] == (3 + 2 + 0 + 3) / 12
    assert row["interval_95"] == list(evaluate.wilson(1, 4))
    assert row["threshold"] is None


@pytest.mark.slow
def test_the_card_says_which_thresholds_are_missed(folder):
    rows = [
        {
            "task": task,
            "size": "small",
            "split": "test",
            "n": 500,
            "exact_match": 0.97,
            "interval_95": [0.95, 0.98],
            "characters_right": 0.99,
            "threshold": evaluate.THRESHOLDS[task, "small"],
        }
        for task in ("lookup", "walk3")
    ]
    written, readme = card.write_card(folder, rows, 1)
    stored = json.loads(written.read_text())
    assert stored["thresholds_missed"] == ["lookup small"]
    assert stored["scores"] == rows
    assert stored["parameters"] == sum(parameter.numel() for parameter in make_model(seed=4).parameters())
    text = readme.read_text()
    assert "0.98 **missed**" in text and "0.96 met" in text
    assert "Thresholds missed: lookup small." in text


def test_the_shipped_card_is_what_its_measurements_say():
    stored = json.loads((WEIGHTS / "card.json").read_text())
    assert (WEIGHTS / "README.md").read_text() == card.readme(stored)
    tested = {(row["task"], row["size"]): row for row in stored["scores"] if row["split"] == "test"}
    assert tested.keys() == {(task, size) for task in TASKS for size in SIZES}
    for cell, row in tested.items():
        assert row["n"] >= 500
        assert row["threshold"] == evaluate.THRESHOLDS.get(cell)
        assert row["interval_95"] == pytest.approx(evaluate.wilson(round(row["exact_match"] * row["n"]), row["n"]))


def test_attention_statistics_equal_a_count_by_hand(folder):
    sample = make_sample("walk3", "small", "dev", 0)
    found = layer_statistics(folder, [sample])
    model, processor = answering.load(folder, attention="eager")
    inputs = answering.encode(processor, [sample])
    ids = inputs["input_ids"][0].tolist() + [ID[character] for character in sample.answer]
    prompt, length = inputs["input_ids"].shape[1], len(ids)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        maps = model(
            input_ids=tokens,
            mm_token_type_ids=(tokens == IMAGE_PAD).int(),
            pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
            output_attentions=True,
        ).attentions
    question = max(index for index, token in enumerate(ids) if token == IMAGE_PAD) + 1
    assert len(found) == len(maps) == 4
    for layer, weights in zip(found, maps, strict=True):
        rows = weights[0].double().tolist()
        late = [rows[head][query] for head in range(4) for query in range(length // 2, length)]
        entropy = [-sum(p * math.log(p) for p in row if p > 0) for row in late]
        seen = [
            (query, sum(p for p, token in zip(row, ids, strict=True) if token == IMAGE_PAD))
            for head in rows
            for query, row in enumerate(head)
        ]
        asked = [share for query, share in seen if question <= query < prompt]
        answered = [share for query, share in seen if query >= prompt - 1]
        expected = {
            "first_token_mass": sum(row[0] for row in late) / len(late),
            "first_four_mass": sum(sum(row[:4]) for row in late) / len(late),
            "entropy_nats": sum(entropy) / len(entropy),
            "visual_share_question": sum(asked) / len(asked),
            "visual_share_answer": sum(answered) / len(answered),
            "visual_share_of_slots": ids.count(IMAGE_PAD) / prompt,
        }
        for name, value in expected.items():
            assert layer[name] == pytest.approx(value, abs=1e-6), name
        assert layer["entropy_nats"] <= layer["entropy_of_uniform"]


def test_a_card_of_some_tasks_only_is_refused(capsys):
    assert evaluate.main(["--tasks", "lookup"]) == 2
    assert "--split dev" in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    assert evaluate.main(["--weights", str(tmp_path), "--split", "dev"]) == 1
    assert "tools.train_tiny.train" in capsys.readouterr().err
