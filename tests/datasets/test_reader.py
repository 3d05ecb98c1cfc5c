"""Documents of the reader: what training sees is never asked in a test, and a picture's labels say what is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmkv_bench.config.schema import resolve_path
from mmkv_bench.datasets.tasks.reader import utils
from mmkv_bench.reader.document_kinds import document
from mmkv_bench.reader.documents import FORMS
from mmkv_bench.reader.draw import split_of
from mmkv_bench.reader.render import draw_document
from mmkv_bench.reader.trials import FORMS_OF, pictures, trial
from mmkv_bench.reader.typefaces import typefaces
from tests import cover

ROOT = Path(__file__).parents[2]


def test_splits_share_no_asked_value_and_a_document_is_the_same_each_time():
    asked = {}
    for split in ("train", "dev", "test"):
        papers = [document(split, number, form) for form in FORMS for number in range(40)]
        assert papers[:3] == [document(split, number, next(iter(FORMS))) for number in range(3)]
        asked[split] = {one.answer for paper in papers for one in paper.questions if one.task == "value"}
        assert len(asked[split]) > 100
    assert not asked["train"] & asked["test"] and not asked["train"] & asked["dev"] and not asked["dev"] & asked["test"]
    assert {split_of(f"{number}") for number in range(200)} == {"train", "dev", "test"}


def test_labels_stand_where_a_page_has_ink_and_test_typefaces_are_those_of_matplotlib():
    faces = typefaces("test")
    assert faces and all("matplotlib" in face for face in faces)
    for number in range(6):
        pictures, labels = draw_document(document("test", number, "page"), f"look {number}", faces)
        assert pictures.shape == (1, 448, 448, 3) and labels.shape == (1, 32, 32)
        again, _ = draw_document(document("test", number, "page"), f"look {number}", faces)
        assert (pictures == again).all()
        grey = pictures[0].astype(float).mean(-1)
        spread = grey.reshape(32, 14, 32, 14).transpose(0, 2, 1, 3).reshape(32, 32, -1).std(-1)
        inked = labels[0] > 0
        assert 0.05 < inked.mean() < 0.4
        assert np.median(spread[inked]) > 2 * np.median(spread[~inked])


READER = Path(resolve_path("fetched://reader"))


@pytest.mark.slow
@pytest.mark.skipif(not (READER / "pages").is_dir(), reason="no reader here (mmkv-bench fetch model reader)")
@cover.shares(2)
def test_the_stock_processor_writes_the_prompts_and_pictures_of_the_training(share):
    from transformers import AutoProcessor

    from mmkv_bench.datasets.messages import to_prompt
    from mmkv_bench.generation.video_inputs import frames_of, video_arguments
    from tools.train_reader.chats import chat

    processors = {kind: AutoProcessor.from_pretrained(READER / kind) for kind in ("frames", "pages")}
    for task in FORMS_OF:
        processor = processors["frames" if task == "change" else "pages"]
        rows = utils.read(None, {"task": f"reader_{task}"})["dev"]
        for number in cover.turn((0, 3), 0, 1 if task == "value" else share):
            made = trial(task, "dev", number)
            expected = chat(processor.tokenizer, made.paper, made.turns, task == "text")
            prompt = to_prompt(utils.doc_to_messages(rows[number]), task)
            text = processor.apply_chat_template(prompt.messages, add_generation_prompt=True, tokenize=False)
            media: dict = {"images": prompt.images} if prompt.images else {}
            if prompt.videos:
                media = video_arguments(processor, [frames_of(prompt.videos[0], 8)])
            got = processor(text=[text], return_tensors="pt", **media)
            assert got["input_ids"][0].tolist() == expected.ids[: expected.places[-1][0] + 1]
            if task != "text":
                drawn = pictures(task, "dev", number).transpose(0, 3, 1, 2) / 127.5 - 1
                np.testing.assert_allclose(got["pixel_values"][0].numpy(), drawn, atol=1e-6)


@pytest.mark.slow
def test_text_asks_the_questions_of_value_and_a_second_question_follows_an_answer():
    for number in range(20):
        value, text, second = (trial(task, "test", number) for task in ("value", "text", "second"))
        assert value == text and value.turns[-1][1] in " ".join(
            line.text for page in value.paper.pages for line in page
        )
        assert len(second.turns) == 2 and second.turns[0] != second.turns[1]
    rows = utils.read(None, {"task": "reader_second"})["dev"]
    assert [message["role"] for message in utils.doc_to_messages(rows[0])] == ["user", "assistant", "user"]
    assert utils.process_results(rows[0], [f" {rows[0]['answer']} "]) == {"exact_match": 1.0}
    assert utils.process_results(rows[0], [rows[0]["answer"] + "."]) == {"exact_match": 0.0}


def test_tasks_and_budgets_were_committed_before_the_first_row_of_a_test_document():
    """Every commit that made rows of results/reader has them in conf/experiment/reader.yaml, as they are now."""
    import yaml

    from mmkv_bench.store.provenance import file_in_commit
    from mmkv_bench.store.store import Store

    file = "conf/experiment/reader.yaml"
    now = yaml.safe_load((ROOT / file).read_text())
    cells = Store(ROOT / "results" / "reader").cells().to_pandas()
    cells = cells[cells["budget_fraction"].notna()]
    assert not cells["git_dirty"].any() and cells["git_commit"].nunique() > 0
    for commit in cells["git_commit"].unique():
        text = file_in_commit(file, commit)
        if text is None:
            pytest.skip(f"this checkout has no history, or lacks the commit {commit[:8]}")
        then = yaml.safe_load(text)
        for key in ("defaults", "budget", "primary"):
            assert then[key] == now[key]


def test_a_report_draws_the_page_that_was_asked_about_and_no_other():
    from mmkv_bench.datasets.drawn_pages import drawn

    for task, split, number in (("value", "test", 3), ("row", "dev", 0), ("change", "test", 1)):
        question, answer = trial(task, split, number).turns[-1]
        images = drawn(f"reader_{task}-{number:06d}", "", f"<image>\n{question}", answer).images
        assert np.array_equal(np.stack([np.asarray(one) for one in images]), pictures(task, split, number))
        assert drawn(f"reader_{task}-{number:06d}", "", question, f"{answer}?") is None
        assert drawn(f"pages_{task}-{number:06d}", "", question, answer) is None
