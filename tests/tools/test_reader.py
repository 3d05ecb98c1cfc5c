"""Documents of the reader: what training sees is never asked in a test, and a picture's labels say what is drawn."""

from __future__ import annotations

import numpy as np

from tools.reader.documents import FORMS, document
from tools.reader.draw import split_of
from tools.reader.render import draw_document
from tools.reader.typefaces import typefaces


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
