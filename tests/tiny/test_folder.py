"""Promises of the model folder: it loads like a hub model, and its prompts are those the model was trained on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLForConditionalGeneration

from mmkv_bench.tiny import WEIGHTS
from mmkv_bench.tiny.pages import SIZES, TASKS, make_page, make_sample
from mmkv_bench.tiny.vocabulary import ID, TOKENS
from tests.each import each
from tools.train_tiny import vision
from tools.train_tiny.answering import answer, encode
from tools.train_tiny.folder import write_folder
from tools.train_tiny.model import make_model
from tools.train_tiny.sequences import Turn, make_sequence


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory):
    return write_folder(make_model(seed=3), tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def loaded(random_folder):
    model = AutoModelForImageTextToText.from_pretrained(random_folder, dtype=torch.float32)
    return model.eval(), AutoProcessor.from_pretrained(random_folder)


def test_the_auto_classes_load_the_folder_and_its_weights(loaded):
    model, processor = loaded
    assert type(model) is Qwen2_5_VLForConditionalGeneration
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    written = make_model(seed=3).state_dict()
    assert model.state_dict().keys() == written.keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, written[name], rtol=0, atol=0)


def test_every_token_survives_the_tokenizer(loaded):
    tokenizer = loaded[1].tokenizer
    assert tokenizer.convert_tokens_to_ids(list(TOKENS)) == list(range(len(TOKENS)))
    text = "".join(TOKENS)
    assert tokenizer(text)["input_ids"] == list(range(len(TOKENS)))
    assert tokenizer.decode([ID[c] for c in "384q592m107."]) == "384q592m107."


def make_prompt(rows: int, columns: int, images: int, question: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (length,) and positions (3, length) of the prompt up to where the answer begins."""
    sequence = make_sequence(rows, columns, images, [Turn(question, "", ())])
    return sequence.ids[:-1], sequence.positions[:, :-1]


@each(("task", "size"), zip(TASKS, itertools.cycle(SIZES), strict=False))
def test_the_chat_template_gives_the_training_prompt(loaded, task, size):
    model, processor = loaded
    sample = make_sample(task, size, "dev", 0)
    inputs = encode(processor, [sample])
    side = sample.images[0].width // 28
    ids, positions = make_prompt(side, side, len(sample.images), sample.question)
    assert inputs["input_ids"][0].tolist() == ids.tolist()
    found, _ = model.model.get_rope_index(
        inputs["input_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        attention_mask=inputs["attention_mask"],
    )
    np.testing.assert_array_equal(found[:, 0].numpy(), positions)


def test_a_training_sequence_begins_with_the_prompt_and_supervises_the_answer():
    document, turn, _ = make_page("walk3", "small", "dev", 1)
    sequence = make_sequence(16, 16, 1, [turn, turn])
    ids, positions = make_prompt(16, 16, 1, turn.question)
    assert sequence.ids[: len(ids)].tolist() == ids.tolist()
    np.testing.assert_array_equal(sequence.positions[:, : len(ids)], positions)
    supervised = sequence.labels[sequence.labels >= 0]
    assert "".join(TOKENS[token] for token in supervised) == 2 * (turn.answer + "<|im_end|>")
    # Each answer character's source is the cell that shows it.
    from tools.train_tiny.sequences import cell_sources, tokens_of

    shown = {
        int(c): int(t)
        for c, t in zip(cell_sources(document.grids).ravel(), tokens_of(document.grids).ravel(), strict=True)
    }
    at = np.flatnonzero(sequence.sources >= 0)
    assert len(at) == 2 * len(turn.answer)
    assert [shown[int(sequence.sources[i])] for i in at] == [int(sequence.labels[i + 1]) for i in at]


@each("task", ["lookup", "mi_lookup"])
def test_the_batched_vision_tower_equals_the_library_forward(loaded, task):
    model, processor = loaded
    _, _, pages = make_page(task, "large", "dev", 2)
    inputs = encode(processor, [make_sample(task, "large", "dev", 2)])
    with torch.no_grad():
        stock = model.model.visual(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        windows = torch.cat([vision.to_windows(page) for page in pages])
        side = pages[0].shape[0] // 28
        mine = vision.to_cells(vision.encode(model.model.visual, windows), side, side)
    assert stock.abs().max() > 0.1
    torch.testing.assert_close(mine, stock, rtol=0, atol=5e-6)


def test_a_page_that_is_not_made_of_windows_is_refused():
    with pytest.raises(ValueError, match="112 px"):
        vision.to_windows(np.zeros((28 * 6, 28 * 8, 3), np.uint8))


def test_the_shipped_weights_fit_in_five_megabytes():
    assert (WEIGHTS / "model.safetensors").stat().st_size <= 5_000_000
    assert not list(WEIGHTS.glob("*.bin")) and not list(WEIGHTS.glob("*.pt"))


@each(("task", "floor"), [("lookup", 0.9), ("walk3", 0.8), ("handwritten", 0.7)], keep=1)
def test_the_shipped_weights_answer_pages(task, floor):
    model = AutoModelForImageTextToText.from_pretrained(WEIGHTS, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(WEIGHTS)
    samples = [make_sample(task, "small", "dev", index) for index in range(30)]
    given = answer(model, processor, samples)
    assert np.mean([a == sample.answer for a, sample in zip(given, samples, strict=True)]) >= floor
