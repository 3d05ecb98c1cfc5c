"""Promise: damage of the small files beside the rows is said or changes nothing: notes of what is planned, a judge's answers, an
emptied journal, a store that was fetched in part."""

from __future__ import annotations

import json
import logging
import os

import pytest
from store_examples import cell, metric_row, response, sample_score, write_scores

from mmkv_bench.errors import StoreError
from mmkv_bench.judging.answers import AnswerCache, Reply
from mmkv_bench.judging.questions import Question
from mmkv_bench.store import store_notes
from mmkv_bench.store.store import Store


def flipped(raw: bytes, bit: int) -> bytes:
    return bytes(byte ^ (1 << bit % 8) if at == bit // 8 else byte for at, byte in enumerate(raw))


def test_no_bit_of_what_is_planned_changes_silently(tmp_path, caplog):
    store, cells = Store(tmp_path), {"a" * 16: ("docvqa", 1918), "b" * 16: ("chartqa", 20)}
    store_notes.note_planned(store, cells)
    file = tmp_path / "planned.json"
    raw = file.read_bytes()
    assert store_notes.planned_cells(tmp_path) == cells
    for bit in range(0, len(raw) * 8, 5):
        caplog.clear()
        file.write_bytes(flipped(raw, bit))
        assert store_notes.planned_cells(tmp_path) == {} and "is damaged and was ignored" in caplog.text, bit


def test_no_bit_of_a_judges_answer_changes_what_a_scorer_gets(tmp_path):
    cache = AnswerCache(tmp_path, "judge-7b", "http://judge")
    question = Question(({"role": "user", "content": "Is it right?"},), 0.0, 16)
    cache.put(question, Reply("The answer is yes: 4", "judge-7b-0613"))
    (file,) = tmp_path.rglob("*.json")
    raw = file.read_bytes()
    assert cache.get(question) == "The answer is yes: 4"
    for bit in range(0, len(raw) * 8, 3):
        file.write_bytes(flipped(raw, bit))
        assert cache.get(question) in (None, "The answer is yes: 4"), bit
    record = json.loads(raw)
    file.write_text(json.dumps({name: value for name, value in record.items() if name != "sha256"}))  # an older file
    assert cache.get(question) == "The answer is yes: 4"


def test_an_emptied_journal_is_said(tmp_path, caplog):
    store = Store(tmp_path)
    with caplog.at_level(logging.WARNING):
        writer = store.writer("w")
        writer.commit([response(0)])
        (path,) = store.journals()
        os.close(writer._journal._file)  # killed
        os.truncate(path, 0)
        assert Store(tmp_path).responses().num_rows == 0
        assert "is empty: its writer was killed before the first answer, or the file was emptied" in caplog.text
        caplog.clear()
        Store(tmp_path).recover()
        assert "the lost answers are generated again" in caplog.text and not store.journals()


def test_a_store_that_is_not_whole_does_not_open(tmp_path):
    store = Store(tmp_path)
    store.write_cells([cell("c0")])
    write_scores(store, [sample_score(0, "c0", value=0.5)], [metric_row("c0", value=0.5)])
    with store.writer("w") as writer:
        writer.commit([response(0, "c0")])
    (tmp_path / "store.json").unlink()
    for read in (store.responses, store.cells, store.samples, store.metrics):
        with pytest.raises(StoreError, match="fetched or copied in part. Run the same fetch again"):
            read()
    assert Store(tmp_path / "nothing").responses().num_rows == 0
